"""The scoring process: rewards with weights and guard, shapers, rollout hooks and the filter, one group at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from trl.experimental.async_grpo import async_rollout_worker

from ..credit import flow
from ..credit.parts import agreed_names, part_metrics
from ..credit.signal import rewards_are_equal, share_without_signal, signal_table, zero_variance_of
from ..errors import ConfigurationError, PluginRunError
from ..guard.calls import unique_names
from ..guard.reward_watch import RewardWatch
from ..trainer.selected import SelectedPlugins
from ..types import FilterDeclaration, Rollout, Totals
from .rows import CarriedAdvantage, Row, rollout_of

MOST_DROPPED = 1000
"""Groups that a filter may drop in a row: a run of which nothing is left would wait for ever."""


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
        self._plugins, self._weights, self._updates = plugins, [*reward_weights, *of_environments], updates
        self._dropped: dict[int, str] = {}  # since the last group that was kept
        self._dropped_in_a_row = 0

    async def _score_group(self, group: Any) -> list[Any]:
        inherited, names, functions = super()._score_group, self.reward_func_names, self.reward_funcs
        columns = [{key: of[row] for key, of in group.reward_kwargs.items()} for row in range(len(group.prompts))]
        given = {"prompts": group.prompts, "completions": group.completions, "completion_ids": group.completions_ids}
        watch, metrics = RewardWatch(self._plugins.settings.reward_timeout), dict[str, float]()
        loggers = {"log_metric": metrics.__setitem__, "log_extra": lambda column, values: None}  # which the watch keeps
        watched = [partial(watch.wrap(f, n), **_taken(f, loggers)) for f, n in zip(functions, names, strict=False)]
        with watch.time_limit(), self._scoring_with(watched, names):
            watch.start_scoring(functions, names[: len(functions)], columns, **given)
            samples = await inherited(group)
        rewards_N_K = torch.tensor([[sample.metrics[f"rewards/{name}"] for name in names] for sample in samples])
        watch.check_finite(rewards_N_K, names)
        metrics |= watch.counts(rewards_N_K, names, _alone)
        metrics |= part_metrics(watch.parts, agreed_names(watch.parts, _alone), _alone)
        rollout, added = None, dict[str, Sequence[float]]()
        if self._plugins.read_rollouts:
            rows = self._rows(group, samples, columns, watch)
            rollout = self._plugins.chain.on_rewards(self._rollout(rows))
            added = dict(zip(rollout.reward_names, rollout.rewards_B_K.T.tolist(), strict=True))
            added = {name: values for name, values in added.items() if name not in names}
        if added or any(weight != 1.0 for weight in self._weights):  # TRL's arithmetic on what the rewards are worth
            scores = dict(zip(names, self._weights, strict=True))
            scored = [
                [None if s is None else w * s for s in watch.scores[n]] for n, w in scores.items() if n in watch.scores
            ]
            worth = [partial(_return, values) for values in [*scored, *added.values()]]
            with self._scoring_with(worth, [*names[: len(scored)], *added, *names[len(scored) :]]):
                first, samples = samples, await inherited(group)
            for sample, one in zip(samples, first, strict=True):
                sample.metrics |= {name: value for name, value in one.metrics.items() if name.startswith("rewards/")}
        if rollout is not None:
            samples = self._with_credit(samples, rows, rollout, metrics)
        self._push_metrics(metrics)
        return list(samples)

    @contextmanager
    def _scoring_with(self, functions: Sequence[Any], names: Sequence[str]) -> Iterator[None]:
        before = self.reward_funcs, self.reward_func_names
        self.reward_funcs, self.reward_func_names = list(functions), list(names)
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
                rewards={name: sample.metrics[f"rewards/{name}"] for name in self.reward_func_names},
                reward_weights=self._weights,
                parts={name: parts[place] for name, parts in watch.parts.items()},
                outcomes={name: values[place] for name, values in watch.outcomes.items()},
                group=group.group_id,
                of_group={},
                stages=(),
                allowed_signs=None,
            )
            for place, (sample, first) in enumerate(zip(samples, firsts, strict=True))
        ]

    def _rollout(self, rows: Sequence[Row]) -> Rollout:
        tokens = int(sum(row.mask.sum() for row in rows))
        totals = Totals(tokens=tokens, sequences=len(rows), prompts=1, max_completion_length=self.max_tokens)
        of_run = {"tokenizer": self.tokenizer, "end_ids": self.eos_token_ids, "tools": self.tools}
        step = max(self.model_version - 1, 0) * self._updates  # the first version is the model at the start
        return rollout_of(rows, totals, _alone, step=step, **of_run)

    def _with_credit(self, samples: Any, rows: Any, rollout: Rollout, metrics: dict[str, float]) -> list[Any]:
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
        stages = [
            ("trl", flow.expand_advantages(at_first_B, rollout.mask_B_T)),
            *((c.name, c.after_B_T) for c in changes),
        ]
        of_group = {name: vars(rollout)[name] for name in ("rewards_B", "raw_rewards_B", "group_baselines_B")}
        of_group |= {"zero_variance": zero_variance_of(signal_B_C)}
        of_group |= {} if silent_B is None else {"uninformative_B": silent_B}
        shaped = [dict(zip(rollout.reward_names, of, strict=True)) for of in rollout.rewards_B_K.tolist()]
        dropped, self._dropped = self._dropped, {}
        for place, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            size = len(row.completion_ids)
            whole = replace(
                row,
                rewards=shaped[place],
                reward_weights=weights_K.tolist(),
                of_group={name: values_B[place].item() for name, values_B in of_group.items()},
                stages=[(name, values_B_T[place, :size].numpy()) for name, values_B_T in stages],
                allowed_signs=None if signs_B_T is None else signs_B_T[place, :size].numpy(),
            )
            sample.advantage = CarriedAdvantage(whole, dropped)
        return list(samples)

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


def _taken(function: Any, loggers: Mapping[str, Callable[..., None]]) -> dict[str, Callable[..., None]]:
    """Of the loggers that TRL's synchronous trainer passes to rewards those that this one takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return {name: logger for name, logger in loggers.items() if takes_all or name in parameters}
