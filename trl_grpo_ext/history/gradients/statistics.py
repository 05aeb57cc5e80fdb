"""How much of a batch gradient is signal, and where it points: estimates from the gradients of groups.

A group is one prompt with its completions. Groups of different prompts are independent; those of one prompt share what
is particular to it. The gradients `x_i` of groups have a mean `μ`, the signal, and a covariance `Σ`, the noise; the
gradient of a batch is a mean over groups of different prompts. Everything is computed from Gram matrices:

    signal       μ·ν      the mean of x_i · y_j over pairs of groups of different prompts
    noise        tr Σ     the mean of x_i · x_i minus that

A pair of different prompts shares no noise, so the first is unbiased, while the squared norm of the mean gradient is
too large. With weak signal it can be negative; ratios of it are then undefined, and None.

Every estimate is a function of how often each of the `M` prompts counts: once in the estimate itself, all but one in
the jackknife, at random in the bootstrap. A prompt drawn twice forms no pair with itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LEVEL = 0.95
"""Confidence level of intervals."""
_AT_ONCE = 1 << 24
"""Most cells of counts times prompts to process at a time."""


@dataclass(frozen=True)
class Estimate:
    """A number, its interval by the bootstrap, and its standard error by the jackknife; None if undefined."""

    value: float | None
    low: float | None
    high: float | None
    error: float | None = None

    def times(self, factor: float) -> Estimate:
        """The same of a multiple of the number."""
        values = (self.value, self.low, self.high, self.error)
        return Estimate(*(None if value is None else value * factor for value in values))

    def text(self, digits: int | None = None) -> str:
        """The number and its interval, with a number of decimals or three significant digits; `-` if undefined."""
        form = ".3g" if digits is None else f".{digits}f"
        value, low, high = ("-" if one is None else f"{one:{form}}" for one in (self.value, self.low, self.high))
        return "-" if self.value is None else f"{value} [{low}, {high}]"


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Estimates of one selection's gradient.

    Attributes:
        ratio: Signal-to-noise ratio `|μ|² / tr Σ` of the gradient of a batch, with `μ` the mean and `Σ` the covariance
            of that gradient: of a batch of `GradientQuality.batch_size` completions, or of one group from `compare`.
        worth: How many times more completions plain TRL needs for the same ratio.
        worth_p: Two-sided p of a difference of the ratio to plain TRL's, by the jackknife's error and Student's t;
            `measure_gradients` corrects it by Holm's method.
        to_plain: Cosine of the mean gradient to plain TRL's.
        to_policy_gradient: Cosine of the mean gradient to the policy gradient of the raw reward.
        bias_p: One-sided p of that cosine being below 1, corrected in the same way.
    """

    ratio: Estimate
    worth: Estimate
    worth_p: float | None
    to_plain: Estimate
    to_policy_gradient: Estimate
    bias_p: float | None


# ----------------------------------------------------------------------------------------------------- U-statistics


@dataclass(frozen=True)
class Prompts:
    """Which prompt each group belongs to, `(N,)`, numbered from 0, and each prompt's number of groups, `(M,)`."""

    of_groups_N: torch.Tensor
    sizes_M: torch.Tensor

    @classmethod
    def of(cls, keys: Sequence[Any]) -> Prompts:
        """The prompts of groups, by any keys that are equal for the same prompt."""
        numbers: dict[Any, int] = {}
        of_groups_N = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
        return cls(of_groups_N, torch.bincount(of_groups_N).double())

    def sums(self, values_N_X: torch.Tensor) -> torch.Tensor:
        """Each prompt's sum over its groups, `(M, X)`."""
        shape = (len(self.sizes_M), values_N_X.size(1))
        return torch.zeros(shape, dtype=torch.float64).index_add_(0, self.of_groups_N, values_N_X.double())


def pair_mean(gram_M_M: torch.Tensor, counts_R_M: torch.Tensor, sizes_M: torch.Tensor) -> torch.Tensor:
    """The mean of `x_i · y_j` over pairs of groups of different prompts, for each row of counts, `(R,)`.

    Args:
        gram_M_M: Products of the prompts' sums.
        counts_R_M: How often each prompt counts.
        sizes_M: Groups of each prompt.
    """
    diagonal_M = gram_M_M.diagonal()
    parts = torch.split(counts_R_M, max(_AT_ONCE // len(gram_M_M), 1))
    inner_R = torch.cat([((part_R_M @ gram_M_M) * part_R_M).sum(dim=1) for part_R_M in parts])
    groups_R_M = counts_R_M * sizes_M
    pairs_R = groups_R_M.sum(dim=1).square() - groups_R_M.square().sum(dim=1)
    return (inner_R - counts_R_M.square() @ diagonal_M) / pairs_R


def ratio(
    squares_M: torch.Tensor, signal_R: torch.Tensor, counts_R_M: torch.Tensor, sizes_M: torch.Tensor
) -> torch.Tensor:
    """Signal-to-noise ratio of one group's gradient, for each row of counts, `(R,)`; below 0 if no signal is detected.

    Args:
        squares_M: Each prompt's sum of its groups' squared norms.
        signal_R: The `pair_mean`.
        counts_R_M: How often each prompt counts.
        sizes_M: Groups of each prompt.
    """
    mean_square_R = counts_R_M @ squares_M / (counts_R_M @ sizes_M)
    return signal_R / (mean_square_R - signal_R)


def cosine(product_R: torch.Tensor, signal_R: torch.Tensor, other_R: torch.Tensor) -> torch.Tensor:
    """Cosine between two mean gradients by their `pair_mean`s, bounded by -1 and 1; NaN if one shows no signal."""
    norms_R = (signal_R * other_R).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    found = (signal_R > 0) & (other_R > 0)
    return (product_R / norms_R).clamp(-1.0, 1.0).masked_fill(~found, torch.nan)


# ------------------------------------------------------------------------------------------------------- resampling


def bootstrap_counts(prompts: int, resamples: int, seed: int) -> torch.Tensor:
    """The bootstrap's counts, `(R, M)`: prompts drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    drawn_R_M = torch.randint(prompts, (resamples, prompts), generator=generator)
    ones = torch.ones(resamples, prompts, dtype=torch.float64)
    return torch.zeros_like(ones).scatter_add_(1, drawn_R_M, ones)


def jackknife_error(left_out_M: torch.Tensor) -> float | None:
    """Standard error from the values with one prompt left out each; None if one of them is undefined."""
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
    gradients: Mapping[str, torch.Tensor],
    plain: str,
    policy_gradient: str,
    prompts: Prompts,
    *,
    resamples: int,
    seed: int,
) -> dict[str, Quality]:
    """The quality of each selection's gradient.

    `plain` names the gradients of plain TRL, `policy_gradient` those whose mean is that of the raw reward.
    """
    sums = {name: prompts.sums(gradient_N_k) for name, gradient_N_k in gradients.items()}
    sizes_M, size = prompts.sizes_M, len(prompts.sizes_M)
    whole, left_out = torch.ones(1, size, dtype=torch.float64), 1.0 - torch.eye(size, dtype=torch.float64)
    counts = torch.cat([whole, left_out, bootstrap_counts(size, resamples, seed)])
    parts = [1, size, resamples]

    def product(one: str, other: str) -> torch.Tensor:
        return pair_mean(sums[one] @ sums[other].T, counts, sizes_M)

    signals = {name: product(name, name) for name in sums}
    ratios = {}
    for name, gradient_N_k in gradients.items():
        squares_M = prompts.sums(gradient_N_k.double().square().sum(dim=1, keepdim=True)).squeeze(1)
        ratios[name] = ratio(squares_M, signals[name], counts, sizes_M)
    found = {}
    for name, signal in signals.items():
        worth = (ratios[name] / ratios[plain]).masked_fill(ratios[plain] <= 0, torch.nan)
        difference, differences_M, _ = torch.split(ratios[name] - ratios[plain], parts)
        to_plain, to_true = (
            torch.split(cosine(product(name, other), signal, signals[other]), parts)
            for other in (plain, policy_gradient)
        )
        is_true, shortfall = name == policy_gradient, 1 - float(to_true[0])
        found[name] = Quality(
            ratio=_estimate(*torch.split(ratios[name], parts)),
            worth=_estimate(*torch.split(worth, parts)),
            worth_p=None if name == plain else _p(float(difference), jackknife_error(differences_M), size - 1),
            to_plain=_estimate(*to_plain),
            to_policy_gradient=_estimate(*to_true),
            bias_p=None if is_true else _p_below(shortfall, jackknife_error(to_true[1]), size - 1),
        )
    return found


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
