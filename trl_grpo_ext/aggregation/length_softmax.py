"""Token mean that leans towards long or short completions of a group (λ-GRPO, token preferences)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..types import Rollout


class LengthSoftmax:
    """A token mean with each completion scaled by its length's place in the group: `w = f_i / Σ_j |o_j|`.

    `f_i = G softmax_i(h_i^λ)` with `h_i = 1 + r z_i` and `z_i = (|o_i| - μ) / σ` over the group's lengths (`z_i = 0`
    where they are all equal). λ = 0 is `token_mean`; λ > 0 favours the group's long completions, λ < 0 its short ones.
    The factors of a group average to 1.

    Source: λ-GRPO of "Unifying the GRPO frameworks with learnable token preferences" (2510.06870).

    Departures: λ is fixed, and the paper learns it with the policy. σ is the population's. Completions without a live
    token are in none of the statistics, and G counts the others. The token mean is over the generation batch and all
    ranks, not over one group.

    Args:
        lam: λ.
        r: How far a standard deviation moves `h`; positive. `r √(G-1)` must be less than 1, so that every `h` is
            positive whatever the lengths.

    Raises:
        ConfigurationError: A parameter is out of its range; from `weights` where `r` is too large for the group's size.
    """

    __name__ = "length_softmax"

    def __init__(self, *, lam: float = 1.0, r: float = 1 / 9) -> None:
        if isinstance(lam, bool) or not isinstance(lam, int | float) or not math.isfinite(lam):
            raise ConfigurationError(
                f"length_softmax: lam must be a finite number, got {lam!r}; positive favours long completions."
            )
        if isinstance(r, bool) or not isinstance(r, int | float) or not math.isfinite(r) or r <= 0:
            raise ConfigurationError(f"length_softmax: r must be a positive number, got {r!r}.")
        self.lam = lam
        self.r = r

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, the same for all tokens of a completion."""
        largest_deviation = math.sqrt(max(rollout.num_generations - 1, 0))  # of one among G numbers, in σ
        if self.r * largest_deviation >= 1:
            raise ConfigurationError(
                f"length_softmax: r={self.r!r} is too large for groups of {rollout.num_generations} completions: "
                "1 + r z would not be positive for the shortest possible completion. Lower r below "
                f"{1 / largest_deviation:.4g}, or lower num_generations."
            )
        lengths_N = rollout.gather(rollout.lengths_B)
        groups_N = rollout.gather(rollout.group_ids_B)
        members_B_N = (rollout.group_ids_B.unsqueeze(1) == groups_N) & (lengths_N > 0)
        counts_B = members_B_N.sum(dim=1, keepdim=True).clamp(min=1).to(lengths_N.dtype)
        means_B = (members_B_N * lengths_N).sum(dim=1, keepdim=True) / counts_B
        deviations_B_N = torch.where(members_B_N, lengths_N - means_B, 0.0)
        sigmas_B = (deviations_B_N.square().sum(dim=1, keepdim=True) / counts_B).sqrt()
        z_B_N = deviations_B_N / torch.where(sigmas_B > 0, sigmas_B, 1.0)
        bounds = torch.finfo(z_B_N.dtype)
        scores_B_N = ((1 + self.r * z_B_N) ** self.lam).clamp(max=bounds.max)  # inf minus inf would be NaN
        shares_B_N = torch.where(members_B_N, scores_B_N, bounds.min).softmax(dim=1)
        factors_B = counts_B.squeeze(1) * shares_B_N[:, rollout.local_rows].diagonal()
        return rollout.mask_B_T * factors_B.unsqueeze(1) / max(rollout.totals.tokens, 1)
