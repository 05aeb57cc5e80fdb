"""No credit for completions that were cut off at the length limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..guard.parameters import checked_choice

if TYPE_CHECKING:
    from ..types import Rollout


class TruncationMasking:
    """Set the advantages of truncated completions to 0: `A'_t = 0` where the completion ended at the limit.

    A completion that the length limit cut off was graded before it was done, so its reward says little about it. With
    `keep="negative"` only credit is taken away, `A'_t = min(A_t, 0)`: running into the limit may still be punished.

    TRL's `mask_truncated_completions` takes the tokens out of the loss mask, and with it out of every count, of the KL
    penalty and of the entropy bonus. Here they stay: their policy gradient is 0, yet they count in the denominators of
    the loss, and a KL penalty (`beta`) acts on them. Where TRL's option is on, this hook has nothing left to do. Hooks
    that come later in the chain may give such tokens an advantage again.

    Source: the overlong filtering of DAPO (2503.14476), which masks the loss of truncated samples.

    Departures: the denominators, as said; `keep="negative"` is not in the paper.

    Args:
        keep: "nothing" or "negative".

    Raises:
        ConfigurationError: `keep` is something else.
    """

    __name__ = "truncation_masking"

    def __init__(self, *, keep: str = "nothing") -> None:
        self.keep = checked_choice("truncation_masking: keep", keep, ("nothing", "negative"))

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        kept_B_T = advantages_B_T.clamp(max=0.0) if self.keep == "negative" else torch.zeros_like(advantages_B_T)
        return torch.where(rollout.truncated_B.unsqueeze(1), kept_B_T, advantages_B_T)
