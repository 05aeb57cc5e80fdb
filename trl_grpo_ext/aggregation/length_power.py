"""Weights by the length of a completion."""

from __future__ import annotations

import torch

from ..guard.parameters import checked_flag, checked_number
from ..types import Rollout


class LengthPower:
    """Weigh each completion's token sum by a power of its length: `w = |o_i|^-α / Σ_j |o_j|^-α`.

    If the variance of a completion's gradient is proportional to its length, α = 1 gives the weighted mean of token
    sums with the least variance; a smaller α lets long completions count more. The weights of the completions sum to 1,
    so the gradient's scale grows with the lengths, as for `seq_mean_token_sum`, which is α = 0.

    With `normalize=False` the divisor is the number of completions, `w = |o_i|^-α / N`: α = 0 is `seq_mean_token_sum`,
    α = ½ the square-root rule and α = 1 `seq_mean_token_mean`.

    Source: VL Norm, first called ΔL normalisation (2509.07558). The sum runs over the whole batch, as in its authors'
    code.

    Departures: the paper's constant factor 1/M, which only scales the learning rate, is 1. Completions without a live
    token are not in the sum; with `normalize=False` they count in N.

    Args:
        alpha: α, not negative. The paper's theory asks for 1; for mathematics its authors use 0.75.
        normalize: Whether the completions' weights sum to 1.
    """

    __name__ = "length_power"

    def __init__(self, *, alpha: float = 1.0, normalize: bool = True) -> None:
        wanted = "a finite number that is not negative (0 weighs all completions alike, 1 gives the least variance)"
        self.alpha = checked_number("length_power: alpha", alpha, wanted, lambda x: x >= 0)
        self.normalize = checked_flag("length_power: normalize", normalize)

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
