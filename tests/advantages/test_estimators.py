"""The estimators: by hand, against slow loops, on several ranks, what relates one to another, and what they refuse.

For `pass_at_k` the slow loop builds all sets; the published formula, in whole numbers, is here beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.advantages.estimator_loops import CASES, Case, Row
from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import PluginOutputError
from trl_grpo_ext.types import Rollout

NAN = math.nan
some = settings(max_examples=60)
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def rollout_of(rows: Sequence[Row], **overrides: Any) -> Rollout:
    lengths, rewards, groups = [r.length for r in rows], [r.reward for r in rows], [r.group for r in rows]
    return make_rollout(lengths, rewards, groups, **{"num_generations": 8, **overrides})  # groups of up to 8


def on_tokens(selection: Any, rollout: Rollout, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Advantages `(B, T)` after the hook; what comes in is 9 everywhere, and must be replaced."""
    incoming = torch.full((len(rollout.prompts),), 9.0, dtype=dtype)
    return flow.apply_rollout_hooks(incoming, loaded(json.dumps(selection)), rollout)


@cache
def loaded(selection: str) -> list[Any]:
    """Hooks keep nothing, so that they may be loaded once for thousands of examples."""
    return load_advantage_hooks([json.loads(selection)])


def advantages(selection: Any, rewards: Sequence[float], groups: Sequence[int] | None = None) -> list[float]:
    """Advantages of completions of one token each."""
    rollout = make_rollout([1] * len(rewards), rewards, groups, num_generations=8)
    result: list[float] = on_tokens(selection, rollout).squeeze(1).tolist()
    return result


# ---------------------------------------------------------------------------------------------- by hand


def test_rewards_1_0_0_3_by_hand() -> None:
    # μ = 1; deviations 0, -1, -1, 2; their squares sum to 6, so σ = √(6/3) = √2.
    rewards = [1.0, 0.0, 0.0, 3.0]
    assert advantages("raw_reward", rewards) == [1, 0, 0, 3]
    assert advantages("centred", rewards) == [0, -1, -1, 2]
    assert advantages("max_only", rewards) == [0, 0, 0, 3]
    assert advantages("leave_one_out", rewards) == pytest.approx([1 - 3 / 3, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3])
    assert advantages({"name": "normalised", "epsilon": 1e-12}, rewards) == pytest.approx(
        [0, -1 / 2**0.5, -1 / 2**0.5, 2**0.5]
    )
    assert advantages("normalised", rewards)[3] == pytest.approx(2 / (2**0.5 + 1e-4), rel=1e-12)
    assert advantages("mean_relative", rewards) == [0, -1, -1, 2]


def test_two_successes_in_eight_by_hand() -> None:
    # μ = 1/4; squares 2 · 9/16 + 6 · 1/16 = 3/2, so σ = √(3/14) = .46291: .75/σ and -.25/σ.
    rewards = [1.0, 1.0, *[0.0] * 6]
    exact = advantages({"name": "normalised", "epsilon": 1e-12}, rewards)
    assert exact == pytest.approx([1.62019] * 2 + [-0.54006] * 6, abs=5e-6)
    assert advantages("mean_relative", rewards) == pytest.approx([3.0] * 2 + [-1.0] * 6)


def test_a_quantile_learns_from_the_rare_outcome_alone() -> None:
    # Two successes of eight: the place of 0.4 is 2.8 of 0 .. 7, among the failures; of six, 1.2 behind them, at 1.
    few, many = [1.0] * 2 + [0.0] * 6, [1.0] * 6 + [0.0] * 2
    unscaled = {"name": "quantile_baseline", "quantile": 0.4, "scale": False}
    assert advantages(unscaled, few) == [1] * 2 + [0] * 6
    assert advantages(unscaled, many) == [0] * 6 + [-1] * 2
    # As the authors divide: σ of two in eight is √(3/14).
    assert advantages("quantile_baseline", few)[0] == pytest.approx(1 / ((3 / 14) ** 0.5 + 1e-4))


def test_the_best_alone_has_a_margin() -> None:
    unscaled = {"name": "best_margin", "scale": False}
    assert advantages(unscaled, [1.0, 0.0, 0.0, 3.0]) == [0, 0, 0, 2]
    assert advantages(unscaled, [3.0, 0.0, 0.0, 3.0]) == [0, 0, 0, 0]
    assert advantages(unscaled, [NAN, -4.0, -1.0, NAN]) == [0, 0, 3, 0]
    assert advantages("best_margin", [1.0, 0.0, 0.0, 3.0])[3] == pytest.approx(2 / (2**0.5 + 1e-6))


def test_batch_whitening_by_hand() -> None:
    # Groups [0, 1] and [2, 6]: r - μ = ∓.5 and ∓2, squares sum to 8.5, σ = √(8.5/3) over four completions.
    rewards, groups = [0.0, 1.0, 2.0, 6.0], [0, 0, 1, 1]
    sigma = (8.5 / 3) ** 0.5
    assert advantages("batch_whitening", rewards, groups) == pytest.approx([d / sigma for d in (-0.5, 0.5, -2, 2)])
    # Over the batch: μ = 2.25, deviations -2.25, -1.25, -.25, 3.75, squares sum to 20.75.
    whole = {"name": "batch_whitening", "baseline": "batch"}
    sigma = (20.75 / 3) ** 0.5
    assert advantages(whole, rewards, groups) == pytest.approx([d / sigma for d in (-2.25, -1.25, -0.25, 3.75)])


def test_optimal_baseline_by_hand() -> None:
    # Σ L r / Σ L = 2 · 1 / 8 = 1/4.
    assert on_tokens("optimal_baseline", make_rollout([2, 6], [1.0, 0.0]))[:, 0].tolist() == [0.75, -0.25]
    # A completion without tokens has no weight, nor has one without a reward: (1 · 4 + 3 · 2) / (1 + 3) = 2.5.
    rollout = make_rollout([1, 0, 3, 2], [4.0, 100.0, 2.0, NAN])
    assert on_tokens("optimal_baseline", rollout)[:, 0].tolist() == [1.5, 0, -0.5, 0]
    # Lengths are counts of the tokens that count: 1 and 3 here, though both completions have 3.
    masked = torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    rollout = replace(make_rollout([3, 3], [1.0, 0.0]), mask_B_T=masked)
    assert on_tokens("optimal_baseline", rollout).tolist() == [[0, 0, 0.75], [-0.25, -0.25, -0.25]]


# ---------------------------------------------------------------------------------------------- random batches


@st.composite
def batches(draw: st.DrawFn, case: Case) -> list[Row]:
    """Groups of any size and id, their rows in any order, some unscored, some without tokens."""
    finite = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5]) if case.non_negative else st.sampled_from([-2.0, 0.0, 0.1, 1.0])
    lowest = 0 if case.non_negative else -50
    reward = st.one_of(finite, st.integers(10 * lowest, 500).map(lambda tenths: tenths / 10))
    rows = []
    for group in draw(st.lists(st.integers(-5, 10**6), min_size=1, max_size=4, unique=True)):
        scored = draw(st.lists(reward, max_size=6))
        unscored = [NAN] * draw(st.integers(0, 2))
        rows += [Row(r, group, draw(st.integers(0, 4))) for r in [*draw(st.sampled_from([scored, []])), *unscored]]
    rows = rows or [Row(NAN)]
    return list(draw(st.permutations(rows)))


@every_case
@given(data=st.data(), padding=st.integers(0, 2))
@some
def test_equals_a_slow_loop_on_any_number_of_ranks(case: Case, data: st.DataObject, padding: int) -> None:
    rows = data.draw(batches(case))
    width = max(row.length for row in rows) + padding
    first = data.draw(st.integers(0, len(rows)))
    second = data.draw(st.integers(0, len(rows) - first))
    parts = cut(rollout_of(rows, width=width), [first, second, len(rows) - first - second])
    result = torch.cat(Ranks(parts).run(lambda part: on_tokens(case.selection, part)))
    for values, expected, row in zip(result.tolist(), case.slow(rows), rows, strict=True):
        assert values == pytest.approx([expected] * row.length + [0.0] * (width - row.length), rel=1e-9, abs=1e-9)


# ---------------------------------------------------------------------------------------------- hostile batches

BASELINES = [case for case in CASES.values() if case.name not in ("raw_reward", "constant_baseline", "max_only")]
every_baseline = pytest.mark.parametrize("case", BASELINES, ids=[n for n, c in CASES.items() if c in BASELINES])


@every_baseline
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e-30, 12345.678])
def test_equal_rewards_give_exactly_nothing(case: Case, reward: float, dtype: torch.dtype) -> None:
    rollout = make_rollout([1, 2, 3, 1, 2, 3, 1], [reward] * 7)
    result = on_tokens(case.selection, replace(rollout, rewards_B=rollout.rewards_B.to(dtype)))
    assert not result.any()  # nor what rounding would leave, which a small divisor would blow up


@every_case
def test_an_unscored_completion_gets_nothing_and_changes_nothing(case: Case) -> None:
    rewards = [2.0, 0.0, 0.0, 1.5]
    with_holes = advantages(case.selection, [NAN, *rewards[:2], NAN, *rewards[2:], NAN])
    assert [with_holes[i] for i in (0, 3, 6)] == [0, 0, 0]
    assert [with_holes[i] for i in (1, 2, 4, 5)] == pytest.approx(advantages(case.selection, rewards))


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_precision_keeps_its_dtype_and_is_computed_in_float32_at_least(case: Case, dtype: torch.dtype) -> None:
    # In bfloat16 counting stops at 256. All of these rewards and lengths are exact in it.
    rows = [Row(float(i % 3 == 0) * 2, i % 2, i % 4) for i in range(600)]
    if case.name == "pass_at_k":  # its slow loop would build millions of sets
        rows = rows[:40]
    rollout = rollout_of(rows)
    rollout = replace(rollout, rewards_B=rollout.rewards_B.to(dtype), mask_B_T=rollout.mask_B_T.to(dtype))
    result = on_tokens(case.selection, rollout, dtype)
    assert result.dtype == dtype
    expected = torch.tensor(case.slow(rows), dtype=torch.float64)
    live = rollout.mask_B_T > 0
    expected_B_T = torch.where(live, expected.unsqueeze(1), 0.0)
    # Rounding is relative to the largest number that took part, which the highest reward is.
    torch.testing.assert_close(result.double(), expected_B_T, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)


# ---------------------------------------------------------------------------------------------- relations

# ---------------------------------------------------------------------------------------------- refused


def test_mean_relative_names_a_negative_reward_on_every_rank() -> None:
    rollout = make_rollout([1] * 4, [1.0, 0.0, -0.25, NAN])
    hooks = load_advantage_hooks(["mean_relative"])

    def refuses(part: Rollout) -> bool:
        incoming = torch.zeros(len(part.prompts), dtype=torch.float64)
        with pytest.raises(PluginOutputError, match=r"mean_relative: rewards must not be negative, got -0\.25\."):
            flow.apply_rollout_hooks(incoming, hooks, part)
        return True

    assert Ranks(cut(rollout, [2, 1, 1])).run(refuses) == [True] * 3


@pytest.mark.parametrize("reward", [math.inf, -math.inf])
@pytest.mark.parametrize("name", ["raw_reward", "centred", "normalised", "leave_one_out", "optimal_baseline"])
def test_an_infinite_reward_stops_the_run(name: str, reward: float) -> None:
    hooks = load_advantage_hooks([name])
    with pytest.raises(PluginOutputError, match=f"advantage hook '{name}': on_rollout must return finite advantages"):
        flow.apply_rollout_hooks(torch.zeros(3), hooks, make_rollout([1] * 3, [1.0, reward, 0.0]))


# ---------------------------------------------------------------------------------------------- pass@k


def pass_at_k(k: int, rollout: Rollout, threshold: float = 0.5) -> torch.Tensor:
    return on_tokens({"name": "pass_at_k", "k": k, "threshold": threshold}, rollout)


def success_and_failure(n: int, c: int, k: int) -> tuple[float, float]:
    """Advantages of the first and of the last of n completions of which the first c succeed."""
    values = pass_at_k(k, make_rollout([1] * n, [1.0] * c + [0.0] * (n - c))).squeeze(1).tolist()
    return values[0], values[-1]


def published(n: int, c: int, k: int) -> tuple[float, float]:
    mean = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    sigma = math.sqrt(mean * (1 - mean))
    in_failing_sets = Fraction(math.comb(n - c - 1, k - 1), math.comb(n - 1, k - 1))
    return float(1 - mean) / sigma, float(1 - mean - in_failing_sets) / sigma


def test_pass_at_k_by_hand() -> None:
    # n 4, c 1, k 2: 3 of 6 sets hold no success, R̄ = σ = 1/2. A success: (1/2)/(1/2). A failure is in 3 sets, 2 of
    # them without a success: (1/2 - 2/3)/(1/2).
    assert success_and_failure(4, 1, 2) == pytest.approx((1, -1 / 3))
    # n 8, c 2, k 4: 15 of 70 sets hold none; σ = √(15 · 55)/70. C(5, 3)/C(7, 3) = 10/35.
    assert success_and_failure(8, 2, 4) == pytest.approx((15 / 825**0.5, (15 - 70 * 10 / 35) / 825**0.5))
    assert success_and_failure(8, 2, 4) == pytest.approx((0.52223, -0.17408), abs=5e-6)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60)
def test_pass_at_k_equals_the_published_formula_in_groups_of_any_size(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 1024))
    k = data.draw(st.integers(1, n - 1))
    c = data.draw(st.integers(1, n - k))  # some set holds no success
    expected = published(n, c, k)
    if expected[0] > 1e-140:  # below, the formula's own σ² leaves the range of floats
        assert success_and_failure(n, c, k) == pytest.approx(expected, rel=1e-6, abs=1e-140)


@pytest.mark.parametrize(("n", "c", "k"), [(8, 0, 2), (8, 8, 2), (8, 7, 2), (8, 5, 4), (4, 1, 4), (1, 1, 1), (1, 0, 1)])
def test_pass_at_k_is_nothing_where_all_sets_are_worth_the_same(n: int, c: int, k: int) -> None:
    assert success_and_failure(n, c, k) == (0, 0)


@pytest.mark.parametrize("training", [True, False])
def test_a_k_that_no_group_can_have_stops_every_rank_in_training(training: bool) -> None:
    rollout = make_rollout([1] * 6, [1.0, 0.0, 0.0, 1.0, 0.0, NAN], [0, 0, 0, 1, 1, 1], training=training)
    if not training:  # evaluation may have smaller groups
        assert pass_at_k(4, rollout).tolist() == [[0.0]] * 6
        return
    says = r"pass_at_k: k=4 completions cannot be drawn from a group of 3\. Lower k"

    def refuses(part: Rollout) -> bool:
        with pytest.raises(PluginOutputError, match=says):
            pass_at_k(4, part)
        return True

    assert Ranks(cut(rollout, [3, 2, 1])).run(refuses) == [True] * 3
