"""What aggregations refuse, and that the message says what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.aggregation.batches import completion, totals_of
from tests.contexts import mask_of, padded
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError

REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "constant_length": {"length": (0, 2.5, True)},
    "length_power": {"alpha": (-0.1, float("nan")), "normalize": (0,)},
    "sign_balanced": {"over": ("prompt", ["group"])},
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


def test_token_mean_step_needs_the_totals_of_a_step() -> None:
    aggregation = load_loss_aggregation("token_mean_step")
    assert aggregation.needs_step_totals is True  # by which the trainer knows
    totals = replace(totals_of([completion([1.0])]), step=None)
    with pytest.raises(ConfigurationError, match=r"token_mean_step: totals.step is None.* use token_mean"):
        flow.reduced_loss(aggregation, padded([[1.0]]), mask_of([1]), totals)
