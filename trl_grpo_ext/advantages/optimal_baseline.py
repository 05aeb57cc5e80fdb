"""Length-weighted baseline of least variance (OPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .group_statistics import gather_rewards, group_means, group_sums, on_every_token

if TYPE_CHECKING:
    from ..types import Rollout


class OptimalBaseline:
    """A completion's reward minus the length-weighted mean reward of its group: `A_i = r_i - Σ_j L_j r_j / Σ_j L_j`.

    Among constant baselines of a group this one gives the policy gradient the least variance, if the squared norm of a
    completion's gradient grows with its length `L` and the gradients of different tokens are uncorrelated. `L` counts
    the tokens that count in the loss. With equal lengths it is `centred`. It replaces the advantages that come in on
    every token, so it stands first in a chain.

    Source: On-Policy RL with Optimal Reward Baseline (2505.23585).

    Departures: a completion that no reward function scored gets advantage 0 and has no part in the baseline. In a group
    whose scored completions have no token that counts, the baseline is the mean.
    """

    __name__ = "optimal_baseline"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`, constant over each completion's tokens."""
        rewards_N, scored_N, groups_N = gather_rewards(rollout)
        lengths_N = scored_N * rollout.gather(rollout.lengths_B).to(scored_N.dtype)
        weights_N = torch.where(group_sums(lengths_N, groups_N) > 0, lengths_N, scored_N)
        new_N = scored_N * (rewards_N - group_means(rewards_N, weights_N, groups_N))
        return on_every_token(new_N[rollout.local_rows], advantages_B_T)
