"""`sign_scaling`: by hand, token by token, and behind the estimator that gives the paper's method."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import Ranks, cut, make_rollout, padded
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow


def test_token_advantages_by_hand() -> None:
    rollout = make_rollout([3, 2], width=3)
    incoming = padded([[1.0, -2.0, 0.0], [-0.5, 4.0]], width=3)
    hooks = load_advantage_hooks([{"name": "sign_scaling", "positive": 0.5, "negative": 2.0}])
    expected = [[0.5, -4, 0], [-1, 2, 0]]
    assert flow.apply_rollout_hooks(incoming, hooks, rollout).tolist() == expected


def test_weighted_reinforce() -> None:
    # The paper's method: rewards of 1 and -1, no baseline, successes at λ = 0.1.
    rollout = make_rollout([1] * 4, [1.0, -1.0, -1.0, 1.0])
    hooks = load_advantage_hooks(["raw_reward", "w_reinforce"])
    result = flow.apply_rollout_hooks(torch.zeros(4, dtype=torch.float64), hooks, rollout)
    assert result.squeeze(1).tolist() == [0.1, -1, -1, 0.1]


@pytest.mark.parametrize(("positive", "negative", "expected"), [(0, 1, [0, -3]), (1, 0, [2, 0]), (1, 1, [2, -3])])
def test_one_side_alone_and_both(positive: float, negative: float, expected: list[float]) -> None:
    hooks = load_advantage_hooks([{"name": "sign_scaling", "positive": positive, "negative": negative}])
    result = flow.apply_rollout_hooks(torch.tensor([2.0, -3.0]), hooks, make_rollout([1, 1]))
    assert result.squeeze(1).tolist() == expected


@given(
    st.lists(st.lists(st.floats(-50, 50), min_size=3, max_size=3), min_size=1, max_size=5),
    st.floats(0, 10),
    st.floats(0.01, 10),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_equals_a_loop_on_any_number_of_ranks(
    rows: list[list[float]], positive: float, negative: float, data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(0, 3)) for _ in rows]
    first = data.draw(st.integers(0, len(rows)))
    incoming = torch.tensor(rows, dtype=torch.float64)
    hooks = load_advantage_hooks([{"name": "sign_scaling", "positive": positive, "negative": negative}])
    expected = [
        [(positive if a > 0 else negative) * a if t < length else 0.0 for t, a in enumerate(row)]
        for row, length in zip(rows, lengths, strict=True)
    ]
    parts = Ranks(cut(make_rollout(lengths, width=3), [first, len(rows) - first])).run(
        lambda rollout: flow.apply_rollout_hooks(incoming[rollout.local_rows], hooks, rollout)
    )
    for values, wanted in zip(torch.cat(parts).tolist(), expected, strict=True):
        assert values == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    incoming = torch.tensor([2.0, -3.0], dtype=dtype)
    result = flow.apply_rollout_hooks(incoming, load_advantage_hooks(["sign_scaling"]), make_rollout([1, 1]))
    assert result.dtype == dtype
    assert result[1].item() == -3
