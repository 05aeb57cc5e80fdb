"""GSPO-token: one importance ratio per completion, one advantage per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.types import HookDeclaration

if TYPE_CHECKING:
    from trl_grpo_ext import Forward


class GSPOToken:
    """Replace each token's ratio by its completion's: `A'_t = A_t·s / r_t`, and 0 where `s` is clipped.

    `r_t = π/π_old` is the token's ratio and `s = exp(mean_t log r_t)` the completion's. TRL's loss multiplies by
    `r_t`, so a token's gradient becomes `A_t·s·∇log π_t`, that of GSPO-token. A token is clipped if `A_t > 0` and
    `s > 1 + high`, or `A_t < 0` and `s < 1 - low`. With equal advantages in a completion this is TRL's
    `importance_sampling_level: sequence`.

    Keep TRL's own clip from acting: `importance_sampling_level: token`, `epsilon: 1`, `epsilon_high: 1e6`.

    Args:
        low: How far `s` may fall, in (0, 1).
        high: How far it may rise, positive.

    Raises:
        ConfigurationError: A parameter is out of its range.

    Source: Group Sequence Policy Optimization (2507.18071), section 4.3; the bounds are the paper's. TRL had it as
    `importance_sampling_level: sequence_token` and removed it.
    """

    declares = HookDeclaration(role="forward", needs=("several_updates",), independent=True)

    def __init__(self, *, low: float = 3e-4, high: float = 4e-4) -> None:
        if not 0 < low < 1 or not high > 0:
            raise ConfigurationError(f"gspo_token: low must be in (0, 1) and high positive, got {low!r} and {high!r}.")
        self.low, self.high = low, high

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        log_ratios_B_T = torch.where(forward.mask_B_T > 0, forward.logps_B_T - forward.old_logps_B_T, 0.0)
        lengths_B_1 = forward.mask_B_T.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratios_B_1 = log_ratios_B_T.sum(dim=1, keepdim=True) / lengths_B_1
        ratios_B_1 = log_ratios_B_1.exp()
        clipped_B_T = torch.where(advantages_B_T > 0, ratios_B_1 > 1 + self.high, ratios_B_1 < 1 - self.low)
        return torch.where(clipped_B_T, 0.0, advantages_B_T * (log_ratios_B_1 - log_ratios_B_T).exp())
