"""`recipes/reasoning_gym_grpo.py`: its problems, and a short run of the tiny and of the real model."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.launching import MODEL, RECIPES, options, trained
from trl_grpo_ext.rewards.reasoning_gym import ReasoningGym

pytest.importorskip("reasoning_gym", reason="the extra `reasoning_gym` is not installed")

from procedural import task

SCRIPT = RECIPES / "reasoning_gym_grpo.py"
SUMS = {"name": "chain_sum", "weight": 3, "max_terms": 2, "max_digits": 1}


def asked(rows: list[dict[str, Any]]) -> set[str]:
    return {row["prompt"][-1]["content"] for row in rows}


def test_mixture_holds_problems_out() -> None:
    tasks = [SUMS, "{name: gcd, max_value: 30}"]
    train, held_out = task.make_problems(tasks, (800, 40), 1, examples=2, extract="answer")
    assert Counter(row["task"] for row in held_out) == {"chain_sum": 30, "gcd": 10}
    assert len(train) > 600 > 200 >= sum(row["task"] == "gcd" for row in train) > 150
    assert not asked(train) & asked(held_out)
    other_train, same = task.make_problems(tasks, (800, 40), 2, examples=2, extract="answer")
    assert same == held_out
    # The package draws problem i of seed s as problem i - 1 of seed s + 1; here seeds are apart.
    assert [row["answer"] for row in other_train[:200]] != [row["answer"] for row in train[1:201]]
    plain = task.make_problems([SUMS], (8, 8), 1, examples=1, extract="whole", chat=False)[0][0]
    assert plain["prompt"].count("arithmetic problem") == 2
    shown = {message["content"] for row in train for message in row["prompt"][1:-1]}
    assert len(shown) <= 8
    assert "</answer>" in train[0]["prompt"][2]["content"]
    right = [f"so <answer>{row['answer']}</answer>" for row in held_out]
    columns = {name: [row[name] for row in held_out] for name in ("task", "entry", "config")}
    assert ReasoningGym(extract="answer")(right, **columns) == [1.0] * 40
    solved = task.Solved("gcd", "answer")([*right[:-1], "<answer>no</answer>"], **columns)
    expected = [1.0 if name == "gcd" else None for name in columns["task"]]
    assert solved == [*expected[:-1], 0.0 if expected[-1] else None]


WORDS = options(max_steps=1, per_device_train_batch_size=8, num_generations=4, per_device_eval_batch_size=4)
WORDS += options(eval_problems=8, train_problems=16, max_completion_length=8, save_strategy="no")


@pytest.mark.slow
def test_a_short_run_measures_each_task(tmp_path: Path) -> None:
    tiny = ["--model_name_or_path", str(MODEL), "--dtype", "float32", "--bf16", "false", "--examples", "0"]
    metrics = trained(SCRIPT, tmp_path, *WORDS, *tiny, "--tasks", json.dumps(SUMS), "gcd").metrics
    for which in ("before", "after"):
        assert {"reasoning_gym", "solved_chain_sum", "solved_gcd"} <= metrics[which].keys()
    assert metrics["run"]["recipe"]["tasks"] == [json.dumps(SUMS), "gcd"]
