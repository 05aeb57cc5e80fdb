"""Completions weighted by a power of their length (VL normalisation, also called ΔL normalisation)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..types import Rollout


class LengthPower:
    """Weigh each completion's token sum by a power of its length: `w = |o_i|^-α / Σ_j |o_j|^-α`.

    Where the variance of a completion's gradient grows in proportion to its length, α = 1 gives the weighted mean of
    token sums with the least variance; a smaller α lets long completions say more. The weights of the completions sum
    to 1, so the scale of the gradient grows with the lengths as that of `seq_mean_token_sum` does, which is α = 0.

    With `normalize=False` the sum makes way for the number of completions, `w = |o_i|^-α / N`: α = 0 is
    `seq_mean_token_sum`, α = ½ the square-root rule and α = 1 `seq_mean_token_mean`.

    Source: VL Norm, first called ΔL normalisation (2509.07558). The sum runs over the whole batch, as in its authors'
    code.

    Departures: the paper's constant factor 1/M, which only scales the learning rate, is 1. Completions without a live
    token are not in the sum; with `normalize=False` they count in N.

    Args:
        alpha: α, not negative. The paper's theory asks for 1; for mathematics its authors use 0.75.
        normalize: Whether the completions' weights sum to 1.

    Raises:
        ConfigurationError: A parameter is out of its range.
    """

    __name__ = "length_power"

    def __init__(self, *, alpha: float = 1.0, normalize: bool = True) -> None:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha < 0:
            raise ConfigurationError(
                f"length_power: alpha must be a finite number that is not negative, got {alpha!r}; 0 weighs all "
                "completions alike, 1 gives the least variance."
            )
        if not isinstance(normalize, bool):
            raise ConfigurationError(f"length_power: normalize must be true or false, got {normalize!r}.")
        self.alpha = alpha
        self.normalize = normalize

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, the same for all tokens of a completion."""
        if not self.normalize:
            powers_B = rollout.lengths_B.clamp(min=1.0) ** -self.alpha
            return rollout.mask_B_T * powers_B.unsqueeze(1) / max(rollout.totals.sequences, 1)
        lengths_N = rollout.gather(rollout.lengths_B)
        live_N = lengths_N > 0
        # In units of the shortest completion, whose power is 1: nothing overflows, and the sum is at least 1.
        shortest = torch.where(live_N, lengths_N, torch.inf).min()
        powers_N = torch.where(live_N, (lengths_N / shortest) ** -self.alpha, 0.0)
        weights_N = powers_N / powers_N.sum().clamp(min=1.0)
        return rollout.mask_B_T * weights_N[rollout.local_rows].unsqueeze(1)
