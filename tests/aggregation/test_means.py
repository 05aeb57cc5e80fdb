"""The aggregations: values by hand, and what each must not depend on."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.aggregation.completions import BATCH, completion, in_groups, loss_and_gradient, rollout_of, weights_of
from tests.contexts import mask_of, padded
from trl_grpo_ext import available, load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError
from trl_grpo_ext.types import StepTotals, Totals

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


NO_LIVE_TOKEN = [replace(BATCH[0], live=[False, False]), *(completion([], group=group) for group in (0, 1, 1))]


@pytest.mark.parametrize("name", [info.name for info in available("loss_aggregation") if info.builtin])
def test_no_live_token_and_losses_of_zero_give_no_nan(name: str) -> None:
    assert name in BY_HAND
    loss, gradient = loss_and_gradient(name, NO_LIVE_TOKEN, width=3)
    assert loss == 0.0
    assert not gradient.any()  # NaN would count as something
    loss, gradient = loss_and_gradient(name, [completion([0.0]), completion([1.0, -1.0]), completion([])])
    assert math.isfinite(loss)
    assert bool(torch.isfinite(gradient).all())


REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "constant_length": {"length": (0, 2.5, True)},
    "length_power": {"alpha": (-0.1, float("nan"))},
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


def test_token_mean_step_over_several_steps() -> None:
    # Steps {1, 2} and {3} are means of their own, 12/6 and 6/1; token_mean gives 2 · 12/7 and 2 · 6/7.
    totals = Totals(tokens=7, sequences=3, prompts=1, max_completion_length=8, optimizer_steps=2.0)
    aggregation = load_loss_aggregation("token_mean_step")
    for batch, expected in ((BATCH[:2], 12 / 6), (BATCH[2:], 6.0)):
        rows = [row.losses for row in batch]
        step = StepTotals(tokens=sum(map(len, rows)), sequences=len(rows))
        loss = aggregation.reduce(padded(rows), mask_of([len(row) for row in rows]), replace(totals, step=step))
        assert float(loss) == pytest.approx(expected)
    assert aggregation.declares.needs == ("step_totals",)  # by which the trainer knows
    with pytest.raises(ConfigurationError, match=r"totals\.step"):
        flow.reduced_loss(aggregation, padded([[1.0]]), mask_of([1]), totals)


def test_what_hooks_make_of_the_advantages_is_no_outcome() -> None:
    name = "sign_balanced"
    # A KL penalty, or a teacher, may turn the sign of a right answer's advantage.
    turned = [replace(row, advantage=-row.advantage) for row in BATCH]
    assert weights_of(name, turned) == weights_of(name, BATCH)
    aggregation, rollout = load_loss_aggregation(name), rollout_of(BATCH)
    # Nor is what a shaper makes of the rewards.
    shaped = replace(rollout, rewards_B=-rollout.rewards_B, raw_rewards_B=rollout.rewards_B)
    assert torch.equal(flow.token_weights(aggregation, shaped), flow.token_weights(aggregation, rollout))


def test_rounding_is_no_outcome() -> None:
    # .2 is the mean of .1, .2 and .3 but for 3e-17.
    batch = [completion([1.0] * n, rewards=(reward, 0.0)) for n, reward in ((2, 0.1), (4, 0.2), (1, 0.3))]
    each = [row[0] for row in weights_of("sign_balanced", batch)]
    assert each == pytest.approx([1 / 3 / 2, 1 / 3 / 4, 1 / 3])


def test_prefix_share_of_ABC_ABD_AEF() -> None:
    batch = [completion([0, 0, 0], ids=ids) for ids in ("ABC", "ABD", "AEF")]
    expected = [[1 / 3, 1 / 2, 1], [1 / 3, 1 / 2, 1], [1 / 3, 1, 1]]
    assert weights_of("prefix_share", batch) == [pytest.approx([w / 9 for w in row]) for row in expected]


def test_prefix_share_beside_a_tools_tokens() -> None:
    # The tool's answer X or Y parts the first two at their second token; the third wrote X itself.
    batch = [completion([0, 0, 0], ids=ids) for ids in ("AXB", "AYB", "AXB")]
    batch[:2] = [replace(row, live=[True, False, True]) for row in batch[:2]]
    expected = [[1 / 3, 0, 1 / 2], [1 / 3, 0, 1], [1 / 3, 1, 1 / 2]]
    assert weights_of("prefix_share", batch) == [pytest.approx([w / 7 for w in row]) for row in expected]


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 10 / 3), (2 / 3, 4), (0.5, 14 / 3), (1 / 3, 6), (0.1, 6)])
def test_tail_mean_from_all_to_the_worst(fraction: float, expected: float) -> None:
    assert loss_and_gradient({"name": "tail_mean", "fraction": fraction}, BATCH)[0] == pytest.approx(expected)
