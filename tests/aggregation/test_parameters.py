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

REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "constant_length": {"length": (0, 2.5, True)},
    "length_power": {"alpha": (-0.1, float("nan")), "normalize": (0,)},
    "sign_balanced": {"over": ("prompt", ["group"])},
    "length_softmax": {"lam": (float("inf"), "1"), "r": (0,)},
    "difficulty_weighted": {
        "low": (-0.1,),
        "high": (0.3,),
        "midpoint": ("half",),
        "steepness": (0,),
        "threshold": (None,),
        "reward": (1, ["solved"]),
    },
    "tail_mean": {"fraction": (0, 1.01)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_values_are_refused_by_name(name: str) -> None:
    for parameter, values in REFUSED[name].items():
        for value in values:
            with pytest.raises((ConfigurationError, PluginParameterError)) as caught:
                load_loss_aggregation({"name": name, parameter: value})
            assert f"{name}: {parameter} must" in str(caught.value)
            assert repr(value) in str(caught.value)


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
    alone = load_loss_aggregation({"name": "length_softmax", "r": 100})
    assert flow.token_weights(alone, make_rollout([2])).tolist() == [[0.5, 0.5]]


def test_token_mean_step_needs_the_totals_of_a_step() -> None:
    aggregation = load_loss_aggregation("token_mean_step")
    assert aggregation.needs_step_totals is True  # by which the trainer knows
    totals = replace(totals_of([completion([1.0])]), step=None)
    with pytest.raises(ConfigurationError, match=r"token_mean_step: totals.step is None.* use token_mean"):
        flow.reduced_loss(aggregation, padded([[1.0]]), mask_of([1]), totals)
