"""Power means of the sequence losses and of the sequence gains, one minus the other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..types import Totals


class PowerMean:
    """Extreme sequence losses count more: `M(max(s, 0)) - M(max(-s, 0))` with `M(x) = (mean x^p)^(1/p)`.

    `s_i` is the mean over completion i's tokens. p = 1 is the mean over completions; the larger p, the more the largest
    losses and the largest gains (negative losses) take over, and with p → ∞ only the greatest of each are left. A
    completion's weight `(|s_i| / M)^(p-1) / n` is never negative, so every loss is still pushed down.

    It is not linear in the losses, so it depends on which rows meet in a micro-batch: with accumulation or several
    ranks it is the mean over the micro-batches. Prefer large micro-batches.

    Source: the power (generalised, Hölder) mean; Hardy, Littlewood & Pólya, "Inequalities" (1934), chapter 2.

    Departures: it is defined for numbers that are not negative, and policy losses have either sign, so losses and gains
    are averaged apart, each over all n completions. Taking the mean of signed powers instead and its signed root has an
    unbounded gradient where losses and gains cancel, which they nearly do when advantages are centred. Completions
    without a live token don't count in n; where no completion has a loss (or gain) that part has no gradient.

    Args:
        p: The power, at least 1.

    Raises:
        ConfigurationError: `p` is out of its range.
    """

    __name__ = "power_mean"

    def __init__(self, *, p: float = 2.0) -> None:
        if isinstance(p, bool) or not isinstance(p, int | float) or not math.isfinite(p) or p < 1:
            raise ConfigurationError(
                f"power_mean: p must be a finite number of at least 1, got {p!r}; 1 is the plain mean."
            )
        self.p = p

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return the difference of the micro-batch's two power means; 0 where it has no live token."""
        lengths_B = mask_B_T.sum(dim=1)
        sums_B = (torch.where(mask_B_T > 0, loss_B_T, 0.0) * mask_B_T).sum(dim=1)
        losses_B = sums_B / lengths_B.clamp(min=1.0)
        count = (lengths_B > 0).sum().clamp(min=1)
        if self.p == 1:  # also where a loss is exactly 0, at the kink of max(s, 0)
            return losses_B.sum() / count
        return self._mean(losses_B.clamp(min=0.0), count) - self._mean((-losses_B).clamp(min=0.0), count)

    def _mean(self, values_B: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return `(Σ x^p / count)^(1/p)`, in units of the largest: no power overflows, and no root is taken of 0."""
        largest = values_B.detach().amax()
        powers_B = (values_B / torch.where(largest > 0, largest, 1.0)) ** self.p
        mean = torch.where(largest > 0, powers_B.sum() / count, 1.0)
        return largest * mean ** (1 / self.p)
