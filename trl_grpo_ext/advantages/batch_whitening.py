"""Reward minus a baseline, over the standard deviation of the whole batch (REINFORCE++-baseline)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..guard.parameters import checked_choice, checked_number
from .group_statistics import gather_rewards, group_means, group_stds, on_every_token

if TYPE_CHECKING:
    from ..types import Rollout


class BatchWhitening:
    """Subtract a baseline, then divide by one standard deviation for all: `A_i = (r_i - b_i) / max(σ, floor)`.

    σ is the unbiased standard deviation of `r - b` over the scored completions of all prompts and ranks. One divisor
    leaves prompts in the proportion that their rewards have, where a divisor per group (`normalised`) blows up those
    that are nearly always or nearly never solved. It replaces the advantages that come in on every token, so it stands
    first in a chain.

    Late in training, or with hard prompts, nearly all rewards of a batch agree and σ tends to 0; the few that differ
    would then get advantages of any size. The floor bounds how much a difference of rewards is stretched.

    Source: REINFORCE++ (2501.03262): with the group's mean as baseline its variant REINFORCE++-baseline.

    Departures: the floor is ours. σ is over completions; implementations of the paper (OpenRLHF, verl) take it, and a
    mean that they subtract, over tokens, so that long completions count more in it. The paper's KL penalty inside the
    reward is not part of this hook. A completion that no reward function scored gets advantage 0 and has no part in b
    and σ.

    Args:
        baseline: What b is: "group", the mean reward of the completion's group, or "batch", the mean over all.
        std_floor: The least divisor, in units of the reward; positive. With 0.1 no difference of rewards is stretched
            more than tenfold. That suits rewards between about 0 and 1, whose σ is .3 to .5 where prompts are neither
            all solved nor all failed; scale it with the rewards.

    Raises:
        ConfigurationError: A parameter is out of its range.
    """

    __name__ = "batch_whitening"

    def __init__(self, *, baseline: str = "group", std_floor: float = 0.1) -> None:
        self.baseline = checked_choice("batch_whitening: baseline", baseline, ("group", "batch"))
        self.std_floor = checked_number("batch_whitening: std_floor", std_floor, "a positive number", lambda x: x > 0)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`, constant over each completion's tokens."""
        rewards_N, scored_N, groups_N = gather_rewards(rollout)
        batch_N = torch.zeros_like(groups_N)  # one group of all
        over_N = groups_N if self.baseline == "group" else batch_N
        centred_N = scored_N * (rewards_N - group_means(rewards_N, scored_N, over_N))
        new_N = centred_N / group_stds(centred_N, scored_N, batch_N).clamp(min=self.std_floor)
        return on_every_token(new_N[rollout.local_rows], advantages_B_T)
