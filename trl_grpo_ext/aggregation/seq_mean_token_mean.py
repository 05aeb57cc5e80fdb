"""Mean over sequences of token means (GRPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..types import Rollout


class SeqMeanTokenMean:
    """Every completion counts the same, and its tokens share its weight: `w = 1 / (N |o_i|)`.

    A wrong long completion is punished less per token than a wrong short one (the length bias that Dr. GRPO names).

    Source: GRPO (2402.03300), eq. 3. Equals the reduction of TRL's `loss_type="grpo"`.

    Departures: the mean runs over all completions of the generation batch and all ranks instead of one group, which is
    the same because groups have equal size. A completion without a live token counts in N, as in TRL.
    """

    __name__ = "seq_mean_token_mean"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`; each completion's sum to `1/N`."""
        return rollout.mask_B_T / rollout.lengths_B.clamp(min=1.0).unsqueeze(1) / max(rollout.totals.sequences, 1)
