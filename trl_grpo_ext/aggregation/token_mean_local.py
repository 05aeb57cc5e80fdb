"""Token mean of each micro-batch (BNPO), which depends on how a batch is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..types import Totals


class TokenMeanLocal:
    """The mean over the live tokens of each micro-batch, then the mean over micro-batches and ranks.

    A token in a micro-batch of short completions counts more than one among long completions, and which rows meet in
    a micro-batch is chance: the gradient depends on batch size, accumulation, ranks and shuffling. Prefer
    `token_mean`; this one is for comparing with runs of TRL's `loss_type="bnpo"`, whose reduction it equals.

    Source: the name is TRL's, after BNPO (2506.02864). Departures: BNPO's own subject is the normalisation of rewards
    by a Beta distribution, which is not part of this.
    """

    __name__ = "token_mean_local"

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return `Σ m·l / Σ m` of one micro-batch; 0 where it has no live token."""
        return (torch.where(mask_B_T > 0, loss_B_T, 0.0) * mask_B_T).sum() / mask_B_T.sum().clamp(min=1.0)
