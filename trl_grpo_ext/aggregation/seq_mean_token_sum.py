"""Mean over sequences of token sums (LUSPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..types import Rollout


class SeqMeanTokenSum:
    """Every token counts the same, whatever the batch's lengths: `w = 1 / N`.

    No completion is favoured for its length, but the scale of the gradient grows with the mean length; expect to lower
    the learning rate by about that factor against `token_mean`.

    Source: LUSPO (2602.05261), whose sequence-level loss times the length is this sum. Equals the reduction of TRL's
    `loss_type="luspo"`.

    Departures: the paper pairs it with sequence-level importance ratios; set `importance_sampling_level="sequence"`.
    """

    __name__ = "seq_mean_token_sum"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, `1/N` on the mask."""
        return rollout.mask_B_T / max(rollout.totals.sequences, 1)
