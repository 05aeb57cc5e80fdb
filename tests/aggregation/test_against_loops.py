"""Every built-in aggregation against slow loops, and the manners that all of them have in common.

Random batches: groups of any id in any order of rows, ragged and empty completions, tokens that a tool wrote, padding
whose id is a real token's, unscored completions, advantages of either sign and none.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aggregation.batches import (
    Batch,
    Completion,
    batches,
    completion,
    cuts,
    loaded,
    loss_and_gradient,
    losses_of,
    mask_of_batch,
    rollout_of,
    step_totals,
    totals_of,
    width_of,
)
from tests.aggregation.loops import CASES, REDUCES, WEIGHTS
from tests.contexts import Ranks
from trl_grpo_ext import available
from trl_grpo_ext.credit import flow

every_case = pytest.mark.parametrize("case", CASES)
some = settings(max_examples=30)

NEVER_ZERO = {"tail_mean", "power_mean"}
"""Those that may leave a live token without a slope: below the tail, or where a sequence's loss is 0."""


def test_no_aggregation_is_left_out() -> None:
    built_in = {info.name for info in available() if info.builtin and info.kind == "loss_aggregation"}
    assert {case.name for case in CASES.values()} == built_in


@pytest.mark.parametrize("case", WEIGHTS)
@given(data=st.data())
@some
def test_weights_equal_a_loop_over_tokens_on_any_number_of_ranks(case: str, data: st.DataObject) -> None:
    batch = data.draw(batches())
    parts = data.draw(cuts(batch))  # groups may lie across ranks
    totals = totals_of(batch, processes=len(parts))
    padding = data.draw(st.lists(st.integers(0, 3), min_size=len(parts), max_size=len(parts)))
    rollouts = [
        rollout_of(rows, batch, width_of(rows) + extra, totals=totals)
        for rows, extra in zip(parts, padding, strict=True)
    ]
    aggregation = loaded(WEIGHTS[case].selection)
    of_ranks = Ranks(rollouts).run(lambda rollout: flow.token_weights(aggregation, rollout).tolist())
    for row, expected in zip([row for rows in of_ranks for row in rows], WEIGHTS[case].loop(batch), strict=True):
        assert row == pytest.approx([*expected, *([0.0] * (len(row) - len(expected)))], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("case", REDUCES)
@given(batch=batches(), padding=st.integers(0, 3))
@some
def test_a_micro_batch_s_loss_equals_a_loop_whatever_the_padding(case: str, batch: Batch, padding: int) -> None:
    loss, _ = loss_and_gradient(REDUCES[case].selection, batch, width_of(batch) + padding)
    assert loss == pytest.approx(REDUCES[case].loop(batch), rel=1e-9, abs=1e-9)


@given(data=st.data())
@some
def test_token_mean_step_is_exact_however_the_step_is_cut(data: st.DataObject) -> None:
    batch = data.draw(batches(least=2))
    parts = data.draw(cuts(batch))
    micro_batches, processes = data.draw(st.sampled_from([(len(parts), 1), (1, len(parts))]))
    totals = step_totals(batch, micro_batches, processes)
    aggregation = loaded("token_mean_step")
    losses = [flow.reduced_loss(aggregation, losses_of(rows), mask_of_batch(rows), totals) for rows in parts]
    whole = flow.reduced_loss(aggregation, losses_of(batch), mask_of_batch(batch), step_totals(batch))
    # The trainer takes the mean over micro-batches and ranks.
    assert float(sum(losses).detach()) / len(parts) == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)


@every_case
@given(batch=batches(), garbage=st.sampled_from([1e30, float("inf"), float("-inf"), float("nan")]))
@some
def test_tokens_off_the_mask_do_not_exist(case: str, batch: Batch, garbage: float) -> None:
    selection, live = CASES[case].selection, rollout_of(batch).mask_B_T > 0
    loss, gradient = loss_and_gradient(selection, batch)
    other_loss, other = loss_and_gradient(selection, batch, off_the_mask=garbage)
    assert other_loss == loss
    torch.testing.assert_close(other, gradient, rtol=0, atol=0)
    assert not gradient[~live].any()
    assert bool((gradient >= 0).all())
    if CASES[case].name not in NEVER_ZERO:
        assert bool((gradient[live] > 0).all())


def masked(row: Completion) -> Completion:
    return Completion(row.losses, [False] * len(row.losses), row.ids, row.group, row.advantage, row.rewards)


FULL = completion([1.0, 3.0], ids="AB", advantage=1.0, rewards=(1.0, 0.0))
NOTHING_LIVE: dict[str, Any] = {
    "two completions of no length": [completion([]), completion([])],
    "all masked away": [masked(FULL), masked(FULL)],
    "two groups": [masked(FULL), completion([]), completion([], group=1), completion([], group=1)],
}


@every_case
@pytest.mark.parametrize("batch", NOTHING_LIVE.values(), ids=NOTHING_LIVE)
def test_no_live_token_gives_zero_and_not_nan(case: str, batch: Batch) -> None:
    loss, gradient = loss_and_gradient(CASES[case].selection, batch, width=3)
    assert loss == 0.0
    assert not gradient.any()  # NaN would count as something


@every_case
def test_all_sequence_losses_zero_give_no_nan(case: str) -> None:
    batch = [completion([0.0]), completion([1.0, -1.0]), completion([])]
    loss, gradient = loss_and_gradient(CASES[case].selection, batch)
    assert math.isfinite(loss)
    assert bool(torch.isfinite(gradient).all())
