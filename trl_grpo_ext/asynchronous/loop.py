"""The scoring process: rewards with weights and guard, shapers, rollout hooks and the filter, one group at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from trl.experimental.async_grpo import async_rollout_worker

from ..credit import flow
from ..credit.groups import group_is_equal
from ..credit.parts import agreed_names, part_metrics
from ..credit.rollouts import RolloutFacts, RowTensors, ScoredRows, build_rollout
from ..credit.signal import signal_table, zero_variance_of
from ..errors import ConfigurationError, PluginRunError
from ..guard.calls import is_async, unique_names
from ..guard.reward_watch import RewardWatch
from ..trainer.selected import SelectedPlugins
from ..trainer.upstream.releases import parsing_of
from ..types import Part, Rollout, Totals

MOST_DROPPED = 1000
"""Groups that a filter may drop in a row: a run of which nothing is left would wait for ever."""

OF_GROUP = ("rewards_B", "raw_rewards_B", "group_baselines_B", "uninformative_B")
"""Fields of a rollout that need the whole group, of which the training process may see a part."""


@dataclass(kw_only=True)
class Row:
    """What is known of one scored completion. Arrays have an entry for each of its tokens, those of tools included."""

    columns: Mapping[str, Any]  # of the data set
    prompt: Any
    completion: Any
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    mask: np.ndarray  # 1 where a token counts in the loss
    sampling_logps: np.ndarray
    parts: Mapping[str, Sequence[Part]]
    outcomes: Mapping[str, Any]
    group: int
    rewards: Mapping[str, float]  # each function's, then what each shaper added; NaN for none
    # Known once the rollout hooks have run:
    of_group: Mapping[str, Any] = field(default_factory=dict)
    zero_variance: bool = False
    stages: Mapping[str, np.ndarray] = field(default_factory=dict)  # the advantages: TRL's, then after each hook
    allowed_signs: np.ndarray | None = None

    @property
    def advantages(self) -> np.ndarray:
        """The advantage of each token after the last rollout hook."""
        return list(self.stages.values())[-1]


class CarriedAdvantage(float):
    """A completion's mean advantage: a number that TRL's queue carries and that pickles with what it brings along."""

    row: Row
    dropped: Mapping[int, str]  # why the filter dropped the groups since the last one


def padded(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """Arrays `(T,)` of different lengths as `(B, T)`, with zeros on the right."""
    return pad_sequence([torch.as_tensor(array) for array in arrays], batch_first=True)


def rollout_of(
    rows: Sequence[Row],
    totals: Totals,
    gather: Callable[[torch.Tensor], torch.Tensor],
    weights: Sequence[float],
    *,
    tokenizer: Any,
    end_ids: Sequence[int],
    step: int,
) -> Rollout:
    """The context of these rows, as if they were one group and all ranks had them; `of_group` says what is known.

    Weights are those of the first rewards. Environments and shapers follow, with 1.
    """
    parts = {name: [row.parts.get(name, ()) for row in rows] for row in rows for name in row.parts}
    rewards_N_K = torch.tensor([list(row.rewards.values()) for row in rows])
    scored = ScoredRows(
        rows=[row.columns for row in rows],
        prompts=[row.prompt for row in rows],
        completions=[row.completion for row in rows],
        completion_ids=[row.completion_ids for row in rows],
        rewards_N_K=rewards_N_K,
        parts=parts,
        part_names=agreed_names(parts, gather, rewards_N_K.device),
        tool_masks=[row.mask.tolist() for row in rows] if any(row.mask.min() == 0 for row in rows) else None,
    )
    logps_B_T = padded([row.sampling_logps for row in rows])
    tensors = RowTensors.of(
        [row.prompt_ids for row in rows],
        scored.completion_ids,
        tokenizer.pad_token_id,
        scored.tool_masks,
        logps_B_T={"sampling_logps": logps_B_T, "old_logps": logps_B_T},  # the sampler is the old policy
    )
    names = list(rows[0].rewards)
    facts = RolloutFacts(
        tokenizer=tokenizer,
        end_ids={*end_ids, tokenizer.pad_token_id},
        reward_names=names,
        reward_weights_K=torch.tensor([*weights, *[1.0] * (len(names) - len(weights))]),
        group_size=len(rows),
        parsing=parsing_of(tokenizer),
    )
    of_group: dict[str, Any] = {name: torch.tensor([row.of_group[name] for row in rows]) for name in rows[0].of_group}
    return replace(build_rollout(scored, tensors, facts, totals, gather, step=step), **of_group)


class ExtRolloutLoop(async_rollout_worker._AsyncRolloutLoop):
    """TRL's rollout loop; `_score_group` scores, changes or drops a group."""

    def __init__(
        self, *, plugins: SelectedPlugins, reward_weights: Sequence[float], updates: int, **keywords: Any
    ) -> None:
        super().__init__(**keywords)
        self._functions = self.reward_funcs
        self.reward_func_names: list[str] = unique_names(self.reward_func_names)
        self._plugins = plugins
        self._weights = reward_weights
        self._updates = updates  # optimizer steps of a model version
        self._dropped: dict[int, str] = {}  # groups since the last one that was kept, and why

    async def _score_group(self, group: Any) -> list[Any]:
        watch, metrics = RewardWatch(self._plugins.settings.reward_timeout), dict[str, float]()
        loggers = {"log_metric": metrics.__setitem__, "log_extra": lambda column, values: None}  # which the watch keeps
        self.reward_funcs = [
            partial(_weighted, watch.wrap(function, name), weight, **loggers)
            for function, name, weight in zip(self._functions, self.reward_func_names, self._weights, strict=False)
        ]
        with watch.time_limit():
            samples: list[Any] = await super()._score_group(group)
        if self._plugins.read_rollouts or {*self._weights} - {1.0}:
            rows = self._rows(group, samples, watch)
            metrics |= part_metrics(watch.parts, agreed_names(watch.parts, _alone), _alone)
        if self._plugins.read_rollouts:
            samples = self._with_credit(samples, rows, metrics)
        self._push_metrics(metrics)
        return samples

    def _rows(self, group: Any, samples: Sequence[Any], watch: RewardWatch) -> list[Row]:
        """The group's samples as rows, with unweighted rewards; a prompt stands before the first token that counts."""
        if {len(sequences) for sequences in group.completions_sequences} != {1}:
            raise ConfigurationError(
                "A conversation became several training rows, or none, which plugins and weights of rewards do not "
                "know: raise fork_threshold_tokens, use a chat template that keeps what was said, or remove them."
            )
        rows = []
        for place, sample in enumerate(samples):
            first = int(sample.completion_mask.argmax())
            for name, scores in watch.scores.items():
                score = scores[place]
                sample.metrics[f"rewards/{name}"] = math.nan if score is None else float(score)
            row = Row(
                columns={name: values[place] for name, values in group.reward_kwargs.items()},
                prompt=group.prompts[place],
                completion=group.completions[place],
                prompt_ids=sample.input_ids[:first].tolist(),
                completion_ids=sample.input_ids[first:].tolist(),
                mask=sample.completion_mask[first:],
                sampling_logps=sample.old_log_probs[first:],
                parts={name: parts[place] for name, parts in watch.parts.items()},
                outcomes={name: values[place] for name, values in watch.outcomes.items()},
                group=group.group_id,
                rewards={name: sample.metrics[f"rewards/{name}"] for name in self.reward_func_names},
            )
            rows.append(row)
        return rows

    def _with_credit(self, samples: list[Any], rows: list[Row], metrics: dict[str, float]) -> list[Any]:
        """The samples with the advantages that the hooks make, or none if the filter drops the group."""
        chain, tokens = self._plugins.chain, int(sum(row.mask.sum() for row in rows))
        totals = Totals(tokens=tokens, sequences=len(rows), prompts=1, max_completion_length=self.max_tokens)
        of_run = {"tokenizer": self.tokenizer, "end_ids": self.eos_token_ids}
        step = max(self.model_version - 1, 0) * self._updates  # the first version is the model at the start
        rollout = chain.on_rewards(rollout_of(rows, totals, _alone, self._weights, **of_run, step=step))
        equal_B = group_is_equal(rollout.rewards_B, rollout.group_ids_B)  # else TRL magnifies the mean's rounding
        at_first_B = torch.tensor([float(sample.advantage) for sample in samples]).masked_fill(equal_B, 0.0)
        advantages_B_T, changes = chain.on_rollout(at_first_B, rollout)
        signs_B_T = chain.allowed_signs(rollout)
        rollout = replace(rollout, advantages_B_T=advantages_B_T, uninformative_B=chain.uninformative(rollout))
        metrics |= chain.metrics()
        if not self._keeps(rollout, rows[0].group):
            return []
        zero_variance_B = zero_variance_of(signal_table(rollout))
        stages = {"trl": flow.expand_advantages(at_first_B, rollout.mask_B_T)}
        stages |= {change.name: change.after_B_T for change in changes}
        of_group = {name: values_B for name in OF_GROUP if (values_B := getattr(rollout, name)) is not None}
        for place, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            size = len(row.completion_ids)
            row.rewards = dict(zip(rollout.reward_names, rollout.rewards_B_K[place].tolist(), strict=True))
            sample.metrics |= {f"rewards/{name}": reward for name, reward in row.rewards.items()}
            row.of_group = {name: values_B[place].item() for name, values_B in of_group.items()}
            row.zero_variance = bool(zero_variance_B[place])
            row.stages = {name: values_B_T[place, :size].numpy() for name, values_B_T in stages.items()}
            row.allowed_signs = None if signs_B_T is None else signs_B_T[place, :size].numpy()
            sample.advantage = CarriedAdvantage(row.advantages[row.mask > 0].mean())
            sample.advantage.row = row
        samples[0].advantage.dropped, self._dropped = self._dropped, {}
        return samples

    def _keeps(self, rollout: Rollout, group: int) -> bool:
        """Whether the filter keeps the group; what it drops is counted."""
        group_filter = self._plugins.group_filter
        if group_filter is None:
            return True
        verdicts = flow.group_verdicts(group_filter, rollout)
        verdict = flow.verdicts_by_group(group_filter, verdicts, [group] * len(verdicts))[group]
        if verdict is True:
            return True
        why = self._dropped[group] = verdict or "dropped"
        if len(self._dropped) >= MOST_DROPPED:
            raise PluginRunError(
                f"The group filter {flow.plugin_label(group_filter)!r} dropped {MOST_DROPPED} groups in a row, the "
                f"last for {why!r}, so there is nothing to train on. Look at the rewards, or remove the filter."
            )
        return False


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The gather of a process that has all rows."""
    return tensor


async def _weighted(function: Any, weight: float, **columns: Any) -> list[float | None]:
    """What a reward function says of each completion, times its weight."""
    scores = await (function(**columns) if is_async(function) else asyncio.to_thread(function, **columns))
    return [None if score is None else weight * score for score in scores]
