"""`recipes/tools_grpo.py`: its task, its supervised start, and a short run as a person starts it."""

import random
import sys
from pathlib import Path

from common import supervised

import pytest
import tools_grpo
from calculator import task

from tests.recipes.launching import RECIPES, options, trained
from trl_grpo_ext.records.manifest import FILE

SCRIPT = RECIPES / "tools_grpo.py"


def test_the_calculator() -> None:
    sums = {"3*4+5": 17, "5-3*4": -7, "2*3*4": 24, "10-3-4": 3, "7+8": 15}
    assert {text: task.calc(text) for text in sums} == sums
    for text in ("3*", "", "3/4", "2**9", "9" * 7 + "+1", "1+" * 9 + "1", "3 + 4", "__import__('os')"):
        with pytest.raises(ValueError, match="sum"):
            task.calc(text)


def test_problems_are_right_and_the_held_out_ones_are_others() -> None:
    train, held_out = (task.draw_problems(split, 400, 0) for split in ("train", "heldout"))
    assert train == task.draw_problems("train", 400, 0)
    assert not {problem.question for problem in train} & {problem.question for problem in held_out}
    for problem in [*train, *held_out]:
        first, second = (task.calc(one) for one in problem.sums)
        assert second == problem.answer >= 0
        assert str(first) in problem.sums[1]
        assert problem.row()["answer"] == f"#### {problem.answer}"


def test_what_is_written_is_what_trls_template_makes_of_it() -> None:
    tokenizer = task.load_tokenizer(task.EMBEDDED)
    problem = task.draw_problem("train", random.Random(0))
    messages = list(problem.row()["prompt"])
    for one in problem.sums:
        call = {"type": "function", "function": {"name": "calc", "arguments": {"sum": one}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "calc", "content": str(task.calc(one))})
    messages.append({"role": "assistant", "content": f"#### {problem.answer}"})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False)
    assert rendered == prompt + "".join(text for text, _ in task.right_calls(problem))
    batch = supervised.encode(tokenizer, [(problem.row()["prompt"], task.right_calls(problem))])
    learnt = batch["input_ids"][batch["labels"] != supervised.IGNORE]
    ours = "".join(text for text, is_ours in task.right_calls(problem) if is_ours)
    assert tokenizer.decode(learnt) == ours


@pytest.mark.slow
def test_a_short_run_leaves_what_its_siblings_leave(tmp_path: Path) -> None:
    words = options(supervised_steps=2, max_steps=2, per_device_train_batch_size=16, per_device_eval_batch_size=8)
    words += options(eval_problems=8, train_problems=16, max_completion_length=24, save_steps=2)
    metrics = trained(SCRIPT, tmp_path, *words).metrics
    for which in ("before", "after"):
        assert {"gsm8k_accuracy", "tool_use", "calls per completion", "share of failed calls"} <= metrics[which].keys()
    assert metrics["run"]["recipe"]["credit"] == "turns"
    assert list((tmp_path / "output" / "token_records").glob("*.parquet"))
    assert "turn_rewards" in (tmp_path / "output" / FILE).read_text()


def test_the_credit_is_a_selection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["tools_grpo.py", "--output_dir", str(tmp_path), "--use_cpu", "--credit"]
    for credit, hooks in (("turns", ["turn_rewards"]), ("outcome", [])):
        monkeypatch.setattr(sys, "argv", [*words, credit])
        recipe, args, _ = tools_grpo.parse()
        assert recipe.credit == credit
        assert [hook["name"] for hook in args.advantage_hooks or ()] == hooks
