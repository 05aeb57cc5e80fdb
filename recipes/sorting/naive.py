"""The naive policy gradient, as an advantage hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trl_grpo_ext.types import HookDeclaration

if TYPE_CHECKING:
    from trl_grpo_ext.types import Forward


class Naive:
    """Take the importance ratio out of the policy gradient: `A'_t = A_t / ρ_t`, with `ρ_t = π_t / π_old,t` detached.

    The per-token loss of the unclipped objective, `-ρ_t·A_t`, has the gradient `-ρ_t·A_t·∇log π_t`. With `A'_t` it is
    `-A_t·∇log π_t`, that of the naive objective `-A_t·log π_t`, which does not know that another policy than the one
    trained wrote the completion. Only the gradient is the naive one's; the loss that is logged is `-A_t`. With one
    optimizer step per rollout ρ is 1 and nothing changes.

    It is exact for losses of that form: TRL's `dapo`, `grpo`, `bnpo`, `dr_grpo` and `luspo` at token level, with an
    `epsilon` that never clips. It stands last in a chain.

    Source: the "naive" loss of Stanford CS336 (2025), lecture 17.
    """

    __name__ = "naive"
    declares = HookDeclaration(independent=True)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        ratio_B_T = torch.exp(forward.logps_B_T - forward.old_logps_B_T)
        return torch.where(forward.mask_B_T > 0, advantages_B_T / ratio_B_T, 0.0).to(advantages_B_T.dtype)
