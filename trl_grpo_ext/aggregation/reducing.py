"""Reductions that need the losses themselves: extreme sequence losses of a micro-batch count more.

They are not linear in the losses, so they depend on which rows share a micro-batch: with accumulation or several ranks
the result is the mean over the micro-batches. Prefer large micro-batches.
"""

from __future__ import annotations

import torch

from ..guard.parameters import checked_number
from ..types import Totals


class TailMean:
    """The mean of the largest sequence losses, each the mean over its completion's tokens.

    Of `n` completions the worst `k = fraction · n` count 1/k each, the rest nothing. Ties share the remaining weight,
    so the order of rows doesn't matter; a fractional `k` takes a part of the last one. In a policy gradient the largest
    losses belong to completions with negative advantages, so this emphasises unlearning failures.

    With accumulation or several ranks it is the mean of the micro-batches' tails. Prefer large micro-batches.

    Source: conditional value at risk, Rockafellar & Uryasev, "Optimization of conditional value-at-risk" (2000), with
    the completions of a micro-batch as equally likely outcomes and `fraction = 1 - β` of the paper.

    Departures: completions without a live token are left out; a micro-batch without any others gives 0.

    Args:
        fraction: Share of the completions that count, greater than 0 and at most 1; 1 is the mean over all.
    """

    __name__ = "tail_mean"

    def __init__(self, *, fraction: float = 0.5) -> None:
        wanted = "a number greater than 0 and at most 1 (1 takes the mean over all completions)"
        self.fraction = checked_number("tail_mean: fraction", fraction, wanted, lambda x: 0 < x <= 1)

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return the mean of the micro-batch's worst sequence losses; 0 where it has no live token."""
        losses_n = sequence_losses(loss_B_T, mask_B_T)
        values_n = losses_n.detach()
        worst = self.fraction * len(values_n)
        worse_n = (values_n.unsqueeze(0) > values_n.unsqueeze(1)).sum(dim=1).to(values_n.dtype)
        equal_n = (values_n.unsqueeze(0) == values_n.unsqueeze(1)).sum(dim=1).to(values_n.dtype)
        parts_n = ((worst - worse_n) / equal_n).clamp(min=0.0, max=1.0)
        return (parts_n / worst * losses_n).sum()


class PowerMean:
    """Extreme sequence losses count more: `M(max(s, 0)) - M(max(-s, 0))` with `M(x) = (mean x^p)^(1/p)`.

    `s_i` is the mean over completion i's tokens. p = 1 is the mean over completions; as p grows, the largest losses and
    the largest gains (negative losses) dominate, and with p → ∞ only the greatest of each are left. A completion's
    weight `(|s_i| / M)^(p-1) / n` is never negative, so every loss is still pushed down.

    With accumulation or several ranks it is the mean over the micro-batches. Prefer large micro-batches.

    Source: the power (generalised, Hölder) mean; Hardy, Littlewood & Pólya, "Inequalities" (1934), chapter 2.

    Departures: it is defined for numbers that are not negative, and policy losses have either sign, so losses and gains
    are averaged apart, each over all n completions. Taking the mean of signed powers instead and its signed root has an
    unbounded gradient where losses and gains cancel, which they nearly do when advantages are centred. Completions
    without a live token don't count in n; where no completion has a loss (or gain) that part has no gradient.

    Args:
        p: The power, at least 1.
    """

    __name__ = "power_mean"

    def __init__(self, *, p: float = 2.0) -> None:
        wanted = "a finite number of at least 1 (1 is the plain mean)"
        self.p = checked_number("power_mean: p", p, wanted, lambda x: x >= 1)

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return the difference of the micro-batch's two power means; 0 where it has no live token."""
        losses_n = sequence_losses(loss_B_T, mask_B_T)
        if self.p == 1 or not len(losses_n):  # also where a loss is exactly 0, at the kink of max(s, 0)
            return losses_n.sum() / max(len(losses_n), 1)
        return self._mean(losses_n.clamp(min=0.0)) - self._mean((-losses_n).clamp(min=0.0))

    def _mean(self, values_n: torch.Tensor) -> torch.Tensor:
        """Return `(mean x^p)^(1/p)`, in units of the largest, so that no power overflows and no root of 0 is taken."""
        largest = values_n.detach().amax()
        powers_n = (values_n / torch.where(largest > 0, largest, 1.0)) ** self.p
        return largest * torch.where(largest > 0, powers_n.mean(), 1.0) ** (1 / self.p)


def sequence_losses(loss_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """The mean over each completion's live tokens, `(n,)`, for completions that have any."""
    lengths_B = mask_B_T.sum(dim=1)
    sums_B = (torch.where(mask_B_T > 0, loss_B_T, 0.0) * mask_B_T).sum(dim=1)
    return sums_B[lengths_B > 0] / lengths_B[lengths_B > 0]
