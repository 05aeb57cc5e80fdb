"""The reward of the group's best completions, and nothing for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .group_statistics import gather_rewards, group_highest, on_every_token

if TYPE_CHECKING:
    from ..types import Rollout


class MaxOnly:
    """Only the best of a group are learnt from, each with its reward: `A_i = r_i` where `r_i = max_j r_j`, else 0.

    Completions that share the highest reward all keep it. A partial success beside a better completion earns nothing,
    so the policy does not settle on partial successes. There is no baseline: nothing pushes away from failures, and a
    highest reward below 0 pushes away from the best completion, so it is for rewards that are not negative. It replaces
    the advantages that come in on every token, so it stands first in a chain.

    Source: one of the four "deltas" of Stanford CS336 (2025), lecture 17, beside `raw_reward`, `centred` and
    `normalised`.

    Departures: a completion that no reward function scored gets advantage 0 and is not the best.
    """

    __name__ = "max_only"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`, constant over each completion's tokens."""
        rewards_N, scored_N, groups_N = gather_rewards(rollout)
        best_N = rewards_N == group_highest(rewards_N, scored_N, groups_N)
        new_N = torch.where(best_N, scored_N * rewards_N, 0.0)
        return on_every_token(new_N[rollout.local_rows], advantages_B_T)
