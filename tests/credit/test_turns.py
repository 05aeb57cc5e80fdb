"""Turns of conversations with tools, through real chat templates and TRL's own tool loop."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from tests.contexts import make_rollout
from tests.credit.template_turns import FAMILIES, Family, tokenizer_of
from tests.support import arguments
from tests.trainer.support import Watch
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.credit.turns import is_tool_error, read_turns, true_runs
from trl_grpo_ext.errors import AlignmentError
from trl_grpo_ext.types import END, Part, Parts, Place, Rollout, Turn

LIMIT = 1600
HARD = "naïve ﷽ 你好 שלום 👩‍👩‍👧 e\u0301"


def tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """With a docstring that names the parameters, as TRL asks of a tool."""
    names = inspect.signature(function).parameters
    function.__doc__ = "\n".join(["A tool.", "", "Args:", *(f"    {name}: What it takes." for name in names)])
    return function


@tool
def add(a: int, b: int) -> int:
    return a + b


@tool
def divide(a: int, b: int) -> float:
    return a / b


@tool
def echo(text: str) -> str:
    return text * 400 if text == "flood" else text


@tool
async def later(text: str) -> str:
    if text == "never":
        raise ValueError('it\'s "never"')
    return text


Said = tuple[str, list[tuple[str, dict[str, Any]]]]
SCRIPTS: list[list[Said | str]] = [
    [("", [("add", {"a": 2, "b": 3})]), ("it is 5.", [])],
    [
        ("Both at once.", [("add", {"a": 2, "b": 3}), ("divide", {"a": 1, "b": 0}), ("nobody", {"a": 1})]),
        ("Again.", [("add", {"a": 1, "b": 1})]),
        ("2", []),
    ],
    [(HARD, [])],
    [*[(f"{HARD} {n}", [("echo", {"text": f"{n} {HARD}"})]) for n in range(4)], ("done", [])],
    ["broken"],
    [("", [("echo", {"text": "hm"})]), ("", [])],
    [("", [("echo", {"text": "and"})]), "cut"],
    [("Same. And Same.", [("later", {"text": "b"}), ("echo", {"text": "a"})]), ("Same.", [])],
    [("Too much.", [("echo", {"text": "flood"})])],
    [("Wait.", [("later", {"text": "ok"}), ("later", {"word": "bad"})]), ("y", [])],
    [("Wait.", [("later", {"text": "never"}), ("later", {"text": "never"})]), ("  spaced  ", [])],
    [("", [])],
]
OUTCOMES = {
    0: [["returned"], []],
    1: [["returned", "raised", "raised"], ["returned"], []],
    5: [["returned"], []],
    6: [["returned"], []],
    7: [["returned", "returned"], []],
    8: [["unanswered"]],
    9: [["unknown", "unknown"], []],
    10: [["raised", "raised"], []],
}


class Scripted(GRPOExtTrainer):
    """TRL's tool loop, and a model that writes what it is given; it keeps what was written where."""

    scripts: list[list[list[int]]]

    def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **keywords: Any) -> Any:
        if not hasattr(self, "wrote"):
            self.wrote: list[list[tuple[int, list[int]]]] = [[] for _ in prompt_ids]
            self.begun = [list(ids) for ids in prompt_ids]
            self.so_far = [list(ids) for ids in prompt_ids]
            rows = list(range(len(prompt_ids)))
        else:
            rows = [self._row_of(ids) for ids in prompt_ids]
        new = []
        for row, ids in zip(rows, prompt_ids, strict=True):
            said = self.scripts[row][len(self.wrote[row])][: self.max_completion_length]
            self.wrote[row].append((len(ids) - len(self.begun[row]), said))
            self.so_far[row] = [*ids, *said]
            new.append(list(said))
        return new, None

    def _row_of(self, ids: list[int]) -> int:
        unfinished = [row for row, wrote in enumerate(self.wrote) if len(wrote) < len(self.scripts[row])]
        (row,) = [row for row in unfinished if ids[: len(self.so_far[row])] == self.so_far[row]]
        return row


def per_turn(completions: list[Any], **columns: Any) -> list[float]:
    """1, 2, 4 ... for the turns, but nothing for a completion of one."""
    counts = [sum(message["role"] == "assistant" for message in completion) for completion in completions]
    rows = [{f"turn {k}": (2.0**k, Place(turn=k)) for k in range(count)} for count in counts]
    return [Parts(row) if len(row) > 1 else 0.25 for row in rows]


def first_letters(completions: list[Any], **columns: Any) -> list[float]:
    """A part with the first letter of every assistant message, and one with the last letter of the last."""
    scores = []
    for completion in completions:
        texts = [message["content"] for message in completion if message["role"] == "assistant"]
        firsts = [Place(0, 1, turn) for turn, text in enumerate(texts) if text]
        said = [text for text in texts if text.strip()]
        last = [Place(len(said[-1]) - 1, len(said[-1]))] if said else []
        scores.append(Parts({"first": (1.0, firsts), "last": (8.0, last)}, 1.0))
    return scores


def written(family: Family, tokenizer: Any, said: Said | str) -> list[int]:
    if said == "broken":
        text = family.broken + family.end
    elif said == "cut":
        text = "never ending " * LIMIT
    else:
        assert not isinstance(said, str)
        text = family.write(*said) + family.end
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def conversations(family: Family) -> list[list[Said | str]]:
    if family.parallel:
        return SCRIPTS
    return [[turn if isinstance(turn, str) else (turn[0], turn[1][:1]) for turn in turns] for turns in SCRIPTS]


def run_scripts(family: Family, folder: Path, **settings: Any) -> tuple[Scripted, Rollout]:
    tokenizer = tokenizer_of(family)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    hook = Watch()
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{n}?"}] for n in range(3)]})
    settings |= {"max_completion_length": LIMIT, "max_steps": 1, "per_device_train_batch_size": 12}
    trainer = Scripted(
        LlamaForCausalLM(config),
        [per_turn, first_letters],
        arguments(folder, advantage_hooks=None, **settings),
        train_dataset=data,
        processing_class=tokenizer,
        tools=[add, divide, echo, later],
        advantage_hooks=[hook],
    )
    trainer.scripts = [[written(family, tokenizer, said) for said in turns] for turns in conversations(family)]
    trainer.train()
    (rollout,) = hook.rollouts
    return trainer, rollout


OTHERS = [pytest.param(name, False, marks=pytest.mark.slow) for name in FAMILIES if name != "qwen3"]


@pytest.mark.parametrize(("name", "masks_truncated"), [*OTHERS, ("qwen3", False), ("qwen3", True)])
def test_turns_of_a_template(name: str, masks_truncated: bool, tmp_path: Path) -> None:
    family = FAMILIES[name]
    trainer, rollout = run_scripts(family, tmp_path, mask_truncated_completions=masks_truncated)
    tokenizer = trainer.processing_class
    calls = failures = 0
    for row, wrote in enumerate(trainer.wrote):
        ids = rollout.completion_ids_B_T[row][rollout.completion_mask_B_T[row] > 0].tolist()
        # The oracle: what the model was asked to go on from, and what it then wrote, one turn after the other.
        expected = [-1] * rollout.turns_B_T.size(1)
        texts = []
        for number, (place, said) in enumerate(wrote):
            said = said[: LIMIT - place]
            assert ids[place : place + len(said)] == said
            expected[place : place + len(said)] = [number] * len(said)
            texts.append(tokenizer.decode(said, skip_special_tokens=True))
        assert rollout.turns_B_T[row].tolist() == expected
        turns = rollout.turns(row)
        assert [turn.text for turn in turns] == texts
        for turn, (place, said) in zip(turns, wrote, strict=True):
            assert turn.tokens == (place, place + len(said[: LIMIT - place]))
            assert rollout.texts[row][slice(*turn.characters)] == turn.text
            after = wrote[turn.number + 1][0] if turn.number + 1 < len(wrote) else len(ids)
            assert turn.observation == tokenizer.decode(ids[turn.tokens[1] : after], skip_special_tokens=True)
        check_messages(rollout, row, turns)
        if family.parallel and row in OUTCOMES:
            assert [[call.outcome for call in turn.calls] for turn in turns] == OUTCOMES[row]
        run = [call for turn in turns for call in turn.calls if call.outcome in ("returned", "raised")]
        calls += len(run)
        failures += sum(call.failed for call in run)
        check_calls(turns)
    check_spans(rollout)
    if family.parallel:  # of the two that are unknown one raised; and one was run, and its result rolled back
        (logs,) = [log for log in trainer.state.log_history if "tools/failure_frequency" in log]
        assert calls + 3 == round(12 * logs["tools/call_frequency"]) == 18
        assert (failures + 1) / (calls + 3) == pytest.approx(logs["tools/failure_frequency"])


def check_messages(rollout: Rollout, row: int, turns: Any) -> None:
    """Each message's content stands where it is said to, and its calls are those that TRL parsed."""
    said = [message for message in rollout.completions[row] if message["role"] == "assistant"]
    for message, turn in zip(said, turns, strict=True):
        assert rollout.texts[row][slice(*turn.content)] == message["content"]
        start, end = turn.characters
        assert start <= turn.content[0] <= turn.content[1] <= end
        if made := message.get("tool_calls"):
            assert [(call.name, call.arguments) for call in turn.calls] == [
                (call["function"]["name"], call["function"]["arguments"]) for call in made
            ]


def check_calls(turns: Any) -> None:
    """The result of a call is the tool's own."""
    for call in (call for turn in turns for call in turn.calls):
        if call.outcome == "returned":
            tool = {"add": add, "divide": divide, "echo": echo}.get(call.name)
            assert call.result == (str(tool(**call.arguments)) if tool else call.arguments["text"])
        elif call.outcome == "raised":
            assert is_tool_error(call.result)
        else:
            assert call.result is None


def check_spans(rollout: Rollout) -> None:
    letters, values = rollout.parts["first_letters"], rollout.parts["per_turn"]
    wrote_2_B_T = torch.stack([letters.tokens(part) for part in (0, 1)])
    for row, completion in enumerate(rollout.completions):
        texts = [message["content"] for message in completion if message["role"] == "assistant"]
        wrote = [of_row.nonzero().flatten().tolist() for of_row in wrote_2_B_T[:, row]]
        first, last = ([rollout.texts[row][slice(*rollout.offsets(row)[token])] for token in of] for of in wrote)
        expected = [text[0] for text in texts if text]
        assert len(first) >= len(expected)
        assert all(letter in said for letter, said in zip(expected, first, strict=False))
        said = [text for text in texts if text.strip()]
        assert bool(said) == bool(last)
        assert not said or said[-1][-1] in "".join(last)
        turns, scores_M = rollout.turns(row), values.scores_B_M[row]
        several = len(turns) > 1
        assert scores_M[~scores_M.isnan()].tolist() == ([2.0**k for k in range(len(turns))] if several else [])
        places = [one[1:] for one in values.ranges_R_4.tolist() if one[0] == row]
        assert places == ([[turn.number, *turn.tokens] for turn in turns] if several else [])


def test_true_runs_by_hand() -> None:
    rows = [[1, 1, 0, 1, 0, 0], [0, 1, 0, 1, 1, 0], [0] * 6, [1] * 6, []]
    runs = [true_runs([bool(one) for one in row]) for row in rows]
    assert runs == [[(0, 2), (3, 4)], [(1, 2), (3, 5)], [], [(0, 6)], []]


def test_what_a_tool_error_is() -> None:
    for error in ("", "it's", 'say "no"', "it's \"both\" \\ \n {'error'", "}"):
        assert is_tool_error(str({"error": error}))
    texts = ("5", "{'error': 5}", "{'error': 'a', 'b': 'c'}", "{'error': 'a'} 'b'}", "x{'error': 'a'}")
    assert not any(map(is_tool_error, [*texts, ["x"], None]))
    assert not is_tool_error("{'error': '" + "\\" * 100_001 + "'}")  # no end of the string; and no time is lost


MESSAGES = [
    {"role": "assistant", "content": "one"},
    {"role": "tool", "name": "t", "content": "x"},
    {"role": "assistant", "content": "two"},
]


def turns_of(completion: Any, wrote: list[bool], text: str) -> list[Turn]:
    return read_turns(wrote, completion, text, [(i, i + 1) for i in range(len(text))])


def test_other_turns_than_messages_are_refused() -> None:
    for wrote, turns in (([True] * 7, 1), ([True, False, True, False, True, True, True], 3)):
        with pytest.raises(AlignmentError, match=f"2 assistant messages, but its tokens have {turns} turns"):
            turns_of(MESSAGES, wrote, "onextwo")
    # A rollout function's one message of everything says nothing about turns; the mask does.
    one = [{"role": "assistant", "content": "onextwo"}]
    first, second = turns_of(one, [True] * 3 + [False] + [True] * 3, "onextwo")
    assert (first.text, first.observation, second.text, first.content) == ("one", "x", "two", None)
    assert placed([Place(0, 2)], [first, second], one, "onextwo", wrote=[1, 1, 1, 0, 1, 1, 1]) == [(0, 2)]


def placed(places: list[Place], turns: list[Turn], completion: Any, text: str, wrote: list[int]) -> list[Any]:
    """The tokens, of one character each, of places in the second of two completions."""
    live_B_T = torch.tensor([[1.0] * len(text), [float(one) for one in wrote]]).double()
    rollout = make_rollout(
        [len(text)] * 2,
        tool_mask_B_T=live_B_T,
        texts=[text] * 2,
        completions=[completion] * 2,
        turns=lambda row: turns,
        parts={"r": [None, Parts([Part("a", 1.0, places=places)])]},
    )
    return [tuple(found[2:]) for found in rollout.parts["r"].ranges_R_4.tolist() if found[:2] == [1, 0]]


def test_a_content_without_a_place_of_its_own_is_refused() -> None:
    rewritten = [{**MESSAGES[0], "content": "o"}, *MESSAGES[1:]]
    wrote = [True] * 3 + [False] + [True] * 3
    turns = turns_of(rewritten, wrote, "oooxtwo")
    assert [turn.content for turn in turns] == [None, (4, 7)]  # "o" stands there three times
    where: Any = (turns, rewritten, "oooxtwo", [1, 1, 1, 0, 1, 1, 1])
    assert placed([Place(0, 1, 1), Place(1, 2)], *where) == [(4, 5), (5, 6)]
    assert placed([Place(turn=0)], *where) == [(0, 3)]
    for place, which in ((Place(0, 1, 0), "message 0"), (Place(0, 1, 2), "turn 2"), (Place(turn=2), "turn 2")):
        with pytest.raises(AlignmentError, match=which):
            placed([place], *where)
    assert placed([Place(turn=0), END], *where) == [(0, 3), (6, 7)]
