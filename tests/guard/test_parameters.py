"""Parameters that cannot work are refused when a reward is made, by a message that names parameter and value."""

import math
from typing import Any

import pytest

from trl_grpo_ext import load_rewards
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError, RewardError
from trl_grpo_ext.rewards.combinators import Product, Weighted

NAN, INF = math.nan, math.inf
SAME: dict[Any, str] = {1: "think_format", "1": "think_format"}

# The reward, parameters that it needs, and for each parameter values that it refuses.
REFUSED: list[tuple[str, dict[str, Any], dict[str, list[Any]]]] = [
    ("classifier", {"model": "some/model"}, {"model": ["", 5], "label": [True], "sign": [INF], "batch_size": [0]}),
    ("classifier", {"model": "some/model"}, {"device": [0], "text": ["prompt"]}),
    ("json_schema", {"schema": {}}, {"extract": ["first"], "partial": [True], "timeout": [-1]}),
    ("length_target", {"target": 5}, {"target": [-1, 5.0], "mode": ["min"], "alpha": [0], "delta": [1.5]}),
    ("length_target", {"target": 5}, {"column": [""]}),
    ("lines", {}, {"form": ["list"], "relative": [-1], "stop": [-0.1], "ignore_space": [1], "max_characters": [0]}),
    ("json_fields", {}, {"extract": ["all"], "absolute": [-1], "extra": [-0.1], "max_depth": [0]}),
    ("soft_overlong", {"max_completion_length": 100, "cache": 20}, {"cache": [-1, 101, True]}),
    ("soft_overlong", {"max_completion_length": 100, "cache": 20}, {"max_completion_length": [0, "100"]}),
    ("regex_match", {"pattern": "a"}, {"pattern": ["(", b"a", "a{99999999999999}"], "value": [NAN], "count": [0]}),
    ("python_tests", {}, {"partial": [1], "timeout": [0], "memory_mb": [0], "workers": [0]}),
    ("python_tests", {}, {"require": ["files"], "outcomes": [{"error": 0}]}),
    ("tool_use", {}, {"at_most": [-1], "marker": ["", 5], "returned": [NAN]}),
    ("math_accuracy", {}, {"timeout": [0, NAN], "workers": [0], "memory_mb": [1.5], "max_characters": [0]}),
    ("math_accuracy", {}, {"cache": [False], "reasoning_delimiters": [[], "</think>", [""], ["</think>", None], 3]}),
    ("gated", {"reward": "think_format", "gate": "think_format"}, {"threshold": ["1", INF], "otherwise": [True]}),
    ("weighted", {"rewards": ["think_format"]}, {"weights": [[1.0, 2.0], 2.0, [True], [NAN]]}),
    ("per_column", {"column": "t", "rewards": {"a": "think_format"}}, {"column": [""]}),
    ("per_column", {"column": "t", "rewards": {"a": "think_format"}}, {"rewards": [{}, SAME]}),
]


@pytest.mark.parametrize(("name", "needed", "refused"), REFUSED, ids=[f"{row[0]} {[*row[2]]}" for row in REFUSED])
def test_a_value_that_cannot_work_is_refused(name: str, needed: dict[str, Any], refused: dict[str, list[Any]]) -> None:
    load_rewards([{"name": name, **needed}])
    for parameter, values in refused.items():
        for value in values:
            with pytest.raises((ConfigurationError, PluginParameterError)) as caught:
                load_rewards([{"name": name, **needed, parameter: value}])
            assert parameter in str(caught.value), (parameter, value)


def test_parameters_that_cannot_work_together_are_refused() -> None:
    for selection in (
        {"name": "tool_use", "returned": 0, "failed": 0},
        {"name": "math_accuracy", "outcomes": {"scored": 1.0}},
        {"name": "gsm8k_accuracy", "outcomes": {"wrong": INF}},
    ):
        with pytest.raises((ConfigurationError, PluginParameterError)):
            load_rewards([selection])
    for wrong in ([], "think_format", ["think_format"], [Product]):
        with pytest.raises(ConfigurationError, match="rewards"):
            Weighted(wrong)  # type: ignore[arg-type]


NEEDED: list[tuple[str, dict[str, Any], str]] = [
    ("gsm8k_accuracy", {}, "answer"),
    ("math_accuracy", {}, "solution"),
    ("python_tests", {}, "tests"),
    ("json_schema", {}, "schema"),
    ("lines", {}, "lines"),
    ("length_target", {}, "target_length"),
    ("soft_overlong", {"max_completion_length": 9, "cache": 0}, "completion_ids"),
    ("per_column", {"column": "t", "rewards": {"a": "think_format"}}, "t"),
]


@pytest.mark.parametrize(("name", "parameters", "column"), NEEDED, ids=[row[0] for row in NEEDED])
def test_columns_missing_or_short_are_named(name: str, parameters: dict[str, Any], column: str) -> None:
    [reward] = load_rewards([{"name": name, **parameters}])
    columns: dict[str, Any] = {"prompts": ["?"] * 2, "completions": ["x", "y"], "completion_ids": [[1]] * 2}
    columns |= {"trainer_state": None, column: None}
    with pytest.raises(RewardError, match=rf"'{column}'.*\['other'\]"):
        reward(**columns, other=[1, 2])
    for given in (["x"], 18, (number for number in "12"), {"a": 1, "b": 2}, "18"):
        with pytest.raises(RewardError, match=f"'{column}'"):
            reward(**{**columns, column: given})
