"""How much of a batch gradient is signal, and where it points: estimates from the gradients of `M` groups.

A group is one prompt with its completions, and groups are independent. Their gradients `x_1 .. x_M` have a mean `μ`,
the signal, and a covariance `Σ`, the noise; the gradient of a batch is a mean over some of them. Everything here is
computed from Gram matrices `K[q, r] = x_q · y_r`:

    signal       μ·ν      the mean of K over pairs of different groups
    noise        tr Σ     the mean of K's diagonal minus that

A pair of different groups shares no noise, so the first is unbiased, while the squared norm of the mean gradient is too
large by `tr Σ / M`. With weak signal it can be negative; ratios of it are then undefined, and None.

Every estimate is a function of how often each group counts: once in the estimate itself, all but one in the jackknife,
at random in the bootstrap. A group drawn twice forms no pair with itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

LEVEL = 0.95
"""Confidence level of intervals."""
SPLITS = 200
"""Random halvings over which the cosine between halves is averaged."""
_AT_ONCE = 1 << 24
"""Most cells of counts times groups to process at a time."""


@dataclass(frozen=True)
class Estimate:
    """A number, its interval by the bootstrap, and its standard error by the jackknife; None if undefined."""

    value: float | None
    low: float | None
    high: float | None
    error: float | None = None


@dataclass(frozen=True)
class Quality:
    """Estimates of one selection's gradient.

    Attributes:
        ratio: Signal-to-noise ratio of one group's gradient, `|μ|² / tr Σ`. A batch's ratio is larger by its number of
            groups.
        worth: This ratio over plain TRL's: how many times larger a batch plain TRL needs for the same ratio.
        worth_p: Two-sided p of a difference to plain TRL's ratio, by the jackknife's error and Student's t; not
            corrected.
        to_plain: Cosine of the mean gradient to plain TRL's.
        to_policy_gradient: Cosine of the mean gradient to the policy gradient of the raw reward.
        bias_p: One-sided p of that cosine being below 1; not corrected.
        halves: Cosine between the mean gradients of two halves of the groups.
    """

    ratio: Estimate
    worth: Estimate
    worth_p: float | None
    to_plain: Estimate
    to_policy_gradient: Estimate
    bias_p: float | None
    halves: Estimate


# ----------------------------------------------------------------------------------------------------- U-statistics


def pair_mean(gram_M_M: torch.Tensor, counts_R_M: torch.Tensor) -> torch.Tensor:
    """The mean of a Gram matrix over pairs of different groups, for each row of counts, `(R,)`; unbiased for `μ·ν`.

    Args:
        gram_M_M: `x_q · y_r`.
        counts_R_M: How often each group counts.
    """
    diagonal_M = gram_M_M.diagonal()
    parts = torch.split(counts_R_M, max(_AT_ONCE // len(gram_M_M), 1))
    inner_R = torch.cat([((part_R_M @ gram_M_M) * part_R_M).sum(dim=1) for part_R_M in parts])
    squares_R_M = counts_R_M.square()
    pairs_R = counts_R_M.sum(dim=1).square() - squares_R_M.sum(dim=1)
    return (inner_R - squares_R_M @ diagonal_M) / pairs_R


def ratio(gram_M_M: torch.Tensor, signal_R: torch.Tensor, counts_R_M: torch.Tensor) -> torch.Tensor:
    """Signal-to-noise ratio of one group's gradient, for each row of counts, `(R,)`; below 0 if no signal is detected.

    Args:
        gram_M_M: Of the gradients.
        signal_R: Its `pair_mean`.
        counts_R_M: How often each group counts.
    """
    mean_square_R = counts_R_M @ gram_M_M.diagonal() / counts_R_M.sum(dim=1)
    return signal_R / (mean_square_R - signal_R)


def cosine(product_R: torch.Tensor, signal_R: torch.Tensor, other_R: torch.Tensor) -> torch.Tensor:
    """Cosine between two mean gradients, bounded by -1 and 1; NaN if one of them shows no signal.

    Args:
        product_R: `pair_mean` of the one gradients with the other.
        signal_R: Of the one with themselves.
        other_R: Of the other with themselves.
    """
    norms_R = (signal_R * other_R).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    found = (signal_R > 0) & (other_R > 0)
    return (product_R / norms_R).clamp(-1.0, 1.0).masked_fill(~found, torch.nan)


def cosine_between_halves(gram_M_M: torch.Tensor, halves_R_M: torch.Tensor, counts_R_M: torch.Tensor) -> torch.Tensor:
    """Cosine between the mean gradients of the groups in `halves` and of the others, `(R,)`."""
    first_R_M, second_R_M = counts_R_M * halves_R_M, counts_R_M * (1 - halves_R_M)
    product = [((one @ gram_M_M) * other).sum(dim=1) for one, other in (
        (first_R_M, second_R_M), (first_R_M, first_R_M), (second_R_M, second_R_M)
    )]  # fmt: skip
    return product[0] / (product[1] * product[2]).sqrt()


# ------------------------------------------------------------------------------------------------------- resampling


def full_counts(groups: int) -> torch.Tensor:
    """Each group once, `(1, M)`."""
    return torch.ones(1, groups, dtype=torch.float64)


def jackknife_counts(groups: int) -> torch.Tensor:
    """The jackknife's counts, `(M, M)`."""
    return 1.0 - torch.eye(groups, dtype=torch.float64)


def bootstrap_counts(groups: int, resamples: int, seed: int) -> torch.Tensor:
    """The bootstrap's counts, `(R, M)`: groups drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    places_R_M = torch.randint(groups, (resamples, groups), generator=generator)
    return torch.zeros(resamples, groups, dtype=torch.float64).scatter_add_(
        1, places_R_M, torch.ones(resamples, groups, dtype=torch.float64)
    )


def random_halves(groups: int, count: int, seed: int) -> torch.Tensor:
    """Random halves, `(count, M)`, 1.0 for the first."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(count, groups, generator=generator).argsort(dim=1)
    return (order < groups // 2).to(torch.float64)


def jackknife_error(left_out_M: torch.Tensor) -> float | None:
    """Standard error from the values with one group left out each; None if one of them is undefined."""
    count = len(left_out_M)
    if not bool(torch.isfinite(left_out_M).all()):
        return None
    return math.sqrt((count - 1) / count * float((left_out_M - left_out_M.mean()).square().sum()))


def interval(values_R: torch.Tensor) -> tuple[float | None, float | None]:
    """The bootstrap's percentiles; a bound is None if undefined values (NaN) could lie beyond it."""
    ordered, count = values_R[~values_R.isnan()].sort().values, len(values_R)
    undefined = count - len(ordered)
    outside = (1 - LEVEL) / 2 * count
    if undefined > outside or not len(ordered):
        return None, None
    low, high = ordered[math.floor(outside)], ordered[min(math.ceil(count - outside), len(ordered)) - 1]
    return _number(low), _number(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple tests (Holm): below 0.05, a result holds at a family-wise error rate of 5 %."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def t_within(t: float, df: int) -> float:
    """P(|X| < |t|) for Student's t with an integer number of degrees of freedom: a finite sum, no approximation."""
    angle = math.atan(abs(t) / math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if df % 2 else (1.0, 0.0)
    for k in range(df % 2, df - 1, 2):  # odd: cos + 2/3 cos³ + ...; even: 1 + 1/2 cos² + ...
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return (angle + sine * total) * 2 / math.pi if df % 2 else sine * total


# ---------------------------------------------------------------------------------------------------- one selection


def compare(
    gradients: Mapping[str, torch.Tensor], plain: str, policy_gradient: str, *, resamples: int, seed: int
) -> dict[str, Quality]:
    """The quality of each selection's gradient.

    Args:
        gradients: By selection the groups' gradients, or sketches of them, `(M, k)`.
        plain: Which of them is plain TRL's.
        policy_gradient: Which of them has the policy gradient of the raw reward for its mean.
        resamples: Of the bootstrap.
        seed: Of what is drawn.
    """
    values = {name: gradient_M_k.double() for name, gradient_M_k in gradients.items()}
    groups = len(values[plain])
    whole, left_out, resampled = (
        full_counts(groups),
        jackknife_counts(groups),
        bootstrap_counts(groups, resamples, seed),
    )
    splits_R_M = random_halves(groups, resamples, seed + 1)
    counts = torch.cat([whole, left_out, resampled])
    parts = [1, groups, resamples]

    def gram(one: str, other: str) -> torch.Tensor:
        return values[one] @ values[other].T

    signals = {name: pair_mean(gram(name, name), counts) for name in values}
    plain_ratio = ratio(gram(plain, plain), signals[plain], counts)
    found = {}
    for name, signal in signals.items():
        own_M_M = gram(name, name)
        own_ratio = ratio(own_M_M, signal, counts)
        worth = (own_ratio / plain_ratio).masked_fill(plain_ratio <= 0, torch.nan)
        difference, differences_M, _ = torch.split(own_ratio - plain_ratio, parts)
        to_plain = cosine(pair_mean(gram(name, plain), counts), signal, signals[plain])
        true = policy_gradient
        to_true = torch.split(cosine(pair_mean(gram(name, true), counts), signal, signals[true]), parts)
        split_R = cosine_between_halves(own_M_M, splits_R_M, resampled)
        split_0 = cosine_between_halves(own_M_M, splits_R_M[:SPLITS], whole.expand(min(SPLITS, resamples), -1))
        found[name] = Quality(
            ratio=_estimate(*torch.split(own_ratio, parts)),
            worth=_estimate(*torch.split(worth, parts)),
            worth_p=None if name == plain else _p(float(difference), jackknife_error(differences_M), groups - 1),
            to_plain=_estimate(*torch.split(to_plain, parts)),
            to_policy_gradient=_estimate(*to_true),
            bias_p=None if name == true else _p_below(1 - float(to_true[0]), jackknife_error(to_true[1]), groups - 1),
            halves=Estimate(_number(split_0.mean()), *interval(split_R)),
        )
    return found


def shares(parts_M_P: torch.Tensor, *, resamples: int, seed: int) -> list[Estimate]:
    """The parts' shares of a sum over groups, with intervals over groups.

    Args:
        parts_M_P: What each group contributes to each part; the parts of all groups sum to the whole.
        resamples: Of the bootstrap.
        seed: Of what is drawn.
    """
    counts = torch.cat([full_counts(len(parts_M_P)), bootstrap_counts(len(parts_M_P), resamples, seed)])
    sums_R_P = counts @ parts_M_P.double()
    whole_R_1 = sums_R_P.sum(dim=1, keepdim=True)
    shares_R_P = (sums_R_P / whole_R_1).masked_fill(whole_R_1 <= 0, torch.nan)
    return [Estimate(_number(column[0]), *interval(column[1:])) for column in shares_R_P.unbind(dim=1)]


def _estimate(value: torch.Tensor, left_out_M: torch.Tensor, resampled_R: torch.Tensor) -> Estimate:
    return Estimate(_number(value.squeeze()), *interval(resampled_R), jackknife_error(left_out_M))


def _p(difference: float, error: float | None, df: int) -> float | None:
    """Two-sided p; 1 for a difference within rounding errors."""
    if error is None or math.isnan(difference):
        return None
    return 1.0 if abs(difference) <= 1e-9 else 0.0 if error == 0 else 1 - t_within(difference / error, df)


def _p_below(shortfall: float, error: float | None, df: int) -> float | None:
    two_sided = _p(shortfall, error, df)
    return None if two_sided is None else two_sided / 2 if shortfall > 0 else 1 - two_sided / 2


def _number(value: torch.Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
