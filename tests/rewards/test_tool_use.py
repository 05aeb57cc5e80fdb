"""`tool_use`."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from tests.credit.template_turns import FAMILIES, tokenizer_of
from tests.credit.test_turns import Scripted, echo, written
from tests.support import SIZES, arguments
from trl_grpo_ext.rewards.tool_use import ToolUse
from trl_grpo_ext.types import Parts, Place

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
FAILED = "{'error': \"add() missing 1 required positional argument: 'b'\"}"


def says(content: str, calls: int = 0, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": [CALL] * calls} if calls else {}), **more}


def answers(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "tool", "name": "add", "content": content} for content in contents]


CONVERSATIONS: list[Any] = [
    [says("", 2), *answers("4", FAILED), says("", 1), *answers("5"), says("9")],
    [says("", 2)],  # neither was run
    [says('<tool_call>{"name": ')],
    "It is 4.",
    [],
    [says("", 1), *answers(FAILED), says("", 3), *answers("1", "2", [{"type": "text", "text": "3"}])],
]


def turns(reward: Any, completions: list[Any] = CONVERSATIONS, **more: Any) -> list[tuple[float, ...]]:
    scores = reward(prompts=["?"] * len(completions), completions=completions, **more)
    assert all(isinstance(score, Parts) for score in scores)
    assert [*map(float, scores)] == pytest.approx([sum(part.score for part in one.parts) for one in scores])
    assert all(part.places == (Place(turn=turn),) for score in scores for turn, part in enumerate(score.parts))
    return [tuple(part.score for part in score.parts) for score in scores]


def test_tool_use_by_hand() -> None:
    reward = ToolUse(returned=1.0, failed=-10.0, made=100.0)
    assert turns(reward) == [(191.0, 101.0, 0.0), (180.0,), (90.0,), (0.0,), (), (90.0, 303.0)]
    assert turns(ToolUse(returned=1.0, failed=-10.0, unanswered=0.0, marker=None))[1:3] == [(0.0,), (0.0,)]
    limited = turns(ToolUse(returned=1.0, failed=-10.0, unanswered=-2.0, at_most=2))
    assert limited == [(-9.0, 0.0, 0.0), (-4.0,), (-10.0,), (0.0,), (), (-10.0, 1.0)]
    logged: dict[str, float] = {}
    turns(reward, log_metric=logged.__setitem__)
    shares = {"calls": 10, "returned": 5, "failed": 3, "unanswered": 2}
    assert logged == {f"tool_use/{what}": pytest.approx(count / 6) for what, count in shares.items()}


def test_a_user_or_system_message_answers_no_call() -> None:
    others = [[{"role": role, "content": "hm"}] for role in ("user", "system", "developer", "ipython")]
    completions = [[says("", 1), *after] for after in ([], *others, [*answers("4"), *others[0]])]
    assert turns(ToolUse(), completions) == [*[(-0.1,)] * 4, (0.1,), (0.1,)]


def fail(text: str) -> str:
    """Raise an error.

    Args:
        text: How it begins.
    """
    raise ValueError(text * 400)


def tool_log(name: str, script: Any, folder: Path, reward: ToolUse) -> dict[str, float]:
    """What is logged of four completions that say the same, and then `so.`, through TRL's own tool loop."""
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 8192}
    settings = {"max_completion_length": 700, "max_steps": 1, "per_device_train_batch_size": 4}
    trainer = Scripted(
        LlamaForCausalLM(LlamaConfig(**sizes)),
        [reward],
        arguments(folder, **settings),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "?"}]]}),
        processing_class=tokenizer,
        tools=[fail, echo],
    )
    own = [script if script == "broken" else (f"{row}:", script[1]) for row in range(4)]  # so that rows differ
    trainer.scripts = [[written(family, tokenizer, said) for said in (first, ("so.", []))] for first in own]
    trainer.train()
    log: dict[str, float] = trainer.state.log_history[0]
    return log


CASES: dict[str, tuple[Any, tuple[int, int, int, int]]] = {
    "returned": (("", [("echo", {"text": "z"})]), (1, 1, 0, 0)),
    "broken": ("broken", (1, 0, 1, 0)),
}
MARKERS = {"qwen2_5": "<tool_call>", "llama3_1": '{"name"', "mistral": '[{"name"'}  # without special tokens


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MARKERS)
@pytest.mark.slow
def test_tool_use_through_chat_templates(name: str, case: str, tmp_path: Path) -> None:
    """A beginning of a call that cannot be parsed is found by the marker of the model's own form."""
    script, expected = CASES[case]
    log = tool_log(name, script, tmp_path, ToolUse(marker=MARKERS[name]))
    assert tuple(log[f"tool_use/{what}"] for what in ("calls", "returned", "failed", "unanswered")) == expected


@pytest.mark.parametrize(("tool", "text", "failed"), [("fail", "long", 0), ("echo", "z" * 900, 1)], ids=["long", "cut"])
def test_no_call_escapes_near_the_end_of_the_budget(tool: str, text: str, failed: int, tmp_path: Path) -> None:
    """Through TRL's own tool loop, which takes back what does not fit and forgets whether it was an error."""
    log = tool_log("qwen3", ("", [(tool, {"text": text})]), tmp_path, ToolUse())
    found = tuple(log[f"tool_use/{name}"] for name in ("calls", "returned", "failed", "unanswered"))
    assert found == (1, 0, failed, 1 - failed)
    assert log["rewards/tool_use/mean"] == pytest.approx(-0.1)


ODD_CALLS: list[Any] = [
    *(None, "add", 7, {}, {"function": CALL["function"]}, [None, 3, "add", []], [{"function": None}, {"function": 0}]),
    [{}, {"name": None}, {"function": {}}, {"function": {"name": ["add"], "arguments": object()}}],
]


def test_calls_of_any_kind_are_counted_or_left_out_and_none_raises() -> None:
    completions = [[says("", tool_calls=calls), *answers("1", None, FAILED)] for calls in ODD_CALLS]
    completions += [[{"tool_calls": [CALL]}, {"role": "tool"}], [says("", 1), {"role": None}, {"content": 3}, None]]
    scores = turns(ToolUse(returned=1.0, failed=-10.0, made=100.0), completions)
    assert scores == [(0.0,)] * 7 + [(382.0,), (101.0,), (101.0, 0.0)]
