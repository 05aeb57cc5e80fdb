"""A reduction that needs the losses themselves: the largest sequence losses of a micro-batch count."""

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
        lengths_B = mask_B_T.sum(dim=1)
        sums_B = (torch.where(mask_B_T > 0, loss_B_T, 0.0) * mask_B_T).sum(dim=1)
        losses_n = sums_B[lengths_B > 0] / lengths_B[lengths_B > 0]
        values_n = losses_n.detach()
        worst = self.fraction * len(values_n)
        worse_n = (values_n.unsqueeze(0) > values_n.unsqueeze(1)).sum(dim=1).to(values_n.dtype)
        equal_n = (values_n.unsqueeze(0) == values_n.unsqueeze(1)).sum(dim=1).to(values_n.dtype)
        parts_n = ((worst - worse_n) / equal_n).clamp(min=0.0, max=1.0)
        return (parts_n / worst * losses_n).sum()
