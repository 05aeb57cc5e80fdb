"""The advantages that TRL gives completions before any hook, from their rewards alone."""

from __future__ import annotations

import torch

EPSILON = 1e-4
"""What TRL adds to a standard deviation before it divides."""


def weighted_sum(rewards_B_K: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """Each completion's reward `(B,)`: the weighted sum of what the functions gave; NaN where none gave anything."""
    return (rewards_B_K * weights_K).nansum(dim=1).masked_fill(rewards_B_K.isnan().all(dim=1), torch.nan)


def spread(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Standard deviation with n - 1 along an axis, which is kept, without NaNs; NaN where fewer than two are left."""
    known = ~values.isnan()
    count = known.sum(dim=dim, keepdim=True)
    squares = (values - values.nanmean(dim=dim, keepdim=True)).square().nansum(dim=dim, keepdim=True)
    return torch.where(count > 1, squares / (count - 1), torch.nan).sqrt()


def group_advantages(
    rewards_B: torch.Tensor,
    rewards_B_K: torch.Tensor,
    weights_K: torch.Tensor,
    num_generations: int,
    scale_rewards: str,
    multi_objective_aggregation: str,
) -> torch.Tensor:
    """Advantages `(B,)` as TRL's settings of these names define them; 0 for a completion without a reward.

    Source: TRL's `GRPOConfig`, `scale_rewards` and `multi_objective_aggregation`; GRPO (2402.03300), Dr. GRPO
    (2503.20783), GDPO (2601.05242) for `normalize_then_sum`.

    Args:
        rewards_B: The weighted sums; rows of a group stand together.
        rewards_B_K: Each function's reward.
        weights_K: The functions' weights.
        num_generations: `G`.
        scale_rewards: "group", "batch" or "none".
        multi_objective_aggregation: "sum_then_normalize" or "normalize_then_sum".
    """
    if multi_objective_aggregation == "normalize_then_sum":
        rewards_Q_G_K = rewards_B_K.view(-1, num_generations, rewards_B_K.size(1))
        centred_Q_G_K = rewards_Q_G_K - rewards_Q_G_K.nanmean(dim=1, keepdim=True)
        scaled_B_K = (centred_Q_G_K / (spread(rewards_Q_G_K, 1) + EPSILON)).view_as(rewards_B_K)
        sums_B = (scaled_B_K * weights_K).nansum(dim=1).masked_fill(rewards_B_K.isnan().all(dim=1), torch.nan)
        return ((sums_B - sums_B.nanmean()) / (spread(sums_B, 0) + EPSILON)).nan_to_num(nan=0.0)
    rewards_Q_G = rewards_B.view(-1, num_generations)
    centred_Q_G = rewards_Q_G - rewards_Q_G.nanmean(dim=1, keepdim=True)
    if scale_rewards == "group":
        centred_Q_G = centred_Q_G / (spread(rewards_Q_G, 1) + EPSILON)
    elif scale_rewards == "batch":
        centred_Q_G = centred_Q_G / (spread(rewards_B, 0) + EPSILON)
    return centred_Q_G.flatten().nan_to_num(nan=0.0)
