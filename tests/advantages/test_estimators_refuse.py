"""What the sequence-level estimators refuse: parameters out of range, and rewards that they cannot take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError, PluginParameterError
from trl_grpo_ext.types import Rollout

NAN, INF = math.nan, math.inf

REFUSED: list[tuple[str, str, list[Any], str]] = [
    ("normalised", "epsilon", [0, -1e-4, NAN, INF, True, "1e-4", None], "positive number"),
    ("normalised", "std_floor", [-0.1, NAN, INF, True, "0.1", None], "number that is not negative"),
    ("batch_whitening", "std_floor", [0, -0.1, NAN, INF, True, "0.1", None], "positive number"),
    ("batch_whitening", "baseline", ["prompt", "", True, None, ["group"]], "'group' or 'batch'"),
    ("pass_at_k", "k", [0, -1, 2.0, 2.5, True, "2", None, NAN], "whole number of at least 1"),
    ("pass_at_k", "threshold", [NAN, INF, -INF, False, "0.5", None], "finite number"),
    ("sign_scaling", "positive", [-0.1, NAN, INF, True, "1", None], "finite number that is not negative"),
    ("sign_scaling", "negative", [-1, NAN, INF, False, "1", None], "finite number that is not negative"),
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
        load_advantage_hooks([{"name": name, parameter: value}])
    assert f"{name}: {parameter} must be" in str(caught.value)
    assert f"got {value!r}" in str(caught.value)


@pytest.mark.parametrize("zero", [0, 0.0])
def test_sign_scaling_must_leave_something_to_learn(zero: float) -> None:
    with pytest.raises((ConfigurationError, PluginParameterError), match="nothing would be learnt"):
        load_advantage_hooks([{"name": "sign_scaling", "positive": zero, "negative": zero}])


WITHOUT = ["raw_reward", "centred", "max_only", "leave_one_out", "optimal_baseline", "mean_relative"]


@pytest.mark.parametrize("name", WITHOUT)
def test_those_without_parameters_take_none(name: str) -> None:
    with pytest.raises(PluginParameterError):
        load_advantage_hooks([{"name": name, "epsilon": 1}])


def test_mean_relative_names_a_negative_reward_on_every_rank() -> None:
    rollout = make_rollout([1] * 4, [1.0, 0.0, -0.25, NAN])
    hooks = load_advantage_hooks(["mean_relative"])

    def refuses(part: Rollout) -> bool:
        incoming = torch.zeros(len(part.prompts), dtype=torch.float64)
        with pytest.raises(PluginOutputError, match=r"mean_relative: rewards must not be negative, got -0\.25\."):
            flow.apply_rollout_hooks(incoming, hooks, part)
        return True

    assert Ranks(cut(rollout, [2, 1, 1])).run(refuses) == [True] * 3


def test_mean_relative_takes_minus_zero() -> None:
    hooks = load_advantage_hooks(["mean_relative"])
    result = flow.apply_rollout_hooks(torch.zeros(2), hooks, make_rollout([1, 1], [1.0, -0.0]))
    assert result.squeeze(1).tolist() == [1, -1]


@pytest.mark.parametrize("reward", [INF, -INF])
@pytest.mark.parametrize("name", ["raw_reward", "centred", "normalised", "leave_one_out", "optimal_baseline"])
def test_an_infinite_reward_stops_the_run(name: str, reward: float) -> None:
    hooks = load_advantage_hooks([name])
    with pytest.raises(PluginOutputError, match=f"advantage hook '{name}': on_rollout must return finite advantages"):
        flow.apply_rollout_hooks(torch.zeros(3), hooks, make_rollout([1] * 3, [1.0, reward, 0.0]))
