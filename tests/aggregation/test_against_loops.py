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
    loaded,
    loss_and_gradient,
    rollout_of,
    step_totals,
    width_of,
)
from tests.aggregation.loops import CASES, REDUCES, WEIGHTS
from trl_grpo_ext import available
from trl_grpo_ext.credit import flow

every_case = pytest.mark.parametrize("case", CASES)
some = settings(max_examples=30, deadline=None)

NEVER_ZERO = {"tail_mean", "power_mean"}
"""Those that may leave a live token without a slope: below the tail, or where a sequence's loss is 0."""


def test_no_aggregation_is_left_out() -> None:
    built_in = {info.name for info in available() if info.builtin and info.kind == "loss_aggregation"}
    assert {case.name for case in CASES.values()} == built_in


@pytest.mark.parametrize("case", WEIGHTS)
@given(batch=batches(), padding=st.integers(0, 3))
@some
def test_weights_equal_a_loop_over_tokens_whatever_the_padding(case: str, batch: Batch, padding: int) -> None:
    rollout = rollout_of(batch, width=width_of(batch) + padding)
    weights_B_T = flow.token_weights(loaded(WEIGHTS[case].selection), rollout)
    for row, expected in zip(weights_B_T.tolist(), WEIGHTS[case].loop(batch), strict=True):
        assert row == pytest.approx([*expected, *([0.0] * (len(row) - len(expected)))], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("case", REDUCES)
@given(batch=batches(), padding=st.integers(0, 3))
@some
def test_a_micro_batch_s_loss_equals_a_loop_whatever_the_padding(case: str, batch: Batch, padding: int) -> None:
    loss, _ = loss_and_gradient(REDUCES[case].selection, batch, width_of(batch) + padding)
    assert loss == pytest.approx(REDUCES[case].loop(batch), rel=1e-9, abs=1e-9)


@every_case
@given(batch=batches(), data=st.data())
@some
def test_rows_may_come_in_any_order(case: str, batch: Batch, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(batch))))
    loss, gradient = loss_and_gradient(CASES[case].selection, batch)
    permuted_loss, permuted = loss_and_gradient(CASES[case].selection, [batch[i] for i in order])
    assert permuted_loss == pytest.approx(loss, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(permuted, gradient[order], rtol=1e-9, atol=1e-12)


@every_case
@given(batch=batches(), padding=st.integers(1, 4))
@some
def test_padding_changes_nothing(case: str, batch: Batch, padding: int) -> None:
    width = width_of(batch)
    loss, gradient = loss_and_gradient(CASES[case].selection, batch)
    wide_loss, wide = loss_and_gradient(CASES[case].selection, batch, width + padding)
    assert wide_loss == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(wide[:, :width], gradient, rtol=1e-12, atol=1e-15)
    assert not wide[:, width:].any()


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


@pytest.mark.parametrize("case", REDUCES)
def test_losses_of_half_precision_are_summed_in_the_mask_s(case: str) -> None:
    # In bfloat16 a sum of ones stops at 256.
    loss_B_T, mask_B_T = torch.ones(1, 1000, dtype=torch.bfloat16), torch.ones(1, 1000)
    totals = step_totals([completion([1.0] * 1000)])
    loss = flow.reduced_loss(loaded(REDUCES[case].selection), loss_B_T, mask_B_T, totals)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1.0)


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


@every_case
def test_an_empty_completion_takes_nothing_from_the_others_and_gets_nothing(case: str) -> None:
    batch = [FULL, completion([]), masked(FULL), completion([2.0], ids="C", advantage=-1.0)]
    loss, gradient = loss_and_gradient(CASES[case].selection, batch)
    assert loss > 0
    assert not gradient[1:3].any()
