"""Weights by the length of a completion."""

from __future__ import annotations

import math

import torch

from ..credit.groups import gather_groups, group_count, group_extremes, group_mean, group_sum
from ..errors import ConfigurationError
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


class LengthSoftmax:
    """A token mean with each completion scaled by its relative length in the group: `w = f_i / Σ_j |o_j|`.

    `f_i = G softmax_i(h_i^λ)` with `h_i = 1 + r z_i` and `z_i = (|o_i| - μ) / σ` over the group's lengths (`z_i = 0`
    where they are all equal). λ = 0 is `token_mean`; λ > 0 favours the group's long completions, λ < 0 its short ones.
    The factors of a group average to 1.

    Source: λ-GRPO of "Unifying the GRPO frameworks with learnable token preferences" (2510.06870).

    Departures: λ is fixed; the paper learns it with the policy. σ is the population's. Statistics and G leave out
    completions without a live token. The token mean is over the generation batch and all ranks, not over one group.

    Args:
        lam: λ.
        r: How far a standard deviation moves `h`; positive. `r √(G-1)` must be less than 1, so that every `h` is
            positive whatever the lengths.
    """

    __name__ = "length_softmax"

    def __init__(self, *, lam: float = 1.0, r: float = 1 / 9) -> None:
        self.lam = checked_number("length_softmax: lam", lam, "a finite number (positive favours long completions)")
        self.r = checked_number("length_softmax: r", r, "a positive number", lambda x: x > 0)

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, the same for all tokens of a completion."""
        largest_deviation = math.sqrt(max(rollout.num_generations - 1, 0))  # of one among G numbers, in σ
        if self.r * largest_deviation >= 1:
            raise ConfigurationError(
                f"length_softmax: r={self.r!r} is too large for groups of {rollout.num_generations} completions. Lower "
                f"r below {1 / largest_deviation:.4g}, or lower num_generations."
            )
        lengths_N, groups_N = rollout.gather(rollout.lengths_B), gather_groups(rollout)
        live_N = lengths_N > 0
        lengths_N = torch.where(live_N, lengths_N, torch.nan)  # completions without a live token are in no statistic
        counts_N = group_count(lengths_N, groups_N)
        deviations_N = lengths_N - group_mean(lengths_N, groups_N)
        sigmas_N = (group_sum(deviations_N.square(), groups_N) / counts_N).sqrt()
        z_N = deviations_N / torch.where(sigmas_N > 0, sigmas_N, 1.0)
        scores_N = ((1 + self.r * z_N) ** self.lam).clamp(max=torch.finfo(z_N.dtype).max)  # inf minus inf would be NaN
        scores_N = torch.where(live_N, scores_N, torch.nan)  # NaN to the power of 0 is 1
        _, highest_N = group_extremes(scores_N, groups_N)
        lifted_N = (scores_N - highest_N).exp()
        factors_N = torch.where(live_N, counts_N * lifted_N / group_sum(lifted_N, groups_N), 0.0)
        factors_B = factors_N[rollout.local_rows]
        return rollout.mask_B_T * factors_B.unsqueeze(1) / max(rollout.totals.tokens, 1)
