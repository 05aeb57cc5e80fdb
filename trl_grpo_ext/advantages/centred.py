"""Reward minus the group's mean (Dr. GRPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .group_statistics import gather_rewards, group_means, on_every_token

if TYPE_CHECKING:
    import torch

    from ..types import Rollout


class Centred:
    """A completion's reward minus the mean reward of its group: `A_i = r_i - μ`.

    Without the division by the group's standard deviation, which makes prompts that are nearly always solved, or
    nearly never, count more than those in between. It replaces the advantages that come in on every token, so it stands
    first in a chain.

    Source: Dr. GRPO (2503.20783), its advantage. The other half of the method, a constant divisor instead of each
    completion's length, is the aggregation `constant_length`.

    Departures: a completion that no reward function scored gets advantage 0 and has no part in the mean.
    """

    __name__ = "centred"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`, constant over each completion's tokens."""
        rewards_N, scored_N, groups_N = gather_rewards(rollout)
        new_N = scored_N * (rewards_N - group_means(rewards_N, scored_N, groups_N))
        return on_every_token(new_N[rollout.local_rows], advantages_B_T)
