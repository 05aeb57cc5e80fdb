"""Token mean over one optimizer step, exact however the step is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..types import Totals


class TokenMeanStep:
    """Every token of one optimizer step counts the same, over all ranks and micro-batches: `Σ l / (step's tokens)`.

    `token_mean` divides by the tokens of the generation batch, so that with several optimizer steps per batch a step
    that drew long completions has a larger gradient. Here each step is a mean of its own: all steps have the same
    scale, and a token of a short step counts more. The two are the same where a generation batch feeds one step.

    Source: the token-level loss of DAPO (2503.14476), eq. 8, normalised over one optimizer step as OpenRLHF does.

    Departures: the paper's sum runs over one group.

    Raises:
        ConfigurationError: From `reduce`, where the totals hold no counts of the step.
    """

    __name__ = "token_mean_step"
    needs_step_totals = True

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return the micro-batch's share, scaled so that the mean over the step's micro-batches and ranks is exact."""
        if totals.step is None:
            raise ConfigurationError(
                "token_mean_step: totals.step is None, so the tokens of the optimizer step are not known. The trainer "
                "sets it where every optimizer step lies within one generation batch; otherwise use token_mean."
            )
        shares = totals.processes * totals.step.micro_batches
        return (torch.where(mask_B_T > 0, loss_B_T, 0.0) * mask_B_T).sum() * (shares / max(totals.step.tokens, 1))
