"""The reward itself, without a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .group_statistics import on_every_token

if TYPE_CHECKING:
    from ..types import Rollout


class RawReward:
    """A completion's reward as it is: `A_i = r_i`.

    Unbiased, and of the largest variance: with rewards of 0 and 1 only successes have a gradient, and an easy prompt
    has more of it than a hard one. The point to start from when the effect of a baseline is in question, and, with
    rewards of both signs, what `sign_scaling` expects in front of it. It replaces the advantages that come in on every
    token, so it stands first in a chain.

    Source: REINFORCE (Williams, 1992), with the baseline left out.

    Departures: a completion that no reward function scored gets advantage 0.
    """

    __name__ = "raw_reward"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`, constant over each completion's tokens."""
        scored_B = ~torch.isnan(rollout.rewards_B)
        return on_every_token(torch.where(scored_B, rollout.rewards_B, 0.0), advantages_B_T)
