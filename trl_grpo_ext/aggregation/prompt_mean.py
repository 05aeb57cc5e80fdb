"""Mean over prompts of each group's token mean (ScaleRL)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..types import Rollout


class PromptMean:
    """Every prompt counts the same, and the tokens of its group share its weight: `w = 1 / (Q Σ_{j in group} |o_j|)`.

    Between `token_mean`, where a prompt with long answers outweighs the others, and `seq_mean_token_mean`, where a long
    answer's tokens count less than a short one's: here length biases neither the choice of prompts nor, within a group,
    that of tokens. Long completions still outweigh short ones of the same prompt.

    Source: the prompt-level loss aggregation of ScaleRL (2510.13786).

    Departures: none in the formula. A group without a live token counts in Q, so the weights then sum to less than 1.
    """

    __name__ = "prompt_mean"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`; each group's sum to `1/Q` over all ranks."""
        lengths_N = rollout.gather(rollout.lengths_B)
        groups_N = rollout.gather(rollout.group_ids_B)
        same_group_B_N = rollout.group_ids_B.unsqueeze(1) == groups_N
        tokens_B = (same_group_B_N * lengths_N).sum(dim=1).clamp(min=1.0)
        return rollout.mask_B_T / tokens_B.unsqueeze(1) / max(rollout.totals.prompts, 1)
