"""Token mean in which completions that begin alike share what they have in common (λ-GRPO, process sets)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..types import Rollout


class PrefixShare:
    """A token counts `1/n` where `n` completions of its group share it and all before it: `w = 1 / (n Σ_i |o_i|)`.

    In a token mean a step that many completions of a group take counts once for each of them, so common beginnings
    weigh more than the places where completions part. Here each distinct step counts once. Where no two completions of
    a group begin alike this is `token_mean`.

    Source: λ-GRPO of "GRPO is secretly a process reward model" (2509.21154), which divides the token-level loss by the
    size of a token's process set.

    Departures: tokens off the mask that a tool wrote belong to the prefix but are not counted: `n` is the number of
    completions with the same prefix whose token counts in the loss.
    """

    __name__ = "prefix_share"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`."""
        ids_N_T = rollout.gather(rollout.completion_ids_B_T)
        live_N_T = rollout.gather(rollout.mask_B_T) > 0
        groups_N = rollout.gather(rollout.group_ids_B)
        width = rollout.mask_B_T.size(1)
        sharers_B_T = torch.ones_like(rollout.mask_B_T)
        for group in set(rollout.group_ids_B.tolist()):
            rows_B, members_N = rollout.group_ids_B == group, groups_N == group
            ids_b_T, ids_G_T = rollout.completion_ids_B_T[rows_B], ids_N_T[members_N, :width]
            same_b_G_T = (ids_b_T.unsqueeze(1) == ids_G_T).cumprod(dim=2, dtype=torch.uint8) > 0
            # Both ids are real where both tokens are live, and so are all before them: padding never matches.
            shared_b_G_T = same_b_G_T & live_N_T[members_N, :width]
            sharers_B_T[rows_B] = shared_b_G_T.sum(dim=1).clamp(min=1).to(sharers_B_T.dtype)
        return rollout.mask_B_T / sharers_B_T / max(rollout.totals.tokens, 1)
