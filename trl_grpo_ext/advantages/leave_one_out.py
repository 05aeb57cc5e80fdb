"""Leave-one-out baseline (RLOO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
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
        rewards_N = rollout.gather(rollout.rewards_B)
        groups_N = rollout.gather(rollout.group_ids_B)
        scored_N = ~torch.isnan(rewards_N)
        values_N = torch.where(scored_N, rewards_N, 0.0)
        # A group may be spread over ranks, hence sums over all ranks' rows.
        sums_Q = values_N.new_zeros(rollout.totals.prompts).index_add(0, groups_N, values_N)
        counts_Q = values_N.new_zeros(rollout.totals.prompts).index_add(0, groups_N, scored_N.to(values_N.dtype))
        others_N = counts_Q[groups_N] - 1
        baselines_N = (sums_Q[groups_N] - values_N) / others_N.clamp(min=1)
        usable_N = scored_N & (others_N > 0)
        new_B = torch.where(usable_N, values_N - baselines_N, 0.0)[rollout.local_rows]
        return new_B.to(advantages_B_T.dtype).unsqueeze(1).expand_as(advantages_B_T)
