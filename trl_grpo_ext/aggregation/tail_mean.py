"""Mean of the worst sequence losses (conditional value at risk)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..types import Totals


class TailMean:
    """The mean of the largest sequence losses, each the mean over its completion's tokens.

    Of `n` completions the worst `k = fraction · n` count 1/k each, the rest nothing. Equal losses share what is left
    for them, so the order of rows doesn't matter, and a broken `k` takes a part of the last one. In a policy gradient
    the largest losses are those of the completions with negative advantages: this leans on unlearning what failed.

    It is not linear in the losses, so it depends on which rows meet in a micro-batch: with accumulation or several
    ranks it is the mean of the micro-batches' tails, not the tail of the batch. Prefer large micro-batches.

    Source: conditional value at risk, Rockafellar & Uryasev, "Optimization of conditional value-at-risk" (2000), with
    the completions of a micro-batch as equally likely outcomes and `fraction = 1 - β` of the paper.

    Departures: completions without a live token are no outcomes, and a micro-batch without any gives 0.

    Args:
        fraction: Share of the completions that count, greater than 0 and at most 1; 1 is the mean over all.

    Raises:
        ConfigurationError: `fraction` is out of its range.
    """

    __name__ = "tail_mean"

    def __init__(self, *, fraction: float = 0.5) -> None:
        number = not isinstance(fraction, bool) and isinstance(fraction, int | float) and math.isfinite(fraction)
        if not number or not 0 < fraction <= 1:
            raise ConfigurationError(
                f"tail_mean: fraction must be a number greater than 0 and at most 1, got {fraction!r}; 1 takes the "
                "mean over all completions."
            )
        self.fraction = fraction

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return the mean of the micro-batch's worst sequence losses; 0 where it has no live token."""
        lengths_B = mask_B_T.sum(dim=1)
        live_B = lengths_B > 0
        sums_B = (torch.where(mask_B_T > 0, loss_B_T, 0.0) * mask_B_T).sum(dim=1)
        losses_n = sums_B[live_B] / lengths_B[live_B]
        values_n = losses_n.detach()
        worst = self.fraction * len(values_n)
        worse_n = (values_n.unsqueeze(0) > values_n.unsqueeze(1)).sum(dim=1).to(values_n.dtype)
        equal_n = (values_n.unsqueeze(0) == values_n.unsqueeze(1)).sum(dim=1).to(values_n.dtype)
        parts_n = ((worst - worse_n) / equal_n).clamp(min=0.0, max=1.0)
        return (parts_n / worst * losses_n).sum()
