"""Every built-in aggregation against values worked out by hand, and what each refuses."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.aggregation.completions import BATCH, completion, in_groups, loss_and_gradient
from trl_grpo_ext import available, load_loss_aggregation
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError

BY_HAND: dict[str, tuple[Any, float]] = {
    "token_mean": ("token_mean", 18 / 7),
    "token_mean_local": ("token_mean_local", 18 / 7),  # one micro-batch holds them all
    "token_mean_step": ("token_mean_step", 18 / 7),  # and one step
    "seq_mean_token_mean": ("seq_mean_token_mean", (2 + 2 + 6) / 3),
    "seq_mean_token_sum": ("seq_mean_token_sum", (4 + 8 + 6) / 3),
    "constant_length": ("constant_length", (4 + 8 + 6) / (3 * 8)),
    "token_sum": ("token_sum", 4 + 8 + 6),
    "prompt_mean": ("prompt_mean", 18 / 7),  # one prompt
    "length_power 0": ({"name": "length_power", "alpha": 0}, 6.0),
    "length_power 1/2": ({"name": "length_power", "alpha": 0.5}, 5.81233),
    "length_power 3/4": ({"name": "length_power", "alpha": 0.75}, 5.75254),
    "length_power": ("length_power", (4 / 2 + 8 / 4 + 6) / (1 / 2 + 1 / 4 + 1)),  # 5.71429
    "square-root rule": ({"name": "length_power", "alpha": 0.5, "normalize": False}, 4.27614),
    # Of the right ones (4 + 6) / (2 + 1) with 2/3 of the weight, of the wrong one 8/4 with 1/3.
    "sign_balanced": ("sign_balanced", 2 / 3 * 10 / 3 + 1 / 3 * 2),  # 2.88889
    # The common first token counts 1/2 in each: (1/2 + 3) + (2/2 + 2 + 0 + 4) + 6 = 16.5.
    "prefix_share": ("prefix_share", 16.5 / 7),
    # k = 1.5 of the means 2, 2, 6: all of the 6, and half a completion between the two that tie.
    "tail_mean": ("tail_mean", (6 + 1 / 4 * 2 + 1 / 4 * 2) / 1.5),
}


@pytest.mark.parametrize(("selection", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_the_page_s_losses(selection: Any, expected: float) -> None:
    assert loss_and_gradient(selection, BATCH)[0] == pytest.approx(expected, abs=5e-6)


IN_TWO_GROUPS: dict[str, tuple[Any, list[int], float]] = {
    "prompt_mean": ("prompt_mean", [0, 0, 1], (12 / 6 + 6) / 2),
    # In the first group 1/2 · 4/2 for the right and 1/2 · 8/4 for the wrong; the other's only one is its mean.
    "sign_balanced": ("sign_balanced", [0, 0, 1], ((1 + 1) + 6) / 2),
    "over the batch": ({"name": "sign_balanced", "over": "batch"}, [0, 0, 1], (2 + 2 + 6) / 3),
    "prefix_share": ("prefix_share", [0, 1, 1], 18 / 7),  # the two that begin alike are of different groups
}


@pytest.mark.parametrize(("selection", "groups", "expected"), IN_TWO_GROUPS.values(), ids=IN_TWO_GROUPS)
def test_groups_apart(selection: Any, groups: list[int], expected: float) -> None:
    assert loss_and_gradient(selection, in_groups(groups))[0] == pytest.approx(expected, abs=5e-6)


NO_LIVE_TOKEN = [
    replace(BATCH[0], live=[False, False]),
    completion([]),
    completion([], group=1),
    completion([], group=1),
]


@pytest.mark.parametrize("name", [info.name for info in available("loss_aggregation") if info.builtin])
def test_no_live_token_and_losses_of_zero_give_no_nan(name: str) -> None:
    assert name in BY_HAND
    loss, gradient = loss_and_gradient(name, NO_LIVE_TOKEN, width=3)
    assert loss == 0.0
    assert not gradient.any()  # NaN would count as something
    loss, gradient = loss_and_gradient(name, [completion([0.0]), completion([1.0, -1.0]), completion([])])
    assert math.isfinite(loss)
    assert bool(torch.isfinite(gradient).all())


# ---------------------------------------------------------------------------------------------- refused

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
