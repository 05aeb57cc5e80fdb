"""`pass_at_k`: the published numbers, the published formula in whole numbers, every set of k, and what it refuses.

The slow loop of `estimator_loops` builds all sets; the one here is the formula as the paper writes it.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import PluginOutputError
from trl_grpo_ext.types import Rollout

NAN = math.nan


def on_tokens(k: int, rollout: Rollout, threshold: float = 0.5) -> torch.Tensor:
    hooks = load_advantage_hooks([{"name": "pass_at_k", "k": k, "threshold": threshold}])
    return flow.apply_rollout_hooks(torch.ones(len(rollout.prompts), dtype=torch.float64), hooks, rollout)


def success_and_failure(n: int, c: int, k: int) -> tuple[float, float]:
    """Advantages of the first and of the last of n completions of which the first c succeed."""
    values = on_tokens(k, make_rollout([1] * n, [1.0] * c + [0.0] * (n - c))).squeeze(1).tolist()
    return values[0], values[-1]


def published(n: int, c: int, k: int) -> tuple[float, float]:
    mean = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    sigma = math.sqrt(mean * (1 - mean))
    in_failing_sets = Fraction(math.comb(n - c - 1, k - 1), math.comb(n - 1, k - 1))
    return float(1 - mean) / sigma, float(1 - mean - in_failing_sets) / sigma


def test_by_hand() -> None:
    # n 4, c 1, k 2: 3 of 6 sets hold no success, R̄ = σ = 1/2. A success: (1/2)/(1/2). A failure is in 3 sets, 2 of
    # them without a success: (1/2 - 2/3)/(1/2).
    assert success_and_failure(4, 1, 2) == pytest.approx((1, -1 / 3))
    # n 8, c 2, k 4: 15 of 70 sets hold none; σ = √(15 · 55)/70. C(5, 3)/C(7, 3) = 10/35.
    assert success_and_failure(8, 2, 4) == pytest.approx((15 / 825**0.5, (15 - 70 * 10 / 35) / 825**0.5))
    assert success_and_failure(8, 2, 4) == pytest.approx((0.52223, -0.17408), abs=5e-6)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_equals_the_published_formula_in_groups_of_any_size(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 1024))
    k = data.draw(st.integers(1, n - 1))
    c = data.draw(st.integers(1, n - k))  # some set holds no success
    expected = published(n, c, k)
    if expected[0] > 1e-140:  # below, the formula's own σ² leaves the range of floats
        assert success_and_failure(n, c, k) == pytest.approx(expected, rel=1e-6, abs=1e-140)


@pytest.mark.parametrize(("n", "c", "k"), [(8, 0, 2), (8, 8, 2), (8, 7, 2), (8, 5, 4), (4, 1, 4), (1, 1, 1), (1, 0, 1)])
def test_nothing_where_all_sets_are_worth_the_same(n: int, c: int, k: int) -> None:
    assert success_and_failure(n, c, k) == (0, 0)


def test_with_k_1_it_is_the_reward_in_biased_standard_deviations() -> None:
    # 3 of 8: p = 3/8, σ = √(p (1 - p)).
    sigma = (3 / 8 * 5 / 8) ** 0.5
    assert success_and_failure(8, 3, 1) == pytest.approx(((1 - 3 / 8) / sigma, -3 / 8 / sigma))


def test_a_larger_k_leaves_what_is_nearly_solved_alone() -> None:
    sizes = [success_and_failure(16, 8, k)[0] for k in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(1)
    assert 0 < sizes[-1] < 0.01


def test_a_success_is_above_the_threshold_not_at_it() -> None:
    rewards = [0.5, 0.6, 0.4, 0.0]  # one success: 1, -1/3
    assert on_tokens(2, make_rollout([1] * 4, rewards)).squeeze(1).tolist() == pytest.approx(
        [-1 / 3, 1, -1 / 3, -1 / 3]
    )
    rewards = [-1.0, 1.0, -1.0, -1.0]
    result = on_tokens(2, make_rollout([1] * 4, rewards), threshold=0)
    assert result.squeeze(1).tolist() == pytest.approx([-1 / 3, 1, -1 / 3, -1 / 3])


def test_groups_of_any_number_of_scored_completions() -> None:
    # Group 5 has n 4, c 1; group 2 has n 2, c 1, whose one set is a success; nobody scored group 9.
    rewards, groups = [1.0, 0.0, NAN, 0.0, 0.0, 1.0, 0.0, NAN, NAN], [5, 5, 5, 5, 5, 2, 2, 2, 9]
    result = on_tokens(2, make_rollout([1] * 9, rewards, groups)).squeeze(1).tolist()
    assert result == pytest.approx([1, -1 / 3, 0, -1 / 3, -1 / 3, 0, 0, 0, 0])


def test_a_group_with_fewer_scored_completions_than_k_gets_nothing() -> None:
    rollout = make_rollout([1] * 6, [1.0, 0.0, 0.0, 1.0, 0.0, NAN], [0, 0, 0, 1, 1, 1])
    # Of the first group's one set of 3 the mean is 1 and the deviation 0; sets of 2 hold the success in 2 of 3 cases.
    assert on_tokens(3, rollout).tolist() == [[0.0]] * 6
    share = 1 / 3
    success = (share / (1 - share)) ** 0.5
    expected = [success, -success / 2, -success / 2, 0, 0, 0]  # 2 scored: one set of 2, which holds the success
    assert on_tokens(2, rollout).flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("training", [True, False])
def test_a_k_that_no_group_can_have_stops_every_rank_in_training(training: bool) -> None:
    rollout = make_rollout([1] * 6, [1.0, 0.0, 0.0, 1.0, 0.0, NAN], [0, 0, 0, 1, 1, 1], training=training)
    if not training:  # evaluation may have smaller groups
        assert on_tokens(4, rollout).tolist() == [[0.0]] * 6
        return
    says = r"pass_at_k: k=4 completions cannot be drawn from a group of 3\. Lower k"

    def refuses(part: Rollout) -> bool:
        with pytest.raises(PluginOutputError, match=says):
            on_tokens(4, part)
        return True

    assert Ranks(cut(rollout, [3, 2, 1])).run(refuses) == [True] * 3
