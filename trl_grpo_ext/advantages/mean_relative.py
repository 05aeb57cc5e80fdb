"""Reward relative to the group's mean (MaxRL)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import PluginOutputError
from .group_statistics import gather_rewards, group_means, on_every_token

if TYPE_CHECKING:
    from ..types import Rollout


class MeanRelative:
    """How much better than its group a completion is, as a share of the group's mean: `A_i = (r_i - μ) / μ`.

    With rewards of 0 and 1, μ is the share of successes, and dividing the gradient of the success rate by it gives the
    gradient of its logarithm, in expectation up to terms that vanish as groups grow: maximum likelihood of a right
    answer instead of the expected number of them. Hard prompts weigh more: one success among G completions gets
    `G - 1`, and every failure -1. A group without a success gets 0. It replaces the advantages that come in on every
    token, so it stands first in a chain.

    Source: Maximum Likelihood Reinforcement Learning (2602.02710).

    Departures: the paper is about rewards of 0 and 1; any that are not negative are taken here. A completion that no
    reward function scored gets advantage 0 and has no part in μ.

    Raises:
        PluginOutputError: From `on_rollout`: a reward is negative, and a mean of rewards of both signs is no measure to
            divide by.
    """

    __name__ = "mean_relative"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`, constant over each completion's tokens."""
        rewards_N, scored_N, groups_N = gather_rewards(rollout)
        lowest = float(rewards_N.min())  # over all ranks, so that all of them stop, or none
        if lowest < 0:
            raise PluginOutputError(
                f"mean_relative: rewards must not be negative, got {lowest:g}. Leave out the reward function that "
                "goes below 0, or use centred or normalised, which take rewards of any sign."
            )
        means_N = group_means(rewards_N, scored_N, groups_N)
        new_N = scored_N * (rewards_N - means_N) / torch.where(means_N > 0, means_N, 1.0)
        return on_every_token(new_N[rollout.local_rows], advantages_B_T)
