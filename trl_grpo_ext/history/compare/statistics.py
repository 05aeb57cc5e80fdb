"""How much of a batch gradient is signal, and where it points: estimates from the gradients of groups.

Groups of different prompts are independent; those of one prompt share what is particular to it. Their gradients `x_i`
have a mean `μ`, the signal, and a covariance `Σ`, the noise:

    signal       μ·ν      the mean of x_i · y_j over pairs of groups of different prompts
    noise        tr Σ     the mean of x_i · x_i minus that

Such a pair shares no noise, so the first is unbiased. With weak signal it can be negative; ratios of it are then
undefined, and None. Every estimate is a function of how often each of the `M` prompts counts: once, or at random in the
bootstrap, where no prompt is its own pair.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .saved import number_of

LEVEL = 0.95  # confidence level of intervals


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval by the bootstrap over prompts; None if undefined."""

    value: float | None
    low: float | None
    high: float | None

    def text(self, digits: int | None = None) -> str:
        """The number and its interval, with a number of decimals or three significant digits; `-` if undefined."""
        form = ".3g" if digits is None else f".{digits}f"
        value, low, high = ("-" if one is None else f"{one:{form}}" for one in (self.value, self.low, self.high))
        return "-" if self.value is None else f"{value} [{low}, {high}]"


class Prompts:
    """Which prompt each group belongs to, `(N,)`, by keys that are equal for the same, and its groups, `(M,)`."""

    def __init__(self, keys: Sequence[Any]) -> None:
        numbers: dict[Any, int] = {}
        self.of_groups_N = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
        self.sizes_M = torch.bincount(self.of_groups_N).double()

    def sums(self, values_N_X: torch.Tensor) -> torch.Tensor:
        """Each prompt's sum over its groups, `(M, X)`."""
        shape = (len(self.sizes_M), values_N_X.size(1))
        return torch.zeros(shape, dtype=torch.float64).index_add_(0, self.of_groups_N, values_N_X.double())


def pair_mean(gram_M_M: torch.Tensor, counts_R_M: torch.Tensor, sizes_M: torch.Tensor) -> torch.Tensor:
    """The mean of `x_i · y_j` over pairs of groups of different prompts, from the products of the prompts' sums."""
    inner_R = ((counts_R_M @ gram_M_M) * counts_R_M).sum(dim=1)
    groups_R_M = counts_R_M * sizes_M
    pairs_R = groups_R_M.sum(dim=1).square() - groups_R_M.square().sum(dim=1)
    return (inner_R - counts_R_M.square() @ gram_M_M.diagonal()) / pairs_R


def ratio(
    squares_M: torch.Tensor, signal_R: torch.Tensor, counts_R_M: torch.Tensor, sizes_M: torch.Tensor
) -> torch.Tensor:
    """Signal-to-noise ratio of one group's gradient, from the prompts' sums of squared norms and the `pair_mean`."""
    mean_square_R = counts_R_M @ squares_M / (counts_R_M @ sizes_M)
    return signal_R / (mean_square_R - signal_R)


def cosine(product_R: torch.Tensor, signal_R: torch.Tensor, other_R: torch.Tensor) -> torch.Tensor:
    """Cosine between two mean gradients by their `pair_mean`s, bounded by -1 and 1; NaN if one shows no signal."""
    norms_R = (signal_R * other_R).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    found = (signal_R > 0) & (other_R > 0)
    return (product_R / norms_R).clamp(-1.0, 1.0).masked_fill(~found, torch.nan)


def bootstrap_counts(prompts: int, resamples: int, seed: int) -> torch.Tensor:
    """The bootstrap's counts, `(R, M)`: prompts drawn with replacement."""
    drawn_R_M = torch.randint(prompts, (resamples, prompts), generator=torch.Generator().manual_seed(seed))
    return torch.zeros(resamples, prompts).scatter_add_(1, drawn_R_M, torch.ones(resamples, prompts)).double()


def interval(values_R: torch.Tensor) -> tuple[float | None, float | None]:
    """The bootstrap's percentiles; None if so many values are undefined (NaN) that a bound may be one of them."""
    beyond = (1 - LEVEL) / 2
    if float(values_R.isnan().double().mean()) > beyond:
        return None, None
    low, high = torch.nanquantile(values_R, torch.tensor([beyond, 1 - beyond], dtype=values_R.dtype))
    return number_of(float(low)), number_of(float(high))


def estimates(
    gradients: Mapping[str, torch.Tensor],
    plain: str,
    policy_gradient: str,
    prompts: Prompts,
    *,
    resamples: int,
    seed: int = 0,
    groups_per_batch: float = 1.0,
) -> dict[str, dict[str, Estimate]]:
    """The estimates of `SelectionGradient` for each selection's gradients `(N, k)`, by their names."""
    sums = {name: prompts.sums(gradient_N_k) for name, gradient_N_k in gradients.items()}
    sizes_M = prompts.sizes_M
    # The first row is the estimate, the others its resamples.
    counts = torch.cat([torch.ones(1, len(sizes_M)), bootstrap_counts(len(sizes_M), resamples, seed)]).double()

    def product(one: str, other: str) -> torch.Tensor:
        return pair_mean(sums[one] @ sums[other].T, counts, sizes_M)

    signals = {name: product(name, name) for name in sums}
    ratios = {}
    for name, gradient_N_k in gradients.items():
        squares_M = prompts.sums(gradient_N_k.double().square().sum(dim=1, keepdim=True)).squeeze(1)
        ratios[name] = ratio(squares_M, signals[name], counts, sizes_M)
    return {
        name: {
            "ratio": _estimate(ratios[name] * groups_per_batch),
            "worth": _estimate((ratios[name] / ratios[plain]).masked_fill(ratios[plain] <= 0, torch.nan)),
            "to_plain": _estimate(cosine(product(name, plain), signal, signals[plain])),
            "to_policy_gradient": _estimate(cosine(product(name, policy_gradient), signal, signals[policy_gradient])),
        }
        for name, signal in signals.items()
    }


def _estimate(values_R: torch.Tensor) -> Estimate:
    return Estimate(number_of(float(values_R[0])), *interval(values_R[1:]))
