"""Loss aggregations: tokens count equally, or by their completion, prompt, length, outcome or prefix."""

import torch

from ..credit.groups import gather_groups, group_extremes, group_mean, group_sum, groups_with_prefixes, without_rounding
from ..errors import ConfigurationError
from ..guard.parameters import Checked, choice, number, whole
from ..types import AggregationDeclaration, Rollout, Totals


class TokenMean:
    """Every token of the generation batch counts the same: `w = 1 / Σ_i |o_i|`.

    Source: DAPO (2503.14476), eq. 8.
    Departures: the paper's sum runs over one group; here, as in TRL's `loss_type="dapo"`, over the generation batch of
    all ranks, so that the loss is the same however the batch is cut.
    """

    __name__ = "token_mean"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        return rollout.mask_B_T / max(rollout.totals.tokens, 1)


class SeqMeanTokenMean:
    """Every completion counts the same, and its tokens share its weight: `w = 1 / (N |o_i|)`.

    A wrong long completion is punished less per token than a wrong short one (the length bias that Dr. GRPO names).

    Source: GRPO (2402.03300), eq. 3. Equals the reduction of TRL's `loss_type="grpo"`.
    Departures: none, since groups have equal size. A completion without a live token counts in N, as in TRL.
    """

    __name__ = "seq_mean_token_mean"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        return rollout.mask_B_T / rollout.lengths_B.clamp(min=1.0).unsqueeze(1) / max(rollout.totals.sequences, 1)


class SeqMeanTokenSum:
    """Every token counts the same, whatever the batch's lengths: `w = 1 / N`.

    The gradient grows with the mean length: lower the learning rate by about that factor against `token_mean`.

    Source: LUSPO (2602.05261), whose sequence-level loss times the length is this sum. Equals TRL's `luspo`.
    Departures: the paper pairs it with sequence-level importance ratios; set `importance_sampling_level="sequence"`.
    """

    __name__ = "seq_mean_token_sum"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        return rollout.mask_B_T / max(rollout.totals.sequences, 1)


class ConstantLength(Checked):
    """Every token counts the same and nothing depends on the batch: `w = 1 / (N L_max)`.

    Source: Dr. GRPO (2503.20783), eq. 2 and listing 1. Equals the reduction of TRL's `loss_type="dr_grpo"`.
    Departures: none; the paper also leaves the advantages unscaled, which is TRL's `scale_rewards="none"`.

    Args:
        length: `L_max` in tokens; by default the run's `max_completion_length`.
    """

    __name__ = "constant_length"
    length: int | None = whole(None, lowest=1)

    def weights(self, rollout: Rollout) -> torch.Tensor:
        length = rollout.totals.max_completion_length if self.length is None else self.length
        return rollout.mask_B_T / (max(rollout.totals.sequences, 1) * length)


class PromptMean:
    """Every prompt counts the same, and the tokens of its group share its weight: `w = 1 / (Q Σ_{j in group} |o_j|)`.

    Long completions still outweigh short ones of the same prompt.

    Source: the prompt-level loss aggregation of ScaleRL (2510.13786).
    Departures: none in the formula. A group without a live token counts in Q, so the weights then sum to less than 1.
    """

    __name__ = "prompt_mean"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        tokens_N = group_sum(rollout.gather(rollout.lengths_B), gather_groups(rollout))
        tokens_B = tokens_N[rollout.local_rows].clamp(min=1.0)
        return rollout.mask_B_T / tokens_B.unsqueeze(1) / max(rollout.totals.prompts, 1)


class TokenSum:
    """Every token counts 1: the loss of an optimizer step is the sum over its tokens on all ranks and micro-batches.

    Divide a learning rate that suits `token_mean` by the usual number of tokens per step, or clip the gradient.

    Source: REINFORCE (Williams, 1992), whose estimate sums over the steps of one episode.
    """

    __name__ = "token_sum"
    declares = AggregationDeclaration(per_step=True)

    def weights(self, rollout: Rollout) -> torch.Tensor:
        return rollout.mask_B_T


class TokenMeanStep:
    """Every token of one optimizer step counts the same, over all ranks and micro-batches: `Σ l / (step's tokens)`.

    Source: the token-level loss of DAPO (2503.14476), eq. 8, normalised over one optimizer step as OpenRLHF does.
    Departures: the paper's sum runs over one group.
    """

    __name__ = "token_mean_step"
    declares = AggregationDeclaration(needs=("step_totals",))

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        if totals.step is None:
            raise ConfigurationError("token_mean_step: totals.step is None: an optimizer step spans several batches.")
        shares = totals.processes * totals.step.micro_batches
        return _live_sum(loss_B_T, mask_B_T) * (shares / max(totals.step.tokens, 1))


class TokenMeanLocal:
    """The mean over the live tokens of each micro-batch, then the mean over micro-batches and ranks.

    The gradient depends on batch size, accumulation, ranks and shuffling; this is for comparisons with TRL's
    `loss_type="bnpo"`, whose reduction it equals.

    Source: the name is TRL's, after BNPO (2506.02864).
    Departures: BNPO's own subject, the normalisation of rewards by a Beta distribution, is not part of this.
    """

    __name__ = "token_mean_local"

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        return _live_sum(loss_B_T, mask_B_T) / mask_B_T.sum().clamp(min=1.0)


def _live_sum(loss_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """The sum over live tokens; values off the mask are not read."""
    return (torch.where(mask_B_T > 0, loss_B_T, 0.0) * mask_B_T).sum()


class LengthPower(Checked):
    """Weigh each completion's token sum by a power of its length: `w = |o_i|^-α / Σ_j |o_j|^-α`.

    If the variance of a completion's gradient is proportional to its length, α = 1 gives the weighted mean of token
    sums with the least variance; a smaller α lets long completions count more.

    Source: VL Norm, first called ΔL normalisation (2509.07558). The sum runs over the batch, as in its authors' code.
    Departures: the paper's constant factor 1/M is 1. Completions without a live token are not in the sum.

    Args:
        alpha: α, not negative. The paper's theory asks for 1; for mathematics its authors use 0.75.
    """

    __name__ = "length_power"
    alpha: float = number(1.0, "a finite number that is not negative", lambda x: x >= 0)

    def weights(self, rollout: Rollout) -> torch.Tensor:
        lengths_N = rollout.gather(rollout.lengths_B)
        live_N = lengths_N > 0
        # In units of the shortest completion, whose power is 1: nothing overflows, and the sum is at least 1.
        shortest = torch.where(live_N, lengths_N, torch.inf).min()
        powers_N = torch.where(live_N, (lengths_N / shortest) ** -self.alpha, 0.0)
        weights_N = powers_N / powers_N.sum().clamp(min=1.0)
        return rollout.mask_B_T * weights_N[rollout.local_rows].unsqueeze(1)


class SignBalanced(Checked):
    """A token mean within each sign of the outcome, weighted by how many completions have it.

    `w_i = 1/Q · (G_s / G) / Σ_{j in s} |o_j|`, where an outcome is a completion's reward minus its group's mean, `s`
    are the group's completions whose outcome has the same sign as completion i's, and `G_s` is their number. In a plain
    token mean the longer side wins; here the sides' weights don't depend on their lengths.

    Source: Balanced Aggregation (2605.04077). Its sign is that of GRPO's advantage, which equals the outcome's.
    Departures: the sign is of the rewards before any shaper. Completions whose reward is the mean, or without a reward,
    form a third part. `G_s` and `G` count the completions with a live token; a group with none counts in Q.

    Args:
        over: "group", as in the paper, or "batch", which treats the generation batch of all ranks as one group.
    """

    __name__ = "sign_balanced"
    over: str = choice("group", "batch")

    def weights(self, rollout: Rollout) -> torch.Tensor:
        lengths_N = rollout.gather(rollout.lengths_B)
        groups_N = gather_groups(rollout)
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

    So each distinct step counts once; in a token mean common beginnings weigh more than where completions diverge.

    Source: λ-GRPO of "GRPO is secretly a process reward model" (2509.21154), which divides the token-level loss by the
    size of a token's process set.
    Departures: `n` is the number of completions with the same prefix whose token counts in the loss.
    """

    __name__ = "prefix_share"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        live_N_T = rollout.gather(rollout.mask_B_T) > 0
        width = rollout.mask_B_T.size(1)
        sharers_B_T = torch.ones_like(rollout.mask_B_T)
        place_T = torch.arange(width, device=live_N_T.device)
        for rows_B, members_N, shared_b_G in groups_with_prefixes(rollout):
            counted_b_G_T = (place_T < shared_b_G.unsqueeze(2)) & live_N_T[members_N, :width]
            sharers_B_T[rows_B] = counted_b_G_T.sum(dim=1).clamp(min=1).to(sharers_B_T.dtype)
        return rollout.mask_B_T / sharers_B_T / max(rollout.totals.tokens, 1)


class TailMean(Checked):
    """The mean of the largest sequence losses, each the mean over its completion's tokens.

    Of `n` completions the worst `k = fraction · n` count 1/k each, the rest nothing. Ties share the remaining weight; a
    fractional `k` takes a part of the last one. Over micro-batches and ranks it is the mean of their tails.

    Source: conditional value at risk, Rockafellar & Uryasev, "Optimization of conditional value-at-risk" (2000), with
    `fraction = 1 - β` of the paper.
    Departures: completions without a live token are left out; a micro-batch without any others gives 0.

    Args:
        fraction: Share of the completions that count, greater than 0 and at most 1; 1 is the mean over all.
    """

    __name__ = "tail_mean"
    fraction: float = number(0.5, "greater than 0 and at most 1", lambda x: 0 < x <= 1)

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        lengths_B = mask_B_T.sum(dim=1)
        sums_B = (torch.where(mask_B_T > 0, loss_B_T, 0.0) * mask_B_T).sum(dim=1)
        losses_n = sums_B[lengths_B > 0] / lengths_B[lengths_B > 0]
        values_n = losses_n.detach()
        worst = self.fraction * len(values_n)
        worse_n = (values_n.unsqueeze(0) > values_n.unsqueeze(1)).sum(dim=1).to(values_n.dtype)
        equal_n = (values_n.unsqueeze(0) == values_n.unsqueeze(1)).sum(dim=1).to(values_n.dtype)
        parts_n = ((worst - worse_n) / equal_n).clamp(min=0.0, max=1.0)
        return (parts_n / worst * losses_n).sum()
