"""The scoring process: rewards with weights and guard, shapers, rollout hooks and the filter, one group at a time.

What is known of a completion is a `Row`. TRL's queue carries six fields of a sample; one of them, the advantage, is a
number of ours that holds the row and pickles with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from trl.experimental.async_grpo import async_rollout_worker

from ..credit import flow
from ..credit.groups import weighted_rewards
from ..credit.parts import agreed_names, part_metrics
from ..credit.rollouts import RolloutFacts, RowTensors, ScoredRows, build_rollout
from ..credit.signal import rewards_are_equal, share_without_signal, signal_table, zero_variance_of
from ..errors import ConfigurationError, PluginRunError
from ..guard.calls import unique_names
from ..guard.reward_watch import RewardWatch
from ..trainer.selected import SelectedPlugins
from ..types import FilterDeclaration, Part, Rollout, Totals

MOST_DROPPED = 1000
"""Groups that a filter may drop in a row: a run of which nothing is left would wait for ever."""


@dataclass(kw_only=True)
class Row:
    """One scored completion. Arrays have an entry for each of its tokens, those of tools included."""

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
    reward_weights: Sequence[float]
    # Known once the rollout hooks have run:
    of_group: Mapping[str, Any] = field(default_factory=dict)  # fields of the rollout that need the whole group
    zero_variance: bool = False
    stages: Mapping[str, np.ndarray] = field(default_factory=dict)  # the advantages: TRL's, then after each hook
    allowed_signs: np.ndarray | None = None

    @property
    def advantages(self) -> np.ndarray:
        """The advantage of each token after the last rollout hook."""
        return list(self.stages.values())[-1]


class CarriedAdvantage(float):
    """A completion's mean advantage, with its `row`, and the groups that the filter dropped since the last one."""

    row: Row
    dropped: Mapping[int, str]

    def __new__(cls, row: Row, dropped: Mapping[int, str]) -> CarriedAdvantage:
        """The number comes from the row."""
        made = super().__new__(cls, row.advantages[row.mask > 0].mean())
        made.row, made.dropped = row, dropped
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the row."""
        return CarriedAdvantage, (self.row, self.dropped)


def padded(arrays: Sequence[Any], device: Any = "cpu") -> torch.Tensor:
    """Arrays `(T,)` of different lengths as `(B, T)`, with zeros on the right."""
    return pad_sequence([torch.as_tensor(array) for array in arrays], batch_first=True).to(device)


def rollout_of(
    rows: Sequence[Row],
    totals: Totals,
    gather: Callable[[torch.Tensor], torch.Tensor],
    *,
    tokenizer: Any,
    end_ids: Sequence[int],
    step: int,
    device: Any = "cpu",
) -> Rollout:
    """The context of these rows, as if they were one group and all ranks had them; `of_group` says what is known."""
    parts = {name: [row.parts.get(name, ()) for row in rows] for row in rows for name in row.parts}
    scored = ScoredRows(
        rows=[row.columns for row in rows],
        prompts=[row.prompt for row in rows],
        completions=[row.completion for row in rows],
        completion_ids=[row.completion_ids for row in rows],
        rewards_N_K=torch.tensor([list(row.rewards.values()) for row in rows], device=device),
        parts=parts,
        part_names=agreed_names(parts, gather, device),
        tool_masks=[row.mask.tolist() for row in rows] if any(row.mask.min() == 0 for row in rows) else None,
    )
    logps_B_T = padded([row.sampling_logps for row in rows], device)
    tensors = RowTensors.of(
        [row.prompt_ids for row in rows], scored.completion_ids, tokenizer.pad_token_id, scored.tool_masks
    )
    moved = {name: value.to(device) for name, value in vars(tensors).items() if isinstance(value, torch.Tensor)}
    # The sampler is the old policy: TRL has no other.
    tensors = replace(tensors, **moved, logps_B_T={"sampling_logps": logps_B_T, "old_logps": logps_B_T})
    facts = RolloutFacts(
        tokenizer=tokenizer,
        end_ids={*end_ids, tokenizer.pad_token_id},
        reward_names=list(rows[0].rewards),
        reward_weights_K=torch.tensor(rows[0].reward_weights),
        group_size=len(rows),
    )
    of_group: dict[str, Any] = {
        name: torch.tensor([row.of_group[name] for row in rows], device=device) for name in rows[0].of_group
    }
    return replace(build_rollout(scored, tensors, facts, totals, gather, step=step), **of_group)


class ExtRolloutLoop(async_rollout_worker._AsyncRolloutLoop):
    """TRL's rollout loop; `_score_group` scores, weighs, changes or drops a group."""

    reward_funcs: list[Any]
    reward_func_names: list[str]

    def __init__(
        self, *, plugins: SelectedPlugins, reward_weights: Sequence[float], updates: int, **keywords: Any
    ) -> None:
        super().__init__(**keywords)
        self.reward_func_names = unique_names(self.reward_func_names)
        of_environments = [1.0] * (len(self.reward_func_names) - len(self.reward_funcs))
        self._plugins = plugins
        self._weights = [*reward_weights, *of_environments]
        self._weighs = {*self._weights} != {1.0}
        self._updates = updates  # optimizer steps of a model version
        self._dropped: dict[int, str] = {}  # groups since the last one that was kept, and why
        self._dropped_in_a_row = 0

    async def _score_group(self, group: Any) -> list[Any]:
        functions, names = self.reward_funcs, self.reward_func_names
        columns = [{key: of[row] for key, of in group.reward_kwargs.items()} for row in range(len(group.prompts))]
        given = {"prompts": group.prompts, "completions": group.completions, "completion_ids": group.completions_ids}
        watch, metrics = RewardWatch(self._plugins.settings.reward_timeout), dict[str, float]()
        loggers = {"log_metric": metrics.__setitem__, "log_extra": lambda column, values: None}  # which the watch keeps
        watched = [partial(watch.wrap(f, n), **_taken(f, loggers)) for f, n in zip(functions, names, strict=False)]
        with watch.time_limit(), self._scoring_with(watched, names):
            watch.start_scoring(functions, names[: len(functions)], columns, **given)
            samples: list[Any] = await super()._score_group(group)
        rewards_N_K = torch.tensor([[sample.metrics[f"rewards/{name}"] for name in names] for sample in samples])
        watch.check_finite(rewards_N_K, names)
        metrics |= watch.counts(rewards_N_K, names, _alone)
        metrics |= part_metrics(watch.parts, agreed_names(watch.parts, _alone), _alone)
        if self._plugins.read_rollouts:
            rows = self._rows(group, samples, columns, watch)
            rollout = self._plugins.chain.on_rewards(self._rollout(rows))
            if len(rollout.reward_names) > len(names) or self._weighs:
                await self._weigh(group, samples, rollout.rewards_B)
            samples = self._with_credit(samples, rows, rollout, metrics)
        elif self._weighs:
            starts = np.cumsum([0, *(len(sequences) for sequences in group.completions_sequences[:-1])])
            await self._weigh(group, samples, weighted_rewards(rewards_N_K[starts], torch.tensor(self._weights)))
        self._push_metrics(metrics)
        return samples

    async def _weigh(self, group: Any, samples: list[Any], rewards_B: torch.Tensor) -> None:
        """Give the samples TRL's advantages of these rewards, which include those of environments."""
        of_environments = self.reward_func_names[len(self.reward_funcs) :]
        with self._scoring_with([partial(_return, rewards_B.tolist())], ["reward", *of_environments]):
            weighed = await super()._score_group(replace(group, env_rewards=[None] * len(rewards_B)))
        for sample, other in zip(samples, weighed, strict=True):
            sample.advantage = other.advantage
            sample.metrics |= {name: other.metrics[name] for name in ("reward", "reward_std")}

    @contextmanager
    def _scoring_with(self, functions: list[Any], names: list[str]) -> Iterator[None]:
        before = self.reward_funcs, self.reward_func_names
        self.reward_funcs, self.reward_func_names = functions, names
        try:
            yield
        finally:
            self.reward_funcs, self.reward_func_names = before

    def _rows(self, group: Any, samples: Any, columns: Any, watch: RewardWatch) -> list[Row]:
        """The group's samples as rows; a prompt is what stands before the first token that counts."""
        counts = [len(sequences) for sequences in group.completions_sequences]
        if {*counts} != {1}:
            raise ConfigurationError(
                f"A conversation became {max(counts) if max(counts) > 1 else 0} training rows instead of one, which "
                "hooks, filters, aggregations, token losses and token records do not know yet: raise "
                "fork_threshold_tokens, use a chat template that keeps what was said, or remove these plugins."
            )
        firsts = [int(sample.completion_mask.argmax()) for sample in samples]
        return [
            Row(
                columns=columns[place],
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
                reward_weights=self._weights,
            )
            for place, (sample, first) in enumerate(zip(samples, firsts, strict=True))
        ]

    def _rollout(self, rows: Sequence[Row]) -> Rollout:
        tokens = int(sum(row.mask.sum() for row in rows))
        totals = Totals(tokens=tokens, sequences=len(rows), prompts=1, max_completion_length=self.max_tokens)
        step = max(self.model_version - 1, 0) * self._updates  # the first version is the model at the start
        return rollout_of(rows, totals, _alone, tokenizer=self.tokenizer, end_ids=self.eos_token_ids, step=step)

    def _with_credit(self, samples: list[Any], rows: list[Row], rollout: Rollout, metrics: dict[str, Any]) -> list[Any]:
        """The samples with the advantages that the hooks make, or none if the filter drops the group."""
        chain, weights_K = self._plugins.chain, rollout.reward_weights_K
        equal_B = rewards_are_equal(rollout.rewards_B_K, weights_K, rollout.group_ids_B, "sum_then_normalize")
        at_first_B = torch.tensor([float(sample.advantage) for sample in samples]).masked_fill(equal_B, 0.0)
        advantages_B_T, changes = chain.on_rollout(at_first_B, rollout)
        signs_B_T, silent_B = chain.allowed_signs(rollout), chain.uninformative(rollout)
        rollout = replace(rollout, advantages_B_T=advantages_B_T, uninformative_B=silent_B)
        signal_B_C = signal_table(rollout)
        metrics |= {**chain.metrics(), "groups/zero_variance": share_without_signal(signal_B_C)}
        if not self._keeps(rollout, rows[0].group):
            return []
        stages = {"trl": flow.expand_advantages(at_first_B, rollout.mask_B_T)}
        stages |= {change.name: change.after_B_T for change in changes}
        names = ["rewards_B", "raw_rewards_B", "group_baselines_B", *["uninformative_B"] * (silent_B is not None)]
        dropped, self._dropped = self._dropped, {}
        for place, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            size = len(row.completion_ids)
            row.rewards = dict(zip(rollout.reward_names, rollout.rewards_B_K[place].tolist(), strict=True))
            sample.metrics |= {f"rewards/{name}": reward for name, reward in row.rewards.items()}
            row.reward_weights = weights_K.tolist()
            row.of_group = {name: getattr(rollout, name)[place].item() for name in names}
            row.zero_variance = bool(zero_variance_of(signal_B_C)[place])
            row.stages = {name: values_B_T[place, :size].numpy() for name, values_B_T in stages.items()}
            row.allowed_signs = None if signs_B_T is None else signs_B_T[place, :size].numpy()
            sample.advantage = CarriedAdvantage(row, dropped)
        return samples

    def _keeps(self, rollout: Rollout, group: int) -> bool:
        """Whether the filter keeps the group; what it drops is counted."""
        group_filter = self._plugins.group_filter
        if group_filter is None:
            return True
        if "advantages" not in FilterDeclaration.of(group_filter).needs:
            rollout = replace(rollout, advantages_B_T=None)
        verdicts = flow.group_verdicts(group_filter, rollout)
        verdict = flow.verdicts_by_group(group_filter, verdicts, [group] * len(verdicts))[group]
        if verdict is True:
            self._dropped_in_a_row = 0
            return True
        why = self._dropped[group] = verdict or "dropped"
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= MOST_DROPPED:
            raise PluginRunError(
                f"The group filter {flow.plugin_label(group_filter)!r} dropped {MOST_DROPPED} groups in a row, the "
                f"last for {why!r}, so there is nothing to train on. Look at the rewards, or remove the filter."
            )
        return False


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The gather of a process that has all rows."""
    return tensor


def _return(values: Sequence[float | None], **columns: Any) -> Sequence[float | None]:
    return values


def _taken(function: Any, loggers: Mapping[str, Any]) -> dict[str, Any]:
    """Of the loggers that TRL's synchronous trainer passes to rewards those that this one takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return {name: logger for name, logger in loggers.items() if takes_all or name in parameters}
