"""Signal, noise and direction from groups: worked by hand, unbiased, and tests that keep their level and have power."""

import itertools
import math

import pytest
import torch

from trl_grpo_ext.history.compare.statistics import (
    Estimate,
    Prompts,
    bootstrap_counts,
    cosine,
    estimates,
    interval,
    pair_mean,
    ratio,
)

GROUPS, SIZE = 200, 40
EACH = Prompts(range(GROUPS))
"""A prompt of its own for each group."""


def test_ratio_and_cosine_by_hand() -> None:
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


def test_pair_mean_against_loops() -> None:
    x, y = torch.randn(2, 7, 3, dtype=torch.float64)
    keys = "aabcdcc"
    prompts = Prompts(list(keys))
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
def test_estimates_of_shared_noise(count: int, size: int) -> None:
    """The population's signal is 0, and every prompt has a direction of its own: an interval excludes 0 in 5 %."""
    excluded = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        own = torch.randn(count, 1, SIZE, generator=generator, dtype=torch.float64)
        x = own + 0.5 * torch.randn(count, size, SIZE, generator=generator, dtype=torch.float64)
        prompts = Prompts([group // size for group in range(count * size)])
        found = estimates({"x": x.flatten(0, 1)}, "x", "x", prompts, resamples=200, seed=seed)["x"]["ratio"]
        excluded += found.low is None or found.high is None or not found.low <= 0 <= found.high
    assert excluded <= 11  # at 5 %, more come once in 200 times


def test_interval_with_undefined_values() -> None:
    assert interval(torch.arange(1001.0)) == (25.0, 975.0)
    mostly = torch.cat([torch.arange(99.0), torch.full((1,), math.nan)])
    assert interval(mostly) != (None, None)
    assert interval(torch.full((10,), math.nan)) == (None, None)


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


def trials(count: int, **how: float) -> list[dict[str, Estimate]]:
    return [
        estimates(groups(seed, **how), "plain", "true", EACH, resamples=300, seed=seed)["other"]
        for seed in range(count)
    ]


def differing(found: list[dict[str, Estimate]]) -> tuple[int, int, float]:
    """How many intervals of the worth leave out 1, how many of the cosine lie below it, and the median worth."""
    worths = [one["worth"] for one in found]
    assert all(one.low is not None and one.high is not None for one in worths)
    apart = sum(not one.low <= 1 <= one.high for one in worths)  # type: ignore[operator]
    biased = sum((one["to_policy_gradient"].high or 0) < 1 for one in found)
    return apart, biased, sorted(one.value or 0.0 for one in worths)[len(worths) // 2]


@pytest.mark.slow
@pytest.mark.parametrize("signal", [0.12, 0.5])
def test_estimates_of_equals_keep_their_level(signal: float) -> None:
    apart, biased, worth = differing(trials(100, signal=signal))
    # At a level of 5 %, more than 11 of 100 come once in 200 times; the seeds are fixed.
    assert apart <= 11
    assert biased <= 11
    assert worth == pytest.approx(1.0, abs=0.1)


def test_estimates_tell_apart_what_differs() -> None:
    less = trials(40, noise=0.7)
    apart, biased, worth = differing(less)
    assert apart >= 36
    assert biased <= 5
    assert worth == pytest.approx(1 / 0.7, abs=0.1)
    held = sum(one["worth"].low <= 1 / 0.7 <= one["worth"].high for one in less)  # type: ignore[operator]
    assert held >= 33  # of 40 at 95 %: fewer come once in 500 times
    more, _, worth = differing(trials(20, noise=1.4))
    assert more >= 18
    assert worth == pytest.approx(1 / 1.4, abs=0.1)
    # A hook that shrinks its noise by pointing elsewhere is worth more, and is seen to be biased.
    elsewhere, biased, _ = differing(trials(20, noise=0.7, turned=0.6))
    assert elsewhere >= 18
    assert biased >= 18
