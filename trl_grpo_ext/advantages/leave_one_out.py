"""Leave-one-out baseline (RLOO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .group_statistics import gather_rewards, group_means, group_sums, on_every_token

if TYPE_CHECKING:
    import torch

    from ..types import Rollout


class LeaveOneOut:
    """A completion's reward minus the mean reward of the others in its group: `A_i = r_i - mean_{j≠i} r_j`.

    The baseline does not contain the completion's own reward, so the policy gradient is unbiased. There is no division
    by the group's standard deviation. It replaces the advantages that come in (TRL's, or an earlier hook's) on every
    token, so it stands first in a chain.

    Source: RLOO (2402.14740), eq. 6.

    Departures: a completion that no reward function scored gets advantage 0 and is in nobody's baseline; one that is
    the only scored completion of its group has no others to compare with and gets 0 as well.
    """

    __name__ = "leave_one_out"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`, constant over each completion's tokens."""
        rewards_N, scored_N, groups_N = gather_rewards(rollout)
        counts_N = group_sums(scored_N, groups_N)
        centred_N = scored_N * (rewards_N - group_means(rewards_N, scored_N, groups_N))
        # Of n rewards with the mean μ, r minus the mean of the n - 1 others is n/(n - 1) · (r - μ).
        new_N = centred_N * counts_N / (counts_N - 1).clamp(min=1)
        return on_every_token(new_N[rollout.local_rows], advantages_B_T)
