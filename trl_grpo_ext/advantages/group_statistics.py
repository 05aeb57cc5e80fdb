"""Sums, means and deviations over groups, for hooks that compare the completions of a prompt.

A group may be spread over ranks, so all of this is over the rows of all ranks, `N` of them: gather, compute, keep
`[rollout.local_rows]`. Each statistic comes back as `(N,)`: every row is handed its own group's number.

    rewards_N, scored_N, groups_N = gather_rewards(rollout)
    means_N = group_means(rewards_N, scored_N, groups_N)
    new_N = scored_N * (rewards_N - means_N)
    return on_every_token(new_N[rollout.local_rows], advantages_B_T)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..types import Rollout


def gather_rewards(rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards and groups of all ranks' completions. Gathers twice.

    Returns:
        rewards_N: The rewards, in float32 at least; 0 where no function gave one.
        scored_N: 1.0 where a function gave a reward and 0.0 elsewhere, in the dtype of the rewards.
        groups_N: The groups, numbered from 0, whatever the ids are.
    """
    precise = torch.promote_types(rollout.rewards_B.dtype, torch.float32)
    rewards_N = rollout.gather(rollout.rewards_B.to(precise))
    groups_N = torch.unique(rollout.gather(rollout.group_ids_B), return_inverse=True)[1]
    unscored_N = torch.isnan(rewards_N)
    return rewards_N.masked_fill(unscored_N, 0.0), (~unscored_N).to(precise), groups_N


def group_sums(values_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Each row's group's sum. Of `scored_N`: the number of its scored members."""
    # There are at most as many groups as rows; the places that are left over stay zero and are read by nobody.
    return torch.zeros_like(values_N).index_add(0, groups_N, values_N)[groups_N]


def group_lowest(values_N: torch.Tensor, weights_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Each row's group's lowest value among the rows of positive weight; 0 where there is none."""
    counted_N = torch.where(weights_N > 0, values_N, torch.inf)
    lowest_N = torch.full_like(values_N, torch.inf).scatter_reduce(0, groups_N, counted_N, "amin")[groups_N]
    return torch.where(group_sums(weights_N, groups_N) > 0, lowest_N, 0.0)


def group_highest(values_N: torch.Tensor, weights_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Each row's group's highest value among the rows of positive weight; 0 where there is none."""
    return -group_lowest(-values_N, weights_N, groups_N)


def group_means(values_N: torch.Tensor, weights_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Each row's group's weighted mean, `Σ w·v / Σ w`; with `scored_N` as weights the mean over its scored members.

    The mean is taken of the distances to the group's lowest value. So the mean of equal values is that very value, and
    a group whose rewards agree has advantages of exactly zero, not what rounding left of them.

    Args:
        values_N: Values, finite everywhere.
        weights_N: Weights, not negative. Where a group has none, its mean is 0.
        groups_N: Groups, numbered from 0.
    """
    totals_N = group_sums(weights_N, groups_N)
    lowest_N = group_lowest(values_N, weights_N, groups_N)
    above_N = group_sums(weights_N * (values_N - lowest_N), groups_N)
    return lowest_N + above_N / torch.where(totals_N > 0, totals_N, 1.0)


def group_stds(values_N: torch.Tensor, scored_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Each row's group's standard deviation over its scored members, with n - 1; 0 where there are fewer than two."""
    from_mean_N = scored_N * (values_N - group_means(values_N, scored_N, groups_N))
    degrees_N = group_sums(scored_N, groups_N) - 1
    return (group_sums(from_mean_N.square(), groups_N) / degrees_N.clamp(min=1)).sqrt()


def on_every_token(values_B: torch.Tensor, advantages_B_T: torch.Tensor) -> torch.Tensor:
    """One number per completion on each of its tokens, `(B, T)`, with shape and dtype of the advantages it replaces."""
    return values_B.to(advantages_B_T.dtype).unsqueeze(1).expand_as(advantages_B_T)
