"""Weights by a group's outcomes and prefixes: which completions won, and where they diverge."""

from __future__ import annotations

import torch

from ..credit.groups import gather_groups, group_extremes, group_mean, group_sum, groups_with_prefixes, without_rounding
from ..guard.parameters import checked_choice
from ..types import Rollout


class SignBalanced:
    """A token mean within each sign of the outcome, weighted by how many completions have it.

    `w_i = 1/Q · (G_s / G) / Σ_{j in s} |o_j|`, where an outcome is a completion's reward minus its group's mean, `s`
    are the group's completions whose outcome has the same sign as completion i's, and `G_s` is their number. In a plain
    token mean the longer side wins: if wrong answers are long, pushing them down outweighs pulling right ones up. Here
    the sides' weights don't depend on their lengths, and within a side every token counts the same.

    Source: Balanced Aggregation (2605.04077). Its sign is that of GRPO's advantage, which equals the outcome's.

    Departures: the sign is of the rewards before any shaper, whatever hooks make of the advantages. Completions whose
    reward is the mean, or without a reward, form a third part; they may carry a KL penalty. `G_s` and `G`
    count the completions with a live token; a group with none counts in Q.

    Args:
        over: "group", as in the paper, or "batch", which treats the generation batch of all ranks as one group;
            outcomes are relative to a completion's own group in both.
    """

    __name__ = "sign_balanced"

    def __init__(self, *, over: str = "group") -> None:
        self.over = checked_choice("sign_balanced: over", over, ("group", "batch"))

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, the same for all tokens of a completion."""
        lengths_N, groups_N = rollout.gather(rollout.lengths_B), gather_groups(rollout)
        # By rewards and not by advantages: a KL penalty or a teacher may flip the sign of a right answer's.
        rewards_N = rollout.gather(rollout.raw_rewards_B)
        apart_N = rewards_N - group_mean(rewards_N, groups_N)
        signs_N = without_rounding(apart_N, group_extremes(apart_N.abs(), groups_N)[1]).sign()
        if self.over == "batch":
            groups_N = torch.zeros_like(groups_N)
        parts_N = torch.unique(3 * groups_N + signs_N.long(), return_inverse=True)[1]
        live_N = (lengths_N > 0).to(lengths_N.dtype)
        share_N = group_sum(live_N, parts_N) / group_sum(live_N, groups_N).clamp(min=1.0)
        weights_N = share_N / group_sum(lengths_N, parts_N).clamp(min=1.0)
        groups = max(rollout.totals.prompts, 1) if self.over == "group" else 1
        return rollout.mask_B_T * weights_N[rollout.local_rows].unsqueeze(1) / groups


class PrefixShare:
    """A token counts `1/n` if `n` completions of its group share the prefix up to it: `w = 1 / (n Σ_i |o_i|)`.

    In a token mean a step that many completions of a group take counts once for each of them, so common beginnings
    weigh more than the places where completions diverge. Here each distinct step counts once. If no two completions of
    a group begin alike this is `token_mean`.

    Source: λ-GRPO of "GRPO is secretly a process reward model" (2509.21154), which divides the token-level loss by the
    size of a token's process set.

    Departures: tokens off the mask that a tool wrote belong to the prefix but are not counted: `n` is the number of
    completions with the same prefix whose token counts in the loss.
    """

    __name__ = "prefix_share"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`."""
        live_N_T = rollout.gather(rollout.mask_B_T) > 0
        width = rollout.mask_B_T.size(1)
        sharers_B_T = torch.ones_like(rollout.mask_B_T)
        place_T = torch.arange(width, device=live_N_T.device)
        for rows_B, members_N, shared_b_G in groups_with_prefixes(rollout):
            counted_b_G_T = (place_T < shared_b_G.unsqueeze(2)) & live_N_T[members_N, :width]
            sharers_B_T[rows_B] = counted_b_G_T.sum(dim=1).clamp(min=1).to(sharers_B_T.dtype)
        return rollout.mask_B_T / sharers_B_T / max(rollout.totals.tokens, 1)
