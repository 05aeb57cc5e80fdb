"""Token mean over the global batch (DAPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..types import Rollout


class TokenMean:
    """Every token of the generation batch counts the same: `w = 1 / Σ_i |o_i|`.

    Long completions weigh more than short ones, in proportion to their length; the scale of the gradient does not
    depend on the lengths.

    Source: DAPO (2503.14476), eq. 8.

    Departures: the paper's sum runs over one group; here, as in TRL's `loss_type="dapo"`, over all groups of the
    generation batch and all ranks, so that the loss is the same however the batch is cut.
    """

    __name__ = "token_mean"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)` that sum to 1 over all ranks (to 0 in a batch without a live token)."""
        return rollout.mask_B_T / max(rollout.totals.tokens, 1)
