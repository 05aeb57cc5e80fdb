"""However the generation batch is dealt to ranks and cut into micro-batches, and with groups left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aggregation.batches import (
    Batch,
    batches,
    completion,
    cuts,
    loaded,
    losses_of,
    mask_of_batch,
    rollout_of,
    step_totals,
    totals_of,
    width_of,
)
from tests.aggregation.loops import WEIGHTS
from tests.contexts import Ranks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.testing.builders import UnequalGathers
from trl_grpo_ext.types import Totals

every_weight = pytest.mark.parametrize("case", WEIGHTS)
some = settings(max_examples=30, deadline=None)


def row_weights(case: str, batch: Batch) -> torch.Tensor:
    return flow.token_weights(loaded(WEIGHTS[case].selection), rollout_of(batch))


@every_weight
@given(data=st.data())
@some
def test_every_rank_gets_its_rows_of_the_same_weights(case: str, data: st.DataObject) -> None:
    batch = data.draw(batches(least=2))
    parts = data.draw(cuts(batch))  # groups may lie across ranks
    padding = data.draw(st.lists(st.integers(0, 2), min_size=len(parts), max_size=len(parts)))
    rollouts = [
        rollout_of(rows, batch, width_of(rows) + extra, totals=totals_of(batch, processes=len(parts)))
        for rows, extra in zip(parts, padding, strict=True)
    ]
    aggregation = loaded(WEIGHTS[case].selection)
    ranks = Ranks(rollouts).run(lambda rollout: flow.token_weights(aggregation, rollout))
    width = width_of(batch)
    for weights_b_T, expected_b_T in zip(ranks, row_weights(case, batch).split([len(p) for p in parts]), strict=True):
        common = min(weights_b_T.size(1), width)
        torch.testing.assert_close(weights_b_T[:, :common], expected_b_T[:, :common], rtol=1e-12, atol=1e-15)
        assert not weights_b_T[:, common:].any()
        assert not expected_b_T[:, common:].any()


@every_weight
@given(data=st.data())
@some
def test_micro_batches_of_any_sizes_add_up(case: str, data: st.DataObject) -> None:
    batch = data.draw(batches(least=2))
    weights_B_T, width = row_weights(case, batch), width_of(batch)
    whole = losses_of(batch)
    (expected,) = torch.autograd.grad((weights_B_T * whole).sum(), whole)
    first, gradients = 0, []
    for rows in data.draw(cuts(batch)):  # each with its rows of the weights, which travel with the batch
        loss_b_T = losses_of(rows, width)
        loss = (weights_B_T[first : first + len(rows)] * loss_b_T).sum()
        gradients.append(torch.autograd.grad(loss, loss_b_T)[0])
        first += len(rows)
    torch.testing.assert_close(torch.cat(gradients), expected, rtol=0, atol=0)


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


@every_weight
@given(data=st.data())
@some
def test_groups_left_out_are_as_if_never_sampled(case: str, data: st.DataObject) -> None:
    batch = data.draw(batches())
    kept = data.draw(st.sets(st.sampled_from(sorted({row.group for row in batch}))))
    keep = torch.tensor([row.group in kept for row in batch])
    rest = [row for row in batch if row.group in kept]
    totals = totals_of(rest) if rest else Totals(tokens=0, sequences=0, prompts=0, max_completion_length=8)
    rollout = rollout_of(batch)
    restricted = replace(rollout, mask_B_T=rollout.mask_B_T * keep.unsqueeze(1), totals=totals)
    weights_B_T = flow.token_weights(loaded(WEIGHTS[case].selection), restricted)
    assert not weights_B_T[~keep].any()
    if rest:
        expected_B_T = row_weights(case, rest)
        torch.testing.assert_close(weights_B_T[keep][:, : expected_B_T.size(1)], expected_B_T, rtol=1e-12, atol=1e-15)


def test_the_ranks_in_this_process_pad_and_join_what_they_gather() -> None:
    batch = [completion([1.0]), completion([2.0, 3.0]), completion([4.0])]
    ranks = Ranks([rollout_of(batch[:1], batch), rollout_of(batch[1:], batch)])
    joined = ranks.run(lambda rollout: rollout.gather(rollout.mask_B_T)[rollout.local_rows])
    assert [rows.tolist() for rows in joined] == [[[1, 0]], [[1, 1], [1, 0]]]


def test_the_ranks_in_this_process_notice_a_gather_too_few() -> None:
    batch = [completion([1.0]), completion([2.0])]
    ranks = Ranks([rollout_of(batch[:1], batch), rollout_of(batch[1:], batch)])
    with pytest.raises(UnequalGathers, match="gathered"):  # the other one would wait in vain
        ranks.run(lambda rollout: rollout.gather(rollout.lengths_B) if rollout.local_rows.start else None)
