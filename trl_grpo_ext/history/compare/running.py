"""Run one selection on one saved batch, in the trainer's order but without a model.

A loss forward here has the whole batch in one micro-batch of one optimizer step, and the saved log-probabilities stand
for the old and the current policy. At a policy ratio of 1 the gradient of each of TRL's loss types is the same up to a
constant: a token's score times its weight times its advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...credit import flow
from ...credit.chain import HookChain, refuse_normalised_shapers
from ...credit.flow import plugin_label
from ...credit.groups import group_apart, group_mean, group_std, weighted_rewards
from ...credit.parts import Rows, with_parts
from ...credit.signal import groups_of, signal_table, zero_variance_of
from ...errors import ConfigurationError, PluginOutputError, PluginRunError, RewardError
from ...guard.calls import call
from ...guard.reward_watch import RewardWatch
from ...types import Forward, Rollout, StepTotals, Totals, implements, role_of
from .saved import SavedBatch, tensor_of
from .selections import LoadedSelection, RewardSource, check_weights

EPSILON = 1e-4  # TRL adds this to a standard deviation before dividing


@dataclass(frozen=True)
class BatchResult:
    """One batch under one selection; advantages and weights are zero off the loss mask."""

    reward_names: Sequence[str]
    rewards_B_K: torch.Tensor  # NaN for None
    rewards_B: torch.Tensor  # their weighted sum; NaN if no function gave one
    advantages_B_T: torch.Tensor  # what the loss gets
    weights_B_T: torch.Tensor  # each token's weight in the loss
    mask_B_T: torch.Tensor  # the loss mask
    signal_Q: torch.Tensor  # which groups have signal

    @property
    def mass_B_T(self) -> torch.Tensor:
        """Each token's share in the gradient, unnormalised: weight times absolute advantage."""
        return self.weights_B_T * self.advantages_B_T.abs()

    @property
    def advantages_B(self) -> torch.Tensor:
        """Each completion's advantage: the mean over its live tokens."""
        return self.advantages_B_T.sum(dim=1) / self.mask_B_T.sum(dim=1).clamp(min=1.0)


def run_selection(
    selection: LoadedSelection, batch: SavedBatch, known: dict[str, OneReward], tokenizer: Any
) -> BatchResult:
    """Run a selection on a batch; `known` are the rewards of that batch that other selections have called."""
    rollout = _rollout(selection, batch, _rewards(selection, batch, known), tokenizer)
    chain = HookChain(selection.hooks, selection.aggregation)
    rollout = chain.on_rewards(rollout)
    scale, multiple = (selection.settings[name] for name in ("scale_rewards", "multi_objective_aggregation"))
    refuse_normalised_shapers(selection.hooks, multiple)
    advantages_B_T, _ = chain.on_rollout(group_advantages(rollout, scale, multiple), rollout)
    rollout = replace(rollout, advantages_B_T=advantages_B_T, uninformative_B=chain.uninformative(rollout))
    weights_B_T = None
    if implements(selection.aggregation, "weights"):
        weights_B_T = flow.token_weights(selection.aggregation, rollout)
    if chain.acts("on_forward"):
        assert batch.tokens.logps_B_T is not None  # `read_saved` left out what has none
        assert batch.tokens.entropies_B_T is not None
        forward = Forward(
            logps_B_T=batch.tokens.logps_B_T,
            entropies_B_T=batch.tokens.entropies_B_T,
            old_logps_B_T=batch.tokens.logps_B_T,
            mask_B_T=rollout.mask_B_T,
            completion_ids_B_T=rollout.completion_ids_B_T,
            rewards_B=rollout.rewards_B,
            raw_rewards_B=rollout.raw_rewards_B,
            group_baselines_B=rollout.group_baselines_B,
            zero_variance_B=zero_variance_of(signal_table(rollout)),
            step=rollout.step,
        )
        advantages_B_T, _ = chain.on_forward(advantages_B_T, forward, chain.allowed_signs(rollout))
    if weights_B_T is None:
        weights_B_T = _weights_of_reduction(selection.aggregation, advantages_B_T, rollout)
    return BatchResult(
        reward_names=rollout.reward_names,
        rewards_B_K=rollout.rewards_B_K,
        rewards_B=rollout.rewards_B,
        advantages_B_T=advantages_B_T,
        weights_B_T=weights_B_T,
        mask_B_T=rollout.mask_B_T,
        signal_Q=groups_of(signal_table(replace(rollout, advantages_B_T=advantages_B_T))),
    )


def group_advantages(rollout: Rollout, scale_rewards: str, multi_objective_aggregation: str) -> torch.Tensor:
    """Advantages `(B,)` as TRL's settings of these names define them; 0 for a completion without a reward."""
    groups_B = rollout.group_ids_B
    batch_B = torch.zeros_like(groups_B)
    if multi_objective_aggregation == "normalize_then_sum":
        columns = [group_apart(rewards_B, groups_B, EPSILON) for rewards_B in rollout.rewards_B_K.unbind(dim=1)]
        apart_B_K = torch.stack(columns, dim=1).masked_fill(rollout.rewards_B_K.isnan(), torch.nan)
        return group_apart(weighted_rewards(apart_B_K, rollout.reward_weights_K), batch_B, EPSILON)
    if scale_rewards == "group":
        return group_apart(rollout.rewards_B, groups_B, EPSILON)
    advantages_B = group_apart(rollout.rewards_B, groups_B)
    return advantages_B if scale_rewards == "none" else advantages_B / (group_std(rollout.rewards_B, batch_B) + EPSILON)


def _rollout(
    selection: LoadedSelection, batch: SavedBatch, rewards: Mapping[str, OneReward], tokenizer: Any
) -> Rollout:
    count = len(batch.texts)
    size = batch.num_generations
    tokens = batch.tokens
    rewards_B_K = torch.stack([tensor_of(one.values) for one in rewards.values()], dim=1)
    rewards_B, weights_K = _weighted_sum(selection, batch, rewards, rewards_B_K)
    groups_B = torch.arange(count) // size
    truncated_B = torch.tensor(batch.truncated)
    mask_B_T = tokens.mask_B_T
    masks = selection.settings["mask_truncated_completions"]  # None: as in the run
    if masks is not None:
        kept_B_T = torch.zeros_like(mask_B_T) if masks else tokens.written_B_T
        mask_B_T = torch.where(truncated_B.unsqueeze(1), kept_B_T, mask_B_T)
    tool_mask_B_T = None
    if not torch.equal(tokens.written_B_T, tokens.completion_mask_B_T):  # a tool or an environment wrote some
        tool_mask_B_T = torch.where(tokens.completion_mask_B_T > 0, tokens.written_B_T, 1.0)
    rollout = Rollout(
        prompts=batch.prompts,
        completions=batch.completions,
        columns=batch.columns,
        texts=batch.texts,
        prompt_ids_B_P=torch.zeros(count, 1, dtype=torch.long),
        prompt_mask_B_P=torch.zeros(count, 1),
        completion_ids_B_T=tokens.ids_B_T,
        mask_B_T=mask_B_T,
        completion_mask_B_T=tokens.completion_mask_B_T,
        tool_mask_B_T=tool_mask_B_T,
        truncated_B=truncated_B,
        rewards_B_K=rewards_B_K,
        reward_names=tuple(rewards),
        reward_weights_K=weights_K,
        rewards_B=rewards_B,
        group_ids_B=groups_B,
        group_baselines_B=group_mean(rewards_B, groups_B),
        num_generations=size,
        totals=Totals(
            tokens=int(mask_B_T.sum()),
            sequences=count,
            prompts=count // size,
            max_completion_length=selection.settings["max_completion_length"],
        ),
        old_logps_B_T=tokens.logps_B_T if "old_logps" in selection.needs else None,
        old_entropies_B_T=tokens.entropies_B_T if "old_entropies" in selection.needs else None,
        step=batch.scored_step,
        tokenizer=tokenizer,
        offsets=tokens.offsets,
    )
    if selection.rewards is None and any(parts is not None and len(parts) for parts in batch.columns.get("parts", ())):
        return replace(rollout, parts=_NotSaved(selection.name))
    return with_parts(rollout, {name: one.parts for name, one in rewards.items() if one.parts is not None})


class _NotSaved(Mapping[str, Any]):
    """Stands for the parts of saved rewards, of which records keep too little for a hook."""

    def __init__(self, selection: str) -> None:
        self._selection = selection

    def __getitem__(self, name: str) -> Any:
        raise ConfigurationError(f"{self._selection}: a hook reads parts, which saved rewards lack: list the rewards.")

    def __iter__(self) -> Any:
        return self[""]

    def __len__(self) -> int:
        return self[""]  # type: ignore[no-any-return]


def _weights_of_reduction(aggregation: Any, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """Each token's weight under a `reduce` aggregation if every loss is minus the advantage, as at ratio 1."""
    step = StepTotals(tokens=rollout.totals.tokens, sequences=rollout.totals.sequences)
    with torch.enable_grad():
        loss_B_T = (-advantages_B_T).requires_grad_()
        loss = flow.reduced_loss(aggregation, loss_B_T, rollout.mask_B_T, replace(rollout.totals, step=step))
        return flow.reduced_weights(aggregation, loss, loss_B_T, rollout.mask_B_T).detach()


class OneReward(NamedTuple):
    """One reward's `B` values, and the parts that they consist of."""

    values: Sequence[float | None]
    parts: Rows | None = None


def _rewards(selection: LoadedSelection, batch: SavedBatch, known: dict[str, OneReward]) -> dict[str, OneReward]:
    """The rewards of a batch under a selection, by name: called, or the saved ones."""
    if selection.rewards is not None:
        for source in selection.rewards:
            if source.key not in known:
                known[source.key] = _called(source, selection.name, batch)
        return {source.name: known[source.key] for source in selection.rewards}
    shapers = {plugin_label(hook) for hook in selection.hooks if role_of(hook) == "shaper"}
    # What shapers added is computed again.
    found = {name: OneReward(values) for name, values in batch.rewards.items() if name not in shapers}
    if not found:
        raise ConfigurationError(f"{selection.name} lists no rewards, and {batch.where} has none.")
    return found


def _called(source: RewardSource, selection: str, batch: SavedBatch) -> OneReward:
    """What a reward function gives; its errors name the selection and the batch."""
    watch = RewardWatch()
    columns = {**batch.columns, **batch.rewards}  # in anybody's file a column of numbers may be either
    try:
        returned = call(
            watch.wrap(source.function, source.name),
            {
                **{name: list(values) for name, values in columns.items()},
                "prompts": list(batch.prompts),
                "completions": list(batch.completions),
                "completion_ids": [list(row) for row in batch.tokens.id_rows],
                "trainer_state": SimpleNamespace(global_step=batch.scored_step),  # all that is known of a finished run
                "log_extra": lambda column, values: None,
                "log_metric": lambda name, value: None,
            },
        )
    except RewardError as error:  # often a column that is missing
        raise RewardError(f"{selection}, {batch.where}: {error} The data set's columns come from --dataset.") from error
    except (PluginOutputError, PluginRunError) as error:
        raise type(error)(f"{selection}, {batch.where}: {error}") from error
    parts = watch.parts.get(source.name)
    if any(place.turn is not None for row in parts or () for part in row for place in part.places):
        raise ConfigurationError(f"{selection}: the reward {source.name!r} scores turns, which saved texts lack.")
    return OneReward(returned, parts)


def _weighted_sum(
    selection: LoadedSelection, batch: SavedBatch, rewards: Mapping[str, OneReward], rewards_B_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rewards' weighted sum `(B,)` and their weights `(K,)`; of saved rewards the saved sum, if it is theirs."""
    weights = [source.weight for source in selection.rewards or ()] or selection.settings["reward_weights"]
    of_run = weights is None
    if weights is None:
        if batch.weights is None:
            what = f"{batch.where}: the weights of {', '.join(batch.rewards)} are unknown"
            raise ConfigurationError(f"{what}: give reward_weights, or the rewards.")
        weights = [batch.weights[name] for name in rewards]
    check_weights(selection.name, weights, list(rewards))
    weights_K = torch.tensor(weights, dtype=torch.float32)
    if of_run and batch.reward is not None and len(rewards) == len(batch.rewards):
        return tensor_of(batch.reward), weights_K
    return weighted_rewards(rewards_B_K, weights_K), weights_K
