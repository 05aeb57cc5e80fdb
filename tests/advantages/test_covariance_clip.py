"""covariance_clip: by hand, against a loop, how many tokens it takes, and micro-batches spread over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from tests.advantages.token_batches import Rows, forward_of, hook, live_places, narrowed, rollouts
from tests.contexts import Ranks, cut, make_forward, make_rollout, mask_of, padded
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Forward, Rollout


def clipped(forward: Forward, advantages: torch.Tensor, **parameters: Any) -> Rows:
    rows: Rows = flow.apply_forward_hooks(advantages, [hook("covariance_clip", **parameters)], forward).tolist()
    return rows


def two_rows() -> tuple[Forward, torch.Tensor]:
    """Mean log π is -2, mean A is 0; the covariances are 2, -2, 0 and 0, 2, -2."""
    logps = padded([[0.0, -4.0, -2.0], [-2.0, -4.0, 0.0]])
    return make_forward(logps, -logps), torch.tensor([1.0, -1.0], dtype=torch.float64)


def test_by_hand() -> None:
    logps = padded([[0.0, -3.0, -2.0], [-2.0, -5.0, 0.0]])  # their mean is -2
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    forward = make_forward(logps, -logps)
    # Covariances: 2, -1, 0 and 0, 3, -2. Of 6 tokens a third is 2, a sixth is 1.
    assert clipped(forward, advantages, ratio=1 / 3) == [[0, 1, 1], [-1, 0, -1]]
    assert clipped(forward, advantages, ratio=1 / 6) == [[1, 1, 1], [-1, 0, -1]]
    # At least one, however small the ratio; and by default the ratio is small.
    assert clipped(forward, advantages) == [[1, 1, 1], [-1, 0, -1]]


def test_only_what_lies_between_the_bounds() -> None:
    logps = padded([[0.0, -3.0, -2.0], [-2.0, -5.0, 0.0]])
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    forward = make_forward(logps, -logps)
    assert clipped(forward, advantages, ratio=1.0, high=2.5) == [[0, 1, 1], [-1, -1, -1]]
    assert clipped(forward, advantages, ratio=1.0, low=2.5) == [[1, 1, 1], [-1, 0, -1]]
    assert clipped(forward, advantages, ratio=1.0, low=-1.5, high=2.5) == [[0, 0, 0], [0, -1, -1]]
    assert clipped(forward, advantages, ratio=1.0, low=7.0, high=9.0) == [[1, 1, 1], [-1, -1, -1]]
    # The bounds belong to it.
    assert clipped(forward, advantages, ratio=1.0, low=2.0, high=3.0) == [[0, 1, 1], [-1, 0, -1]]


def test_equal_covariances_go_together() -> None:
    forward, advantages = two_rows()
    assert clipped(forward, advantages) == [[0, 1, 1], [-1, 0, -1]]


def test_the_mean_advantage_is_taken_off() -> None:
    # With both advantages moved by 5 the covariances, and so the choice, stay.
    forward, advantages = two_rows()
    assert clipped(forward, advantages + 5) == [[0, 6, 6], [4, 0, 4]]


def test_padding_and_empty_rows_are_in_no_mean() -> None:
    logps = padded([[0.0, -4.0, -900.0], [-4.0, 0.0, 900.0], [7.0, 7.0, 7.0]])
    forward = make_forward(logps, -logps, mask_of([2, 2, 0], 3))
    advantages = torch.tensor([1.0, -1.0, 50.0], dtype=torch.float64)
    assert clipped(forward, advantages, ratio=1.0) == [[0, 1, 0], [0, -1, 0], [0, 0, 0]]
    nothing_live = make_forward(logps, -logps, mask_of([0, 0, 0], 3))
    assert clipped(nothing_live, advantages) == [[0] * 3] * 3


def expected_clipping(forward: Forward, table: Rows, low: float, high: float, ratio: float) -> tuple[Rows, float]:
    """The result, and how near the closest covariance is to a bound or to being chosen, for rounding."""
    tokens = [(row, place) for row in range(len(table)) for place in live_places(forward, row)]
    if not tokens:
        return table, 1.0
    logps = {token: float(forward.logps_B_T[token]) for token in tokens}
    mean_logp = sum(logps.values()) / len(tokens)
    mean_advantage = sum(table[row][place] for row, place in tokens) / len(tokens)
    covariance = {(r, p): (logps[r, p] - mean_logp) * (table[r][p] - mean_advantage) for r, p in tokens}
    order = sorted((t for t in tokens if low <= covariance[t] <= high), key=lambda t: -covariance[t])
    chosen = order[: max(int(ratio * len(tokens)), 1)]
    nearest = min(min(abs(value - low), abs(value - high)) for value in covariance.values())
    if chosen and len(order) > len(chosen):
        nearest = min(nearest, covariance[chosen[-1]] - covariance[order[len(chosen)]])
    result = [row.copy() for row in table]
    for row, place in chosen:
        result[row][place] = 0.0
    return result, nearest


def table_of(rollout: Rollout) -> torch.Tensor:
    """Advantages that differ at every token."""
    count, width = rollout.mask_B_T.shape
    table = torch.sin(torch.arange(1, count * width + 1, dtype=torch.float64)).reshape(count, width)
    return table * rollout.mask_B_T


@given(rollouts(), st.sampled_from([0.1, 0.4, 1.0]), st.sampled_from([-0.5, 0.0, 0.3]))
@settings(max_examples=60, deadline=None)
def test_equals_a_loop(rollout: Rollout, ratio: float, low: float) -> None:
    forward = forward_of(rollout)
    table = table_of(rollout)
    expected, nearest = expected_clipping(forward, table.tolist(), low, 2.0, ratio)
    if nearest > 1e-9:
        assert clipped(forward, table, low=low, high=2.0, ratio=ratio) == expected


@given(rollouts(), st.data())
@settings(max_examples=40, deadline=None)
def test_a_micro_batch_spread_over_ranks(rollout: Rollout, data: st.DataObject) -> None:
    count, width = rollout.mask_B_T.shape
    first = data.draw(st.integers(1, count))
    sizes = [size for size in (first, count - first) if size]
    table = table_of(rollout)
    parameters = {"low": -0.5, "high": 2.0, "ratio": 0.3}
    expected, nearest = expected_clipping(forward_of(rollout), table.tolist(), -0.5, 2.0, 0.3)
    if nearest < 1e-9:
        return

    def run(part: Rollout) -> torch.Tensor:
        own = table[part.local_rows][:, : part.mask_B_T.size(1)]
        return flow.apply_forward_hooks(own, [hook("clip_cov", **parameters)], forward_of(part))

    results = Ranks([narrowed(part) for part in cut(rollout, sizes)]).run(run)
    assert torch.cat([pad(result, (0, width - result.size(1))) for result in results]).tolist() == expected


def test_what_gathering_pads_with_is_no_candidate() -> None:
    # The zeros that fill up the shorter rank lie between the bounds, and would be the largest.
    logps = padded([[-1.0, 0.0], [-2.0, -3.0]])
    rollout = make_rollout([1, 2], old_logps_B_T=logps, ref_logps_B_T=logps)
    table = padded([[1.0, 0.0], [2.0, -3.0]])
    expected, _ = expected_clipping(forward_of(rollout), table.tolist(), -2.0, 1.0, 0.01)
    assert expected != table.tolist()

    def run(part: Rollout) -> torch.Tensor:
        own = table[part.local_rows][:, : part.mask_B_T.size(1)]
        return flow.apply_forward_hooks(
            own, [hook("covariance_clip", low=-2.0, high=1.0, ratio=0.01)], forward_of(part)
        )

    short, long = Ranks([narrowed(part) for part in cut(rollout, [1, 1])]).run(run)
    assert [[*short[0].tolist(), 0.0], long[0].tolist()] == expected


def test_single_precision() -> None:
    forward, advantages = two_rows()
    half = replace(forward, logps_B_T=forward.logps_B_T.float(), mask_B_T=forward.mask_B_T.float())
    for dtype in (torch.float32, torch.bfloat16):
        result = flow.apply_forward_hooks(advantages.to(dtype), [hook("covariance_clip")], half)
        assert result.dtype == dtype
        assert result.tolist() == [[0, 1, 1], [-1, 0, -1]]


@pytest.mark.parametrize("tokens", [4999, 5000, 9999, 10_000, 15_000])
def test_the_number_of_tokens_by_default(tokens: int) -> None:
    # One in 5,000, and never less than one.
    logps = torch.linspace(-4, 0, tokens, dtype=torch.float64).unsqueeze(0).repeat(2, 1)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    result = torch.tensor(clipped(make_forward(logps, -logps), advantages))
    # Both rows together have twice as many tokens; of each pair with one covariance both go.
    assert int((result == 0).sum()) in (max(int(0.0002 * 2 * tokens), 1), max(int(0.0002 * 2 * tokens), 1) + 1)
