"""Reward minus the group's mean, over the group's standard deviation (GRPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..guard.parameters import checked_number
from .group_statistics import gather_rewards, group_means, group_stds, on_every_token

if TYPE_CHECKING:
    import torch

    from ..types import Rollout


class Normalised:
    """A completion's reward in standard deviations from the mean of its group: `A_i = (r_i - μ) / (max(σ, floor) + ε)`.

    Without a floor TRL's own advantages under `scale_rewards="group"`, and the same numbers. It replaces the advantages
    that come in on every token, so it stands first in a chain: there it makes a run independent of what `scale_rewards`
    says.

    Where rewards are graded (a classifier's probability, a length), a group whose completions are nearly alike has a
    tiny σ, and dividing by it makes differences of no account as large as any. A floor bounds how much a difference of
    rewards is stretched.

    Source: GRPO (2402.03300), outcome supervision.

    Departures: the paper has no ε and does not say which σ; as in TRL, σ is unbiased (n - 1) and ε is 1e-4. The floor
    is ours. A completion that no reward function scored gets advantage 0 and has no part in μ and σ; one that is the
    only scored completion of its group gets 0 as well. In a group of equal rewards all advantages are exactly 0; TRL's
    are what rounding leaves of it.

    Args:
        epsilon: ε, in units of the reward; positive.
        std_floor: The least σ to divide by, in units of the reward; not negative. With 0.1 no difference of rewards is
            stretched more than tenfold.

    Raises:
        ConfigurationError: A parameter is out of its range.
    """

    __name__ = "normalised"

    def __init__(self, *, epsilon: float = 1e-4, std_floor: float = 0.0) -> None:
        self.epsilon = checked_number("normalised: epsilon", epsilon, "a positive number", lambda x: x > 0)
        self.std_floor = checked_number(
            "normalised: std_floor", std_floor, "a number that is not negative", lambda x: x >= 0
        )

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`, constant over each completion's tokens."""
        rewards_N, scored_N, groups_N = gather_rewards(rollout)
        centred_N = scored_N * (rewards_N - group_means(rewards_N, scored_N, groups_N))
        stds_N = group_stds(rewards_N, scored_N, groups_N).clamp(min=self.std_floor)
        new_N = centred_N / (stds_N + self.epsilon)
        return on_every_token(new_N[rollout.local_rows], advantages_B_T)
