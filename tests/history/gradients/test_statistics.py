"""Signal, noise and direction from groups: worked by hand, unbiased, and tests that keep their level and have power."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from trl_grpo_ext.history.gradients.statistics import (
    Prompts,
    bootstrap_counts,
    compare,
    cosine,
    holm,
    interval,
    jackknife_error,
    pair_mean,
    ratio,
)

GROUPS, SIZE = 200, 40
EACH = Prompts.of(range(GROUPS))
"""A prompt of its own for each group."""


def test_by_hand() -> None:
    # Gradients (1, 0), (1, 2), (4, 1): products of pairs 1, 4, 6; squares 1, 5, 17.
    x = torch.tensor([[1.0, 0.0], [1.0, 2.0], [4.0, 1.0]], dtype=torch.float64)
    gram, counts, sizes = x @ x.T, torch.ones(1, 3).double(), torch.ones(3).double()
    signal = pair_mean(gram, counts, sizes)
    assert float(signal) == pytest.approx(11 / 3)
    assert float(ratio(gram.diagonal(), signal, counts, sizes)) == pytest.approx((11 / 3) / (23 / 3 - 11 / 3))
    # Without the first, the pair that is left; and what was drawn twice makes no pair with itself.
    assert pair_mean(gram, 1 - torch.eye(3).double(), sizes).tolist() == pytest.approx([6, 4, 1])
    assert float(pair_mean(gram, torch.tensor([[2.0, 1.0, 0.0]]).double(), sizes)) == pytest.approx(1)
    assert float(cosine(signal, signal, 4 * signal)) == pytest.approx(0.5)
    assert math.isnan(float(cosine(signal, signal, -signal)))
    assert jackknife_error(torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(math.sqrt(2 / 3 * 2))
    assert jackknife_error(torch.tensor([1.0, math.nan])) is None


def test_against_loops_over_groups_of_different_prompts() -> None:
    x, y = torch.randn(2, 7, 3, dtype=torch.float64)
    keys = "aabcdcc"
    prompts = Prompts.of(list(keys))
    assert prompts.sizes_M.tolist() == [2, 1, 3, 1]
    counts = bootstrap_counts(4, 5, 0)
    assert counts.sum(dim=1).tolist() == [4.0] * 5
    found = pair_mean(prompts.sums(x) @ prompts.sums(y).T, counts, prompts.sizes_M)
    for row, value in zip(counts, found, strict=True):
        total = weight = 0.0
        for q, r in itertools.permutations(range(7), 2):
            if keys[q] != keys[r]:
                count = float(row[prompts.of_groups_N[q]] * row[prompts.of_groups_N[r]])
                total += count * float(x[q] @ y[r])
                weight += count
        assert float(value) == pytest.approx(total / weight) if weight else math.isnan(float(value))


@pytest.mark.parametrize(("count", "size"), [(16, 4), (8, 8)])
def test_what_groups_of_one_prompt_share_is_no_signal(count: int, size: int) -> None:
    """The population's signal is 0, and every prompt has a direction of its own: an interval excludes 0 in 5 %."""
    excluded = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        own = torch.randn(count, 1, SIZE, generator=generator, dtype=torch.float64)
        x = own + 0.5 * torch.randn(count, size, SIZE, generator=generator, dtype=torch.float64)
        prompts = Prompts.of([group // size for group in range(count * size)])
        found = compare({"x": x.flatten(0, 1)}, "x", "x", prompts, resamples=200, seed=seed)["x"].ratio
        excluded += found.low is None or found.high is None or not found.low <= 0 <= found.high
    assert excluded <= 11  # at 5 %, more come once in 200 times


def test_intervals_and_corrections() -> None:
    assert interval(torch.arange(1001.0)) == (25.0, 975.0)
    mostly = torch.cat([torch.arange(99.0), torch.full((1,), math.nan)])
    assert interval(mostly) != (None, None)
    assert interval(torch.full((10,), math.nan)) == (None, None)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def groups(
    seed: int, *, noise: float = 1.0, turned: float = 0.0, shared: float = 0.7, signal: float = 0.3
) -> dict[str, torch.Tensor]:
    """Gradients of 200 groups: a plain estimator, the policy gradient, and one with other noise or direction.

    The noise of the last has `noise` times the variance, `shared` of it is plain TRL's, and its mean is `turned` away,
    by the sine of the angle, at the same length.
    """
    generator = torch.Generator().manual_seed(seed)

    def standard() -> torch.Tensor:
        return torch.randn(GROUPS, SIZE, generator=generator, dtype=torch.float64)

    mean = torch.zeros(SIZE, dtype=torch.float64)
    mean[0] = signal * SIZE**0.5  # a ratio of signal² for one group
    other = math.sqrt(1 - turned**2) * mean
    other[1] = turned * float(mean[0])
    plain = standard()
    own = shared * plain + math.sqrt(1 - shared**2) * standard()
    return {"plain": mean + plain, "true": mean + 0.5 * plain + standard(), "other": other + noise**0.5 * own}


def p_values(trials: int, **how: float) -> tuple[list[float], list[float], list[float]]:
    """p of a different worth, p of a bias, and the worth, of each trial."""
    found = [
        compare(groups(seed, **how), "plain", "true", EACH, resamples=100, seed=seed)["other"] for seed in range(trials)
    ]
    assert all(one.worth_p is not None and one.bias_p is not None for one in found)
    worths = [one.worth.value or 0.0 for one in found]
    return [one.worth_p or 0.0 for one in found], [one.bias_p or 0.0 for one in found], worths


@pytest.mark.parametrize("signal", [0.12, 0.5])
def test_a_hundred_comparisons_of_equals_are_called_different_at_most_as_often_as_stated(signal: float) -> None:
    worth, bias, worths = p_values(100, signal=signal)
    # At a level of 5 %, more than 11 of 100 come once in 200 times; the seeds are fixed.
    assert sum(p < 0.05 for p in worth) <= 11
    assert sum(p < 0.05 for p in bias) <= 11
    assert sorted(worths)[50] == pytest.approx(1.0, abs=0.1)


def test_what_is_known_to_differ_is_told_apart_from_200_groups() -> None:
    less, less_bias, worths = p_values(20, noise=0.7)
    assert sum(p < 0.05 for p in less) >= 18
    assert sorted(worths)[10] == pytest.approx(1 / 0.7, abs=0.1)
    assert sum(p < 0.05 for p in less_bias) <= 3
    more, _, worths = p_values(20, noise=1.4)
    assert sum(p < 0.05 for p in more) >= 18
    assert sorted(worths)[10] == pytest.approx(1 / 1.4, abs=0.1)
    # A hook that shrinks its noise by pointing elsewhere is worth more, and is seen to be biased.
    elsewhere, bias, _ = p_values(20, noise=0.7, turned=0.6)
    assert sum(p < 0.05 for p in elsewhere) >= 18
    assert sum(p < 0.05 for p in bias) >= 18


def test_intervals_of_the_worth_hold_what_they_promise() -> None:
    held = 0
    for seed in range(60):
        worth = compare(groups(seed, noise=0.7), "plain", "true", EACH, resamples=300, seed=seed)["other"].worth
        assert worth.low is not None
        assert worth.high is not None
        held += worth.low <= 1 / 0.7 <= worth.high
    assert held >= 51  # of 60 at 95 %: fewer come once in 500 times


def policy_gradients(baseline: float, seed: int) -> torch.Tensor:
    """A softmax bandit: groups of four draws, each with (reward - baseline) times its score."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.tensor([1.0, 0.6, 0.2, 0.0], dtype=torch.float64)
    chances = torch.full((4,), 0.25, dtype=torch.float64)
    arms = torch.randint(4, (GROUPS, 4), generator=generator)
    scores = torch.eye(4, dtype=torch.float64)[arms] - chances
    return ((rewards[arms] - baseline).unsqueeze(2) * scores).mean(dim=1)


def test_baselines_whose_variance_is_known() -> None:
    """Four equal arms of rewards 1, .6, .2, 0 have the mean .45: less noise at it, more far from it, no bias anywhere.

    With reward r and baseline b the second moment of one draw is mean((r - b)²) · 3/4, and the mean gradient has the
    square Σ (r - .45)²/16 for whatever b; the noise of a group of four is a fourth of the difference.
    """
    rewards = torch.tensor([1.0, 0.6, 0.2, 0.0], dtype=torch.float64)
    signal = float((rewards - 0.45).square().sum()) / 16

    def noise(baseline: float) -> float:
        return (float((rewards - baseline).square().mean()) * 0.75 - signal) / 4

    for baseline, better in ((0.45, True), (1.5, False)):
        plain, other = policy_gradients(0.0, 1), policy_gradients(baseline, 1)
        found = compare({"plain": plain, "other": other}, "plain", "plain", EACH, resamples=200, seed=0)["other"]
        assert found.worth.value == pytest.approx(noise(0.0) / noise(baseline), rel=0.3)
        assert found.worth_p is not None
        assert found.worth_p < 0.01
        assert ((found.worth.value or 0.0) > 1) is better
        assert found.to_plain.value == pytest.approx(1.0, abs=0.02)
        assert found.bias_p is None or found.bias_p > 0.05
