"""One selection on one saved batch: the same order of things as in the trainer, without a model.

A loss forward of the replay has the whole batch in one micro-batch of one optimizer step, with the saved
log-probabilities as those of the old and of the current policy. So the policy ratio is 1, where the gradient of each of
TRL's loss types is the same up to a constant (`cispo` bounds the ratio): a token's score, which is the gradient of its
log-probability, times its weight, times its advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...credit import flow
from ...credit.chain import HookChain
from ...credit.groups import SPREAD
from ...credit.signal import signal_of, signal_table
from ...types import Forward, Rollout, StepTotals, Totals, implements
from .estimators import group_advantages, weighted_sum
from .saved import SavedBatch
from .scores import Scorer, Scores
from .selections import ReplaySelection, check_replayable
from .tokens import Tokens


@dataclass(frozen=True)
class Played:
    """What a selection made of one batch.

    Attributes:
        reward_names: The `K` rewards.
        rewards_B_K: Each function's reward; NaN for None.
        rewards_B: Their weighted sum; NaN where no function gave one.
        outcomes: By reward, how many completions had which outcome.
        advantages_B_T: What the loss gets, zero off the loss mask.
        weights_B_T: What each token's loss counts, zero off the loss mask.
        mask_B_T: The loss mask.
        signal_Q: Which groups have signal.
    """

    reward_names: Sequence[str]
    rewards_B_K: torch.Tensor
    rewards_B: torch.Tensor
    outcomes: dict[str, dict[str, int]]
    advantages_B_T: torch.Tensor
    weights_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    signal_Q: torch.Tensor

    @property
    def mass_B_T(self) -> torch.Tensor:
        """Each token's part in the gradient: weight times the absolute advantage."""
        return self.weights_B_T * self.advantages_B_T.abs()

    @property
    def advantages_B(self) -> torch.Tensor:
        """Each completion's advantage: the mean over its live tokens."""
        return self.advantages_B_T.sum(dim=1) / self.mask_B_T.sum(dim=1).clamp(min=1.0)


def play(selection: ReplaySelection, batch: SavedBatch, tokens: Tokens, scorer: Scorer, tokenizer: Any) -> Played:
    """Run a selection on a batch.

    Raises:
        ConfigurationError: The saved completions lack what the selection needs.
        PluginError, PluginOutputError, PluginRunError, RewardError: A plugin failed.
    """
    check_replayable(selection, batch, tokens)
    scores = scorer.scores(selection, batch, tokens)
    rollout = _rollout(selection, batch, tokens, scores, tokenizer)
    chain = HookChain(selection.hooks)
    advantages_B = group_advantages(
        rollout.rewards_B,
        rollout.rewards_B_K,
        scores.weights_K,
        batch.num_generations,
        selection.settings["scale_rewards"],
        selection.settings["multi_objective_aggregation"],
    )
    advantages_B_T, _ = chain.on_rollout(advantages_B, rollout)
    rollout = replace(rollout, advantages_B_T=advantages_B_T)
    weights_B_T = None
    if implements(selection.aggregation, "weights"):
        weights_B_T = flow.token_weights(selection.aggregation, rollout)
    if chain.acts("on_forward"):
        advantages_B_T, _ = chain.on_forward(advantages_B_T, _forward(rollout, tokens))
    if weights_B_T is None:
        weights_B_T = _slopes(selection.aggregation, advantages_B_T, rollout)
    return Played(
        reward_names=scores.names,
        rewards_B_K=scores.rewards_B_K,
        rewards_B=rollout.rewards_B,
        outcomes={name: dict(counts) for name, counts in scores.outcomes.items()},
        advantages_B_T=advantages_B_T,
        weights_B_T=weights_B_T,
        mask_B_T=rollout.mask_B_T,
        signal_Q=signal_of(signal_table(replace(rollout, advantages_B_T=advantages_B_T))),
    )


def _rollout(selection: ReplaySelection, batch: SavedBatch, tokens: Tokens, scores: Scores, tokenizer: Any) -> Rollout:
    count, size = len(batch.texts), batch.num_generations
    rewards_B = scores.saved_sum_B
    if rewards_B is None:
        rewards_B = weighted_sum(scores.rewards_B_K, scores.weights_K)
    truncated_B = torch.tensor(batch.truncated or [False] * count)
    mask_B_T = tokens.mask_B_T
    if selection.settings["mask_truncated_completions"]:
        mask_B_T = mask_B_T * ~truncated_B.unsqueeze(1)
    needs = {need for hook in selection.hooks for need in getattr(hook, "needs", ())}
    return Rollout(
        prompts=batch.prompts,
        completions=batch.completions,
        columns=batch.columns,
        texts=batch.texts,
        prompt_ids_B_P=torch.zeros(count, 1, dtype=torch.long),
        prompt_mask_B_P=torch.zeros(count, 1),
        completion_ids_B_T=tokens.ids_B_T,
        mask_B_T=mask_B_T,
        completion_mask_B_T=tokens.completion_mask_B_T,
        tool_mask_B_T=_tool_mask(tokens),
        truncated_B=truncated_B,
        rewards_B_K=scores.rewards_B_K,
        reward_names=tuple(scores.names),
        reward_weights_K=scores.weights_K,
        rewards_B=rewards_B,
        reward_spans=scores.spans,
        group_ids_B=torch.arange(count) // size,
        group_baselines_B=rewards_B.view(-1, size).nanmean(dim=1).repeat_interleave(size),
        num_generations=size,
        totals=Totals(
            tokens=int(mask_B_T.sum()),
            sequences=count,
            prompts=count // size,
            max_completion_length=selection.settings["max_completion_length"],
        ),
        old_logps_B_T=tokens.logps_B_T if "old_logps" in needs else None,
        step=batch.step,
        tokenizer=tokenizer,
        offsets=tokens.offsets,
    )


def _tool_mask(tokens: Tokens) -> torch.Tensor | None:
    """1.0 where the model wrote a token. A completion of which nothing counts was masked for being cut off."""
    counts_B_1 = tokens.mask_B_T.sum(dim=1, keepdim=True) > 0
    written_B_T = torch.where(counts_B_1, tokens.mask_B_T, tokens.completion_mask_B_T)
    if torch.equal(written_B_T, tokens.completion_mask_B_T):
        return None
    return torch.where(tokens.completion_mask_B_T > 0, written_B_T, 1.0)


def _forward(rollout: Rollout, tokens: Tokens) -> Forward:
    assert tokens.logps_B_T is not None  # `check_replayable` has seen to it
    assert tokens.entropies_B_T is not None
    known_B = rollout.rewards_B.nan_to_num(nan=torch.inf).view(-1, rollout.num_generations)
    low_Q = known_B.amin(dim=1)
    high_Q = rollout.rewards_B.nan_to_num(nan=-torch.inf).view(-1, rollout.num_generations).amax(dim=1)
    nobody_Q = low_Q.isinf()
    low_Q, high_Q = low_Q.masked_fill(nobody_Q, 0.0), high_Q.masked_fill(nobody_Q, 0.0)
    equal_Q = high_Q - low_Q <= SPREAD * torch.maximum(low_Q.abs(), high_Q.abs()).clamp(min=1.0)
    return Forward(
        logps_B_T=tokens.logps_B_T,
        entropies_B_T=tokens.entropies_B_T,
        old_logps_B_T=tokens.logps_B_T,
        mask_B_T=rollout.mask_B_T,
        completion_ids_B_T=rollout.completion_ids_B_T,
        rewards_B=rollout.rewards_B,
        group_baselines_B=rollout.group_baselines_B,
        zero_variance_B=equal_Q.repeat_interleave(rollout.num_generations),
        step=rollout.step,
    )


def _slopes(aggregation: Any, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """What a `reduce` aggregation makes each token count where every loss is minus the advantage, as at ratio 1."""
    step = StepTotals(tokens=rollout.totals.tokens, sequences=rollout.totals.sequences)
    with torch.enable_grad():
        loss_B_T = (-advantages_B_T).requires_grad_()
        totals = replace(rollout.totals, step=step)
        loss = flow.reduced_loss(aggregation, loss_B_T, rollout.mask_B_T, totals)
        return flow.reduced_weights(aggregation, loss, loss_B_T, rollout.mask_B_T).detach()
