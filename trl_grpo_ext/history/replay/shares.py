"""Where the gradient mass of saved completions lies, and how far two selections agree: numbers only."""

from __future__ import annotations

import torch

TENTHS = 10


def by_position(mass_B_T: torch.Tensor, completion_mask_B_T: torch.Tensor) -> torch.Tensor:
    """The mass in each tenth of each completion, `(B, 10)`; the rows' sums are those of `mass_B_T`.

    A token of a completion of n tokens covers 1/n of it. Where the end of a tenth cuts a token its mass is parted in
    proportion, so completions shorter than ten tokens are in all tenths.
    """
    lengths_B = completion_mask_B_T.sum(dim=1).double()
    sums_B_S = torch.nn.functional.pad(mass_B_T.double().cumsum(dim=1), (1, 0))  # up to the start of each token
    bounds_B_11 = lengths_B.unsqueeze(1) * torch.linspace(0, 1, TENTHS + 1, dtype=torch.float64)
    last = sums_B_S.size(1) - 1
    below_B_11 = bounds_B_11.floor().long().clamp(max=last)
    above_B_11 = (below_B_11 + 1).clamp(max=last)
    low_B_11, high_B_11 = sums_B_S.gather(1, below_B_11), sums_B_S.gather(1, above_B_11)
    return (low_B_11 + (bounds_B_11 - below_B_11) * (high_B_11 - low_B_11)).diff(dim=1)


def quarters(lengths_N: torch.Tensor) -> torch.Tensor:
    """Which quarter of the completions each belongs to by its length, 0 to 3; -1 for those without a live token.

    A length on a bound belongs to the shorter quarter, so completions of one length are all in one.
    """
    live_N = lengths_N > 0
    if not live_N.any():
        return torch.full_like(lengths_N, -1).long()
    bounds = torch.quantile(lengths_N[live_N].double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    return torch.where(live_N, torch.bucketize(lengths_N.double(), bounds), -1)


def share(part: torch.Tensor, whole: torch.Tensor) -> float | None:
    """What part of a sum is; None of nothing."""
    total = float(whole.sum())
    return float(part.sum()) / total if total > 0 else None


def pearson(one_N: torch.Tensor, other_N: torch.Tensor) -> float | None:
    """Pearson's correlation; None where one of the two does not vary."""
    one_N, other_N = one_N.double() - one_N.double().mean(), other_N.double() - other_N.double().mean()
    size = float(one_N.norm() * other_N.norm())
    return float(one_N @ other_N) / size if size > 0 else None


def spearman(one_N: torch.Tensor, other_N: torch.Tensor) -> float | None:
    """Spearman's rank correlation, equal values sharing their mean rank; None where one of the two does not vary."""
    return pearson(ranks(one_N), ranks(other_N))


def ranks(values_N: torch.Tensor) -> torch.Tensor:
    """Each value's rank from 1, equal values sharing their mean rank."""
    found: tuple[torch.Tensor, ...] = values_N.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    _, places_N, counts = found
    last = counts.cumsum(0).double()
    mean_ranks: torch.Tensor = last - (counts.double() - 1) / 2
    return mean_ranks[places_N]


def signs(values_N: torch.Tensor, nothing: float) -> torch.Tensor:
    """-1, 0 or 1, where values up to `nothing` are 0."""
    return torch.where(values_N.abs() <= nothing, torch.zeros_like(values_N), values_N.sign())


def flipped_pairs(one_B: torch.Tensor, other_B: torch.Tensor, size: int, nothing: float) -> torch.Tensor:
    """For each group of `size` rows, how many of its pairs stand the other way round in the other ranking, `(Q,)`."""
    one_Q_G, other_Q_G = one_B.view(-1, size), other_B.view(-1, size)
    one_Q_G_G = signs(one_Q_G.unsqueeze(2) - one_Q_G.unsqueeze(1), nothing)
    other_Q_G_G = signs(other_Q_G.unsqueeze(2) - other_Q_G.unsqueeze(1), nothing)
    return (one_Q_G_G * other_Q_G_G < 0).sum(dim=(1, 2)) // 2
