"""What aggregations refuse, and that the message says what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.aggregation.batches import completion, rollout_of, totals_of
from tests.contexts import make_rollout, mask_of, padded
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError

NAN, INF = float("nan"), float("inf")

REFUSED: list[tuple[str, str, list[Any], str]] = [
    ("constant_length", "length", [0, -3, 2.5, True, "8"], "whole number, 1 or more"),
    ("length_power", "alpha", [-0.1, NAN, INF, True, "1", None], "finite number that is not negative"),
    ("length_power", "normalize", [0, 1, "yes", None], "must be true or false"),
    ("sign_balanced", "over", ["prompt", "", None, True, ["group"]], "'group' or 'batch'"),
    ("length_softmax", "lam", [NAN, -INF, True, "1", None], "finite number"),
    ("length_softmax", "r", [0, -0.1, NAN, INF, True, "0.1"], "positive number"),
    ("difficulty_weighted", "low", [NAN, True, "0.4", None], "finite number"),
    ("difficulty_weighted", "low", [-0.1], "not negative"),
    ("difficulty_weighted", "high", [0.3], "at least low, 0.4"),
    ("difficulty_weighted", "high", [INF, False], "finite number"),
    ("difficulty_weighted", "midpoint", [NAN, True, "half"], "finite number"),
    ("difficulty_weighted", "steepness", [0, -1], "a positive number"),
    ("difficulty_weighted", "threshold", [NAN, None], "finite number"),
    ("difficulty_weighted", "reward", [1, True, ["solved"]], "text that is not empty"),
    ("tail_mean", "fraction", [0, -0.5, 1.01, NAN, INF, True, "0.5", None], "greater than 0 and at most 1"),
    ("power_mean", "p", [0.99, 0, -2, NAN, INF, True, "2", None], "at least 1"),
]


@pytest.mark.parametrize(
    ("name", "parameter", "value", "says"),
    [
        pytest.param(name, parameter, value, says, id=f"{name}-{parameter}-{value}")
        for name, parameter, values, says in REFUSED
        for value in values
    ],
)
def test_bad_values_are_refused_by_name(name: str, parameter: str, value: Any, says: str) -> None:
    with pytest.raises((ConfigurationError, PluginParameterError), match=says) as caught:
        load_loss_aggregation({"name": name, parameter: value})
    assert f"{name}: {parameter} must" in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["prompt_mean", "prefix_share", "token_sum", "token_mean_step", "token_mean"])
def test_those_without_parameters_take_none(name: str) -> None:
    with pytest.raises(PluginParameterError):
        load_loss_aggregation({"name": name, "alpha": 1})


def test_difficulty_weighted_lists_the_rewards_there_are() -> None:
    aggregation = load_loss_aggregation({"name": "difficulty_weighted", "reward": "correct"})
    with pytest.raises(ConfigurationError, match="no reward function 'correct'; it has solved, style"):
        flow.token_weights(aggregation, rollout_of([completion([1.0], advantage=1.0)]))


def test_length_softmax_refuses_a_group_too_large_for_r() -> None:
    # r √(G-1) = 0.5 · √4 = 1: one completion of no tokens among five long ones would have h = 0.
    aggregation = load_loss_aggregation({"name": "length_softmax", "r": 0.5})
    with pytest.raises(ConfigurationError, match=r"r=0.5 is too large for groups of 5 .* Lower r below 0.5"):
        flow.token_weights(aggregation, make_rollout([1, 5, 5, 5, 5]))
    assert flow.token_weights(aggregation, make_rollout([1, 5, 5, 5])).sum() > 0


def test_length_softmax_takes_groups_of_one() -> None:
    aggregation = load_loss_aggregation({"name": "length_softmax", "r": 100})
    assert flow.token_weights(aggregation, make_rollout([2])).tolist() == [[0.5, 0.5]]


def test_token_mean_step_needs_the_totals_of_a_step() -> None:
    aggregation = load_loss_aggregation("token_mean_step")
    assert aggregation.needs_step_totals is True  # by which the trainer knows
    totals = replace(totals_of([completion([1.0])]), step=None)
    with pytest.raises(ConfigurationError, match=r"token_mean_step: totals.step is None.* use token_mean"):
        flow.reduced_loss(aggregation, padded([[1.0]]), mask_of([1]), totals)
