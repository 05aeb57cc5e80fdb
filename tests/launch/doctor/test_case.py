"""Plugins are built and the broken ones named; the prompts are counted."""

from pathlib import Path
from typing import Any

import pytest

from tests.launch.doctor.cases import case
from trl_grpo_ext.launch.doctor.case import load_plugins, prompts_of


def test_the_data_are_counted(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    run = case(own={"dataset_path": str(data)}).run
    data.write_text('{"question": "a", "answer": "1"}\n' * 40 + "\n")
    assert prompts_of(run) == 40
    data.unlink()
    assert prompts_of(run) is prompts_of(case(own={"dataset_path": "a.csv"}).run) is None


def test_a_plugin_that_does_not_load_is_named_with_all_the_others() -> None:
    settings = {
        "rewards": ["gsm8k_accuracy", "gsm8k_acuracy", {"name": "length_target", "no_such": 1}],
        "advantage_hooks": ["leave_one_out", "os.path:join"],
        "loss_aggregation": {"name": "tail_mean", "alpha": "x"},
    }
    plugins = load_plugins(case(**settings).run)
    assert list(plugins.rewards) == ["gsm8k_accuracy"]
    assert list(plugins.hooks) == ["leave_one_out"]
    assert plugins.aggregation is None
    assert [problem.severity for problem in plugins.problems] == ["error"] * 4
    everything = " ".join(problem.message for problem in plugins.problems)
    assert all(word in everything for word in ("Did you mean 'gsm8k_accuracy'", "no_such", "os.path", "tail_mean"))
    assert load_plugins(case(rewards=["none"], loss_aggregation="none").run).problems == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"resample": {"filter": {"name": "accuracy_between", "lowest": 0.1}}}, "lowest"),
        ({"resample": "{filter: signl}"}, "Did you mean 'signal'"),
        ({"resample": {"filter": "signal", "max_round": 2}}, "max_round"),
        ({"advantage_hooks": ["centred", "leave_one_out"]}, "both estimators"),
        ({"advantage_hooks": ["whiten"], "resample": "signal"}, "reads advantages"),
        ({"resample": "none"}, ""),
        ({"advantage_hooks": ["leave_one_out"], "resample": "{filter: {name: accuracy_between, low: 0.1}}"}, ""),
    ],
)
def test_filters_are_built_and_what_the_chain_refuses_is_a_problem(settings: dict[str, Any], words: str) -> None:
    problems = load_plugins(case(**settings).run).problems
    assert [problem.severity for problem in problems] == ["error"] * bool(words), problems
    assert words in "".join(problem.message for problem in problems)
