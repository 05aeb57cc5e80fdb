"""Plain sum over the tokens of an optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..types import Rollout


class TokenSum:
    """Every token counts 1: the loss of an optimizer step is the sum over its tokens on all ranks and micro-batches.

    Nothing is divided by, so nothing is biased; but the gradient grows with the batch, the group size and the lengths.
    Divide a learning rate that suits `token_mean` by the usual number of tokens of a step, or clip the gradient. Adam's
    updates don't depend on a constant scale, but still on how it changes from step to step.

    Source: REINFORCE (Williams, 1992), whose estimate sums over an episode's steps.

    Departures: the sum runs over all episodes of a step instead of one. `weights` are per generation batch, so with
    several optimizer steps per batch a token's weight is `1 / optimizer_steps`, which the trainer multiplies again for
    each step's share.
    """

    __name__ = "token_sum"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, 1 on the mask where the generation batch feeds one optimizer step."""
        return rollout.mask_B_T / rollout.totals.optimizer_steps
