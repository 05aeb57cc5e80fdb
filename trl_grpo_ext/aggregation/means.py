"""Means and sums: tokens count equally, or by their completion, prompt or length."""

from __future__ import annotations

import torch

from ..credit.groups import gather_groups, group_sum
from ..errors import ConfigurationError
from ..guard.parameters import checked_whole
from ..types import AggregationDeclaration, Rollout, Totals


class TokenMean:
    """Every token of the generation batch counts the same: `w = 1 / Σ_i |o_i|`.

    Source: DAPO (2503.14476), eq. 8.

    Departures: the paper's sum runs over one group; here, as in TRL's `loss_type="dapo"`, over all groups of the
    generation batch and all ranks, so that the loss is the same however the batch is cut.
    """

    __name__ = "token_mean"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)` that sum to 1 over all ranks (to 0 in a batch without a live token)."""
        return rollout.mask_B_T / max(rollout.totals.tokens, 1)


class SeqMeanTokenMean:
    """Every completion counts the same, and its tokens share its weight: `w = 1 / (N |o_i|)`.

    A wrong long completion is punished less per token than a wrong short one (the length bias that Dr. GRPO names).

    Source: GRPO (2402.03300), eq. 3. Equals the reduction of TRL's `loss_type="grpo"`.

    Departures: none, since groups have equal size. A completion without a live token counts in N, as in TRL.
    """

    __name__ = "seq_mean_token_mean"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`; each completion's sum to `1/N`."""
        return rollout.mask_B_T / rollout.lengths_B.clamp(min=1.0).unsqueeze(1) / max(rollout.totals.sequences, 1)


class SeqMeanTokenSum:
    """Every token counts the same, whatever the batch's lengths: `w = 1 / N`.

    The scale of the gradient grows with the mean length; expect to lower the learning rate by about that factor against
    `token_mean`.

    Source: LUSPO (2602.05261), whose sequence-level loss times the length is this sum. Equals the reduction of TRL's
    `loss_type="luspo"`.

    Departures: the paper pairs it with sequence-level importance ratios; set `importance_sampling_level="sequence"`.
    """

    __name__ = "seq_mean_token_sum"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, `1/N` on the mask."""
        return rollout.mask_B_T / max(rollout.totals.sequences, 1)


class ConstantLength:
    """Every token counts the same and nothing depends on the batch: `w = 1 / (N L_max)`.

    Like `seq_mean_token_sum` without its length bias, on a scale that does not depend on the generation limit.

    Source: Dr. GRPO (2503.20783), eq. 2 and listing 1. Equals the reduction of TRL's `loss_type="dr_grpo"`.

    Departures: none; the paper also leaves the advantages unscaled, which is TRL's `scale_rewards="none"`.

    Args:
        length: `L_max` in tokens; by default the run's `max_completion_length`.
    """

    __name__ = "constant_length"

    def __init__(self, *, length: int | None = None) -> None:
        self.length = None if length is None else checked_whole("constant_length: length", length, 1)

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, `1 / (N L_max)` on the mask."""
        length = rollout.totals.max_completion_length if self.length is None else self.length
        return rollout.mask_B_T / (max(rollout.totals.sequences, 1) * length)


class PromptMean:
    """Every prompt counts the same, and the tokens of its group share its weight: `w = 1 / (Q Σ_{j in group} |o_j|)`.

    Between `token_mean`, where a prompt with long answers outweighs the others, and `seq_mean_token_mean`, where a long
    answer's tokens count less than a short one's. Long completions still outweigh short ones of the same prompt.

    Source: the prompt-level loss aggregation of ScaleRL (2510.13786).

    Departures: none in the formula. A group without a live token counts in Q, so the weights then sum to less than 1.
    """

    __name__ = "prompt_mean"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`; each group's sum to `1/Q` over all ranks."""
        tokens_N = group_sum(rollout.gather(rollout.lengths_B), gather_groups(rollout))
        tokens_B = tokens_N[rollout.local_rows].clamp(min=1.0)
        return rollout.mask_B_T / tokens_B.unsqueeze(1) / max(rollout.totals.prompts, 1)


class TokenSum:
    """Every token counts 1: the loss of an optimizer step is the sum over its tokens on all ranks and micro-batches.

    Without a divisor the gradient grows with the batch, the group size and the lengths. Divide a learning rate that
    suits `token_mean` by the usual number of tokens per step, or clip the gradient.

    Source: REINFORCE (Williams, 1992), whose estimate sums over an episode's steps.

    Departures: the sum runs over all episodes of a step instead of one.
    """

    __name__ = "token_sum"
    declares = AggregationDeclaration(per_step=True)

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, 1 on the mask."""
        return rollout.mask_B_T


class TokenMeanStep:
    """Every token of one optimizer step counts the same, over all ranks and micro-batches: `Σ l / (step's tokens)`.

    With several optimizer steps per generation batch, `token_mean` gives a step with long completions a larger
    gradient. Here each step is its own mean. With one step per generation batch the two are the same.

    Source: the token-level loss of DAPO (2503.14476), eq. 8, normalised over one optimizer step as OpenRLHF does.

    Departures: the paper's sum runs over one group.
    """

    __name__ = "token_mean_step"
    declares = AggregationDeclaration(needs=("step_totals",))

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return the micro-batch's share, scaled so that the mean over the step's micro-batches and ranks is exact."""
        if totals.step is None:
            raise ConfigurationError(
                "token_mean_step: totals.step is None, so the tokens of the optimizer step are not known. The trainer "
                "sets it where every optimizer step lies within one generation batch; otherwise use token_mean."
            )
        shares = totals.processes * totals.step.micro_batches
        return _live_sum(loss_B_T, mask_B_T) * (shares / max(totals.step.tokens, 1))


class TokenMeanLocal:
    """The mean over the live tokens of each micro-batch, then the mean over micro-batches and ranks.

    The gradient depends on batch size, accumulation, ranks and shuffling. Prefer `token_mean`; this one is for
    comparisons with TRL's `loss_type="bnpo"`, whose reduction it equals.

    Source: the name is TRL's, after BNPO (2506.02864). Departures: BNPO's own subject is the normalisation of rewards
    by a Beta distribution, which is not part of this.
    """

    __name__ = "token_mean_local"

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return `Σ m·l / Σ m` of one micro-batch; 0 where it has no live token."""
        return _live_sum(loss_B_T, mask_B_T) / mask_B_T.sum().clamp(min=1.0)


def _live_sum(loss_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """The sum over live tokens; values off the mask are not read."""
    return (torch.where(mask_B_T > 0, loss_B_T, 0.0) * mask_B_T).sum()
