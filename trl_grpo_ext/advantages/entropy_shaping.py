"""Entropy-based shaping of the advantages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..types import Forward


class EntropyShaping:
    """Credit uncertain tokens a little more: `A'_t = A_t + min(α·H_t, |A_t| / κ)`.

    `H_t` is the entropy of the current policy's next-token distribution in nats, detached. The bonus is clipped at a
    share of the advantage, so that with κ > 1 it never turns an advantage's sign, and tokens without advantage stay
    without.

    Source: Reasoning with Exploration: An Entropy Perspective (2506.14758), eq. 4 and 5.

    Departures: none.

    Args:
        alpha: α, advantage per nat; positive. The paper uses 0.4 for GRPO.
        kappa: κ, greater than 1. The paper uses 2.

    Raises:
        ConfigurationError: A parameter is out of its range.
    """

    __name__ = "entropy_shaping"
    per_completion = True

    def __init__(self, *, alpha: float = 0.4, kappa: float = 2.0) -> None:
        if not (math.isfinite(alpha) and alpha > 0):
            raise ConfigurationError(f"entropy_shaping: alpha must be positive, got {alpha!r}.")
        if not (math.isfinite(kappa) and kappa > 1):
            raise ConfigurationError(
                f"entropy_shaping: kappa must be greater than 1, got {kappa!r}; otherwise the bonus could turn the "
                "sign of a negative advantage."
            )
        self.alpha = alpha
        self.kappa = kappa

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        bonus_B_T = torch.minimum(self.alpha * forward.entropies_B_T, advantages_B_T.abs() / self.kappa)
        return advantages_B_T + bonus_B_T.to(advantages_B_T.dtype)
