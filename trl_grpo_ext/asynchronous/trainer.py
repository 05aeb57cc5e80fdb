"""Plugins in TRL's `AsyncGRPOTrainer`.
Where TRL samples, `ScoringLoop` scores groups and runs rollout hooks and filter; a `Row`, what it knows of a sample,
travels along. Where TRL trains, `Steps` weighs and computes. TRL lists `M` terms; plugins see `(B, T)`."""

import asyncio
import itertools
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_rollout_worker

from ..credit import flow, groups, rollouts, signal
from ..credit.chain import Change
from ..credit.parts import agreed_names, part_metrics
from ..errors import ConfigurationError, PluginRunError
from ..guard.calls import is_async, unique_names
from ..guard.reward_watch import RewardWatch
from ..records.log import LiveLog
from ..trainer.batch import BatchKeys, row_entries
from ..trainer.hook_states import has_state
from ..trainer.record_stage import RecordStage
from ..trainer.reductions import Computed, LossForward, PolicyPass, reduction_of
from ..trainer.selected import SelectedPlugins, SelectedRewards
from ..trainer.token_losses import TokenLosses, losses_that_replace
from ..trainer.upstream import asynchronous as upstream
from ..trainer.upstream import reading
from ..trainer.upstream.reading import LossSettings, Progress
from ..types import Declaration, Part, Rollout, StepTotals, Totals, implements, role_of

LOSS_TYPE = "dapo"  # what TRL's synchronous trainer calls this trainer's loss
PLUGINS = ("advantage_hooks", "loss_aggregation", "token_losses")
SETTINGS = ("plugin_changes", "reward_timeout", "token_records")
# Of what plugins need:
THERE = {"advantages", "entropies", "offsets", "old_logps", "sampling_logps", "several_updates", "step_totals"}
MOST_DROPPED = 1000  # groups in a row: a run of which the filter leaves nothing would wait for ever
ROWS = "trl_grpo_ext_rows"  # the entry of a micro-batch with a rank's rows, as bytes; later what losses read of them
ALONE = torch.nn.Identity()  # the gather of a process that has all rows
OF_GROUP = ("rewards_B", "raw_rewards_B", "group_baselines_B", "uninformative_B")  # known where the whole group is

_Next: type = AsyncGRPOTrainer if TYPE_CHECKING else object


class AsyncGRPOExtMixin(_Next):
    """Plugins for any subclass of TRL's `AsyncGRPOTrainer`; put it first among the bases. Experimental.

    Takes its arguments, `rewards`, `SETTINGS` and `PLUGINS` as in `GRPOExtConfig`, and a `group_filter`. The
    `reward_timeout` counts for one group. What cannot act here, or a TRL that was not tested, is an error.
    """

    _trl_grpo_ext: Any

    def __init__(self, model: Any, reward_funcs: Any = None, *arguments: Any, **keywords: Any) -> None:
        upstream.check()
        settings = {name: keywords.pop(name) for name in SETTINGS if name in keywords}
        given = {name: keywords.pop(name, None) for name in PLUGINS}
        group_filter = keywords.pop("group_filter", None)
        given |= {"resample": None if group_filter is None else {"filter": group_filter}, "prompt_sampler": None}
        plugins = SelectedPlugins(SimpleNamespace(loss_type=LOSS_TYPE, **settings), given)
        refuse(plugins)
        self._trl_grpo_ext = plugins
        listed = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs] * (reward_funcs is not None)
        chosen = SelectedRewards(listed, keywords.pop("rewards", None), None)
        super().__init__(model, [*chosen.functions], *arguments, **keywords)
        of_loop = {"plugins": plugins, "weights": chosen.weights, "updates": self.args.weight_sync_steps}
        needed = plugins.read_rollouts or {*chosen.weights} != {1.0}
        upstream.install_loop(self, ScoringLoop, of_loop, needed=needed)
        self.reward_funcs = chosen.functions
        self.reward_func_names = unique_names([flow.plugin_label(function) for function in chosen.functions])
        self.reward_weights = torch.tensor(chosen.weights)
        shown = {"advantage_hooks": plugins.hooks, "loss_aggregation": plugins.aggregation}
        self.__dict__.update(shown, group_filter=plugins.group_filter, token_losses=plugins.token_losses)
        self.add_callback(LiveLog())
        self._trl_grpo_ext = Steps(self, plugins)
        self.plugin_manifest = self._trl_grpo_ext.records.manifest

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        self._trl_grpo_ext.records.begin(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *arguments, **keywords)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self._trl_grpo_ext.plugins.read_rollouts:
            upstream.extend_collator(loader, ROWS)
        return loader

    def get_batch_samples(self, *arguments: Any, **keywords: Any) -> Any:
        micro_batches, items = super().get_batch_samples(*arguments, **keywords)
        if micro_batches and ROWS in micro_batches[0]:
            self._trl_grpo_ext.prepare(micro_batches)
        return micro_batches, items

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        if ROWS not in inputs:
            return super().compute_loss(model, inputs, *arguments, **keywords)
        return self._trl_grpo_ext.compute_loss(super().compute_loss, model, inputs, *arguments, **keywords)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        self._trl_grpo_ext.records.before_log()
        super().log(logs, *arguments, **keywords)

    def _save(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        super()._save(output_dir, *arguments, **keywords)
        self._trl_grpo_ext.records.write_beside_weights(output_dir)


class AsyncGRPOExtTrainer(AsyncGRPOExtMixin, AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` with plugins. Experimental."""


def refuse(plugins: SelectedPlugins) -> None:
    estimates = any(role_of(hook) == "estimator" for hook in plugins.hooks)
    for plugin in plugins.needing_logps:
        declared: Any = Declaration.of(plugin)
        role = role_of(plugin) if plugin in plugins.hooks else None
        needs = (*declared.needs, *(f"the teacher {name}" for name in getattr(declared, "teachers", ())))
        problems = [f"needs {need}, which TRL does not compute here" for need in needs if need not in THERE]
        if has_state(plugin):
            problems.append("has a state, which no checkpoint would keep")
        if role not in (None, "forward") and not getattr(declared, "independent", False):
            problems.append("may look beyond a group, as it does not declare independent=True")
        if role == "shaper" and not estimates:
            problems.append("shapes rewards, which TRL's own advantages do not read: add an estimator")
        if problems:
            name = flow.plugin_label(plugin)
            raise ConfigurationError(f"{name!r} cannot act in the asynchronous trainer: it {problems[0]}.")
    losses_that_replace(plugins.losses_by_name)


class Row(float):
    """What is known of a scored completion. It is a number, TRL's advantage, so that TRL's queue carries it along."""

    sample: Any  # TRL's
    columns: Mapping[str, Any]  # of the data set
    parts: Mapping[str, Sequence[Part]]
    outcomes: Mapping[str, Any]
    weights: Sequence[float]  # of the rewards, by then
    of_group: Mapping[str, float]  # fields of the rollout that need the whole group, of which a step may see a part
    stages: Mapping[str, np.ndarray]  # `(T,)`, the advantages: TRL's, then after each hook
    allowed_signs: np.ndarray | None
    dropped: Mapping[int, str]  # groups that the filter dropped since the last one, and why


def rollout_of(
    rows: Sequence[Row], counts: Any, gather: Any, weights: Sequence[float], tokenizer: Any, end_ids: Any, step: int
) -> Rollout:
    """The context of rows as if they were one group. The weights are the first rewards'; the others' are 1."""
    samples = [row.sample for row in rows]
    starts = [int(sample.completion_mask.argmax()) for sample in samples]  # the prompt stands before
    ids, masks, logps = (
        [getattr(sample, name)[start:] for sample, start in zip(samples, starts, strict=True)]
        for name in ("input_ids", "completion_mask", "old_log_probs")
    )
    names = [name for name in samples[0].metrics if name.startswith("rewards/")]
    rewards_N_K = torch.tensor([[sample.metrics[name] for name in names] for sample in samples])
    parts = {name: [row.parts.get(name, ()) for row in rows] for row in rows for name in row.parts}
    scored = rollouts.ScoredRows(
        rows=[row.columns for row in rows],
        prompts=[sample.prompt for sample in samples],
        completions=[sample.completion for sample in samples],
        completion_ids=[row.tolist() for row in ids],
        rewards_N_K=rewards_N_K,
        parts=parts,
        part_names=agreed_names(parts, gather, rewards_N_K.device),
    )
    facts = rollouts.RolloutFacts(
        tokenizer=tokenizer,
        end_ids={*end_ids, tokenizer.pad_token_id},
        reward_names=[name.removeprefix("rewards/") for name in names],
        reward_weights_K=torch.tensor([*weights, *[1.0] * (len(names) - len(weights))]),
        group_size=len(rows),
    )
    prompts = [sample.input_ids[:start] for sample, start in zip(samples, starts, strict=True)]
    sampler = {"sampling_logps": logps, "old_logps": logps}  # which is the old policy: TRL has no other
    tensors = rollouts.RowTensors.of(prompts, ids, masks, tokenizer.pad_token_id, **sampler)
    return rollouts.build_rollout(scored, tensors, facts, Totals(**counts), gather, step=step)


class ScoringLoop(async_rollout_worker._AsyncRolloutLoop):
    """TRL's rollout loop; `_score_group` scores, changes or drops a group."""

    reward_funcs: list[Any]

    def __init__(self, plugins: SelectedPlugins, weights: Sequence[float], updates: int, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.reward_func_names: list[str] = unique_names(self.reward_func_names)
        self._functions = self.reward_funcs
        self._plugins, self._weights, self._updates = plugins, weights, updates  # optimizer steps of a model version
        self._dropped: dict[int, str] = {}  # groups since the last one that was kept, and why

    async def _score_group(self, group: Any) -> list[Any]:
        watch = RewardWatch(self._plugins.settings.reward_timeout)
        metrics = dict[str, float]()
        loggers = {"log_metric": metrics.__setitem__, "log_extra": lambda column, values: None}  # which the watch keeps
        scored: dict[str, Sequence[float | None]] = {}
        self.reward_funcs = [
            partial(_weighted, watch.wrap(function, name), weight, partial(scored.__setitem__, name), **loggers)
            for function, name, weight in zip(self._functions, self.reward_func_names, self._weights, strict=False)
        ]
        with watch.time_limit():
            samples: list[Any] = await super()._score_group(group)
        if self._plugins.read_rollouts or {*self._weights} - {1.0}:
            if {len(sequences) for sequences in group.completions_sequences} != {1}:
                raise ConfigurationError("A conversation became several training rows: raise fork_threshold_tokens.")
            for name, scores in scored.items():
                for sample, score in zip(samples, scores, strict=True):
                    sample.metrics[f"rewards/{name}"] = float("nan") if score is None else float(score)
        if self._plugins.read_rollouts:
            for place, sample in enumerate(samples):
                row = sample.advantage = Row(sample.advantage)
                row.sample = sample
                row.columns = {name: values[place] for name, values in group.reward_kwargs.items()}
                row.parts = {name: parts[place] for name, parts in watch.parts.items()}
                row.outcomes = {name: outcomes[place] for name, outcomes in watch.outcomes.items()}
            metrics |= part_metrics(watch.parts, agreed_names(watch.parts, ALONE), ALONE)
            samples = samples if self._give_credit([sample.advantage for sample in samples], metrics) else []
        self._push_metrics(metrics)
        return samples

    def _give_credit(self, rows: Sequence[Row], metrics: dict[str, float]) -> bool:
        """Give the rows of a group the advantages that the hooks make, unless the filter drops it."""
        chain, group_filter, group = self._plugins.chain, self._plugins.group_filter, rows[0].sample.group_id
        tokens = int(sum(row.sample.completion_mask.sum() for row in rows))
        counts = {"tokens": tokens, "sequences": len(rows), "prompts": 1, "max_completion_length": self.max_tokens}
        step = max(self.model_version - 1, 0) * self._updates  # the first version is the model at the start
        of_run = self._weights, self.tokenizer, self.eos_token_ids, step
        rollout = chain.on_rewards(rollout_of(rows, counts, ALONE, *of_run))
        equal_B = groups.group_is_equal(rollout.rewards_B, rollout.group_ids_B)  # where TRL magnifies rounding errors
        at_first_B = torch.tensor(rows).masked_fill(equal_B, 0.0)
        advantages_B_T, changes = chain.on_rollout(at_first_B, rollout)
        signs_B_T = chain.allowed_signs(rollout)
        rollout = replace(rollout, advantages_B_T=advantages_B_T, uninformative_B=chain.uninformative(rollout))
        metrics |= chain.metrics(forward=False)  # the others run in the process that trains
        if group_filter is not None:
            verdicts = flow.group_verdicts(group_filter, rollout)
            verdict = flow.verdicts_by_group(group_filter, verdicts, [group] * len(rows))[group]
            if verdict is not True:
                self._dropped[group] = verdict or "dropped"
                if len(self._dropped) >= MOST_DROPPED:
                    raise PluginRunError(f"The group filter dropped {MOST_DROPPED} groups in a row: {verdict!r}.")
                return False
        stages = {"trl": flow.expand_advantages(at_first_B, rollout.mask_B_T)}
        stages |= {change.name: change.after_B_T for change in changes}
        of_group = {name: getattr(rollout, name) for name in OF_GROUP if getattr(rollout, name) is not None}
        of_group["zero_variance"] = signal.zero_variance_of(signal.signal_table(rollout))
        for place, row in enumerate(rows):
            size = int(rollout.completion_mask_B_T[place].sum())
            rewards = zip(rollout.reward_names, rollout.rewards_B_K[place].tolist(), strict=True)
            row.sample.metrics |= {f"rewards/{name}": reward for name, reward in rewards}
            row.weights = rollout.reward_weights_K.tolist()
            row.of_group = {name: values_B[place].item() for name, values_B in of_group.items()}
            row.stages = {name: values_B_T[place, :size].numpy() for name, values_B_T in stages.items()}
            row.allowed_signs = None if signs_B_T is None else signs_B_T[place, :size].numpy()
            row.dropped, self._dropped = self._dropped, {}
        return True


async def _weighted(function: Any, weight: float, keep: Any, **columns: Any) -> list[float | None]:
    """What a reward function says of each completion, which is kept, times its weight."""
    scores = await (function(**columns) if is_async(function) else asyncio.to_thread(function, **columns))
    keep(scores)
    return [None if score is None else weight * score for score in scores]


class Steps:
    """Everything of ours that acts in the training process."""

    def __init__(self, trainer: Any, plugins: SelectedPlugins) -> None:
        self._trainer = trainer
        self.plugins = plugins
        facts: Any = reading.UnevenRanks(trainer.accelerator)
        facts.accumulation = facts.steps_per_generation = 1  # what weights span here is one optimizer step
        self._facts = facts
        self._token_losses = TokenLosses(plugins.losses_by_name, facts)
        self._settings = LossSettings(LOSS_TYPE, auxiliary_loss=trainer.aux_loss_enabled)
        self._reduction = reduction_of(plugins, facts, self._settings, knows_weights=True)
        self.records = RecordStage(trainer, facts, plugins, evaluates=False)

    def prepare(self, micro_batches: Sequence[dict[str, Any]]) -> None:
        """Weigh and record an optimizer step, whose micro-batches are all here."""
        trl = self._trainer
        trl.model.train()  # as for each step; before the first, metrics would be those of an evaluation
        dealt = [pickle.loads(inputs[ROWS].cpu().numpy().tobytes()) for inputs in micro_batches]  # of this run's making
        rows: list[Row] = [row for here in dealt for row in here]
        with self._facts.agreement.section(), self._facts.device:
            own = [[row.sample.group_id, int(row.sample.completion_mask.sum()), self._facts.rank] for row in rows]
            facts_N_C = self._facts.gather(torch.tensor(own))
            _, groups_N = torch.unique(facts_N_C[:, 0], return_inverse=True)
            counts: dict[str, Any] = {"tokens": int(facts_N_C[:, 1].sum()), "sequences": len(groups_N)}
            counts["micro_batches"] = len(micro_batches)
            counts |= {"prompts": int(groups_N.max()) + 1, "processes": self._facts.ranks, "step": StepTotals(**counts)}
            counts["max_completion_length"] = trl.args.max_completion_length
            known: Any = {name: torch.tensor([row.of_group[name] for row in rows]) for name in rows[0].of_group}
            zero_variance_B = known.pop("zero_variance")
            stages = {name: rollouts.padded([row.stages[name] for row in rows]) for name in rows[0].stages}
            signs = [row.allowed_signs for row in rows if row.allowed_signs is not None]
            first = int((facts_N_C[:, 2] < self._facts.rank).sum())
            local = slice(first, first + len(rows))
            known |= {"num_generations": trl.args.num_generations, "group_ids_B": groups_N[local], "local_rows": local}
            known["advantages_B_T"] = stages[[*stages][-1]]
            of_run = rows[-1].weights, trl.processing_class, trl.eos_token_ids, trl.state.global_step
            rollout = replace(rollout_of(rows, counts, self._facts.gather, *of_run), **known)
            entries: dict[str, Any] = {
                "advantages": rollout.advantages_B_T,
                "completion_ids": rollout.completion_ids_B_T,
                "completion_mask": rollout.mask_B_T,
                "old_per_token_logps": rollout.old_logps_B_T,
                "sampling_per_token_logps": rollout.sampling_logps_B_T,
                BatchKeys.row_id: torch.arange(len(rows)),
                **row_entries(rollout, zero_variance_B, rollouts.padded(signs) if signs else None),
            }
        if implements(self.plugins.aggregation, "weights"):
            with self._facts.agreement.section():
                weights_B_T = entries[BatchKeys.weights] = flow.token_weights(self.plugins.aggregation, rollout)
            self.records.saw_weights(weights_B_T, entries["advantages"], rollout.mask_B_T)
        self._token_losses.carry(entries, rollout)
        changes = [Change(name, stages[before], stages[name]) for before, name in itertools.pairwise(stages)]
        outcomes = {name: [row.outcomes.get(name) for row in rows] for row in rows for name in row.outcomes}
        self.records.saw_batch(rollout, {**entries, "advantages": stages["trl"]}, changes, outcomes)
        parts = {name: values.split([len(here) for here in dealt]) for name, values in entries.items()}
        for number, inputs in enumerate(micro_batches):
            inputs[ROWS] = {name: values[number] for name, values in parts.items()}
            inputs[ROWS][BatchKeys.totals] = rollout.totals

    def compute_loss(self, inherited: Any, model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        """The loss of a micro-batch: TRL's, with the forward hooks' advantages and the selected terms and weights."""
        forward = LossForward(dict(inputs[ROWS]), inputs[ROWS]["completion_mask"])
        accumulation = int(self._trainer.current_gradient_accumulation_steps)
        progress = Progress(True, self._trainer.state.global_step, accumulation, steps_per_generation=accumulation)
        selected = inputs["token_index"] >= 0
        index_M = inputs["token_index"][selected]
        places = forward.mask_B_T.nonzero(as_tuple=True)  # TRL lists the terms by sample and token
        leaf_B_T = forward.inputs["advantages"].clone().requires_grad_(self._reduction.takes_apart)
        late_M = leaf_B_T[places]

        def spread(values_M: torch.Tensor) -> torch.Tensor:
            return values_M.new_zeros(leaf_B_T.shape).index_put(places, values_M)

        def policy(**given: Any) -> Any:
            outputs = model(**given)
            logps_B_T = spread(outputs.log_probs.flatten()[index_M].float())
            entropies_B_T = spread(outputs.entropy.flatten()[index_M].detach().float())
            context = forward.context(logps_B_T, entropies_B_T, progress, self._facts.gather)
            with self._facts.agreement.section():
                before, signs_B_T = forward.inputs["advantages"], forward.inputs.get(BatchKeys.allowed_signs)
                after_B_T, changes = self.plugins.chain.on_forward(before, context, signs_B_T)
            self.records.saw_forward(changes, forward.inputs[BatchKeys.row_id], forward.mask_B_T)
            forward.passes.append(PolicyPass(logps_B_T, entropies_B_T, changes))
            with torch.no_grad():
                leaf_B_T.copy_(after_B_T)
                late_M.copy_(leaf_B_T[places])
            return outputs

        # TRL takes the advantages by an index before the forward pass and uses them after it.
        late = {**inputs, "advantages": defaultdict(lambda: late_M)}
        trl_loss = inherited(policy, late, *arguments, **keywords)
        forward.inputs["advantages"] = leaf_B_T
        values, metrics = self._token_losses.values(forward, progress)
        self.records.add_metrics(metrics)
        with_terms = (self._facts, values, self._token_losses.replaces)
        measured_B_T = spread(upstream.reduction_weights(self._trainer, inherited, inputs)[selected])
        computed = Computed(trl_loss, forward, self._settings, progress, *with_terms, measured_B_T)
        reduced = self._reduction.reduce(computed)
        self.records.saw_loss(forward, reduced)
        return reduced.loss
