"""`AsyncGRPOExtTrainer`: the overrides of TRL's `AsyncGRPOTrainer`, none of them a copy.

| TRL calls | what is added |
| --- | --- |
| `_score_group`, in the worker | rewards with weights and guard, shapers, rollout hooks, the filter (`loop`) |
| `get_train_dataloader` | the rows travel beside each micro-batch |
| `get_batch_samples` | an optimizer step at a time: the aggregation's weights, metrics, records |
| `compute_loss` | forward hooks, token losses, the aggregation |
| `train`, `log`, `_save` | manifest and token records |

TRL packs samples into one row per rank and lists the terms of the loss, `M` of them. Plugins see `(B, T)`: `B` samples,
`T` completion tokens, the mask 1 at the tokens that have a term. With no plugin selected the numbers are TRL's to the
bit.
"""

import functools
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from trl.experimental.async_grpo import AsyncGRPOTrainer

from ..credit import flow
from ..credit.chain import Change
from ..credit.terms import FurtherTerms
from ..errors import ConfigurationError
from ..guard.agreement import Agreement
from ..guard.calls import unique_names
from ..records.log import LiveLog
from ..trainer.batch import BatchKeys
from ..trainer.facts import LossSettings, Progress
from ..trainer.hook_states import AdvantageHookStates, has_state
from ..trainer.record_stage import RecordStage
from ..trainer.reductions import Computed, LossForward, PolicyPass, reduction_of
from ..trainer.selected import SelectedPlugins, SelectedRewards
from ..trainer.token_losses import TokenLosses, losses_that_replace
from ..trainer.upstream import asynchronous as upstream
from ..types import Declaration, HookDeclaration, Rollout, StepTotals, Totals, implements, role_of
from .loop import ExtRolloutLoop, Row, padded, rollout_of

_Next: type = AsyncGRPOTrainer if TYPE_CHECKING else object


class AsyncGRPOExtMixin(_Next):
    """Plugins for any subclass of TRL's `AsyncGRPOTrainer`; put it first among the bases. Experimental.

    Takes `AsyncGRPOTrainer`'s arguments and these.

    Args:
        reward_funcs: As in TRL. A list from `load_rewards` brings its weights.
        rewards: Selections of further rewards.
        advantage_hooks: Selections or hook objects. Those that act before the loss must declare `independent=True`,
            since groups are scored one by one.
        loss_aggregation: A selection or an aggregation object.
        token_losses: Selections or token loss objects.
        group_filter: A selection or a group filter. Dropped groups are counted as `groups/dropped/<reason>_total`.
        token_records: Completions of each optimizer step to record token by token, in whole groups.
        reward_timeout: Wall-clock seconds that all reward functions together may take for one group.
        plugin_changes: `stop` or `warn`, as in `GRPOExtConfig`.

    Raises:
        UpstreamError: The installed TRL is not one that this was tested with.
        ConfigurationError: A plugin cannot act here.
        PluginError: A selected plugin does not load.
    """

    _trl_grpo_ext: SimpleNamespace

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        *arguments: Any,
        rewards: Any = None,
        group_filter: Any = None,
        token_records: int = 0,
        reward_timeout: float | None = 3600.0,
        plugin_changes: str = "stop",
        **keywords: Any,
    ) -> None:
        upstream.check(AsyncGRPOTrainer)
        given = {name: keywords.pop(name, None) for name in ("advantage_hooks", "loss_aggregation", "token_losses")}
        settings = SimpleNamespace(
            token_records=token_records,
            reward_timeout=reward_timeout,
            plugin_changes=plugin_changes,
            loss_type=LOSS_TYPE,
        )
        resample = None if group_filter is None else {"filter": group_filter}
        plugins = SelectedPlugins(settings, {**given, "resample": resample, "prompt_sampler": None})
        refuse(plugins)
        ours = self._trl_grpo_ext = SimpleNamespace(plugins=plugins)
        chosen = SelectedRewards(reward_funcs, rewards, None)
        functions = chosen.functions if isinstance(chosen.functions, list) else [chosen.functions]
        functions = [] if chosen.functions is None else functions
        super().__init__(model, list(functions), *arguments, **keywords)
        upstream.check_instance(self)
        of_loop = {"plugins": plugins, "reward_weights": chosen.weights, "updates": self.args.weight_sync_steps}
        needed = plugins.read_rollouts or {*chosen.weights} != {1.0}
        upstream.install_loop(self, ExtRolloutLoop, of_loop, needed=needed)
        self.reward_funcs = functions
        self.reward_func_names = unique_names([flow.plugin_label(function) for function in functions])
        self.reward_weights = torch.tensor(chosen.weights)
        self.advantage_hooks = plugins.hooks
        self.loss_aggregation = plugins.aggregation
        self.group_filter = plugins.group_filter
        self.token_losses = plugins.token_losses
        self.add_callback(LiveLog())
        if any(map(has_state, plugins.hooks)):
            self.add_callback(AdvantageHookStates.of(hooks=plugins.hooks))
        ours.steps = Steps(self, plugins)
        self.plugin_manifest = ours.steps.records.manifest

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Train as TRL does, after comparing the plugins with those of the checkpoint to resume from."""
        self._trl_grpo_ext.steps.records.begin(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *arguments, **keywords)

    def get_train_dataloader(self) -> Any:
        """Let the rows travel with TRL's micro-batches."""
        loader = super().get_train_dataloader()
        if self._trl_grpo_ext.plugins.read_rollouts:
            upstream.extend_collator(loader, pack_rows)
        return loader

    def get_batch_samples(self, *arguments: Any, **keywords: Any) -> Any:
        """Weigh and record the optimizer step whose micro-batches these are."""
        micro_batches, items = super().get_batch_samples(*arguments, **keywords)
        if micro_batches and self._trl_grpo_ext.plugins.read_rollouts:
            self._trl_grpo_ext.steps.prepare(micro_batches)
        return micro_batches, items

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Compute TRL's loss, with what the plugins make of it."""
        inherited = functools.partial(super().compute_loss, **keywords)
        return self._trl_grpo_ext.steps.compute_loss(inherited, model, inputs, *arguments)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Log as TRL does, and write the token records beside it."""
        self._trl_grpo_ext.steps.records.before_log()
        super().log(logs, *arguments, **keywords)

    def _save(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        super()._save(output_dir, *arguments, **keywords)
        self._trl_grpo_ext.steps.records.write_beside_weights(output_dir)


class AsyncGRPOExtTrainer(AsyncGRPOExtMixin, AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` with plugins. Experimental."""


LOSS_TYPE = "dapo"
"""What TRL's synchronous trainer calls this trainer's loss."""

THERE = {"advantages", "entropies", "offsets", "old_logps", "sampling_logps", "several_updates"}
"""What plugins may need here."""


def refuse(plugins: SelectedPlugins) -> None:
    """Refuse what cannot act in the asynchronous trainer, each in one sentence."""
    for hook in plugins.hooks:
        if role_of(hook) == "forward":
            continue
        name = f"The advantage hook {flow.plugin_label(hook)!r}"
        if not HookDeclaration.of(hook).independent:
            raise ConfigurationError(
                f"{name} may look beyond a group (it does not declare independent=True), and the asynchronous trainer "
                "scores groups one by one: declare it if it holds, or remove the hook."
            )
        if has_state(hook):
            raise ConfigurationError(
                f"{name} has a state, which would be lost with the process that scores: remove it."
            )
    for plugin in plugins.needing_logps:
        declared = Declaration.of(plugin)
        teachers = [f"the teacher {name}" for name in getattr(declared, "teachers", ())]
        if lacking := [*sorted({*declared.needs} - THERE), *teachers]:
            raise ConfigurationError(
                f"The plugin {flow.plugin_label(plugin)!r} needs {', '.join(lacking)}, which TRL's asynchronous "
                "trainer does not compute: remove it, or train with GRPOExtTrainer."
            )
    losses_that_replace(plugins.losses_by_name)


ROWS = "trl_grpo_ext_rows"
"""The entry of a micro-batch that holds a rank's rows, as bytes; later what losses read of them."""

COLUMN_M = "trl_grpo_ext_column"
"""The completion token of each term of a micro-batch's loss, `(M,)`. TRL lists the terms by sample and token."""


def pack_rows(packed: Sequence[Any], batch: dict[str, Any]) -> None:
    """On rank 0, for all ranks: the rows beside the micro-batch, and the advantage of each term.

    TRL deals tensors alone to the ranks, so the rows are packed into bytes; zeros may follow.
    """
    rows = [[sample["advantage"].row for sample in of_rank.samples] for of_rank in packed]
    terms = [np.concatenate([row.advantages[row.mask > 0] for row in of_rank]) for of_rank in rows]
    batch["advantages"] = padded(terms).float()
    batch[ROWS] = padded([np.frombuffer(bytearray(pickle.dumps(of_rank)), dtype=np.uint8) for of_rank in rows])


class Records(RecordStage):
    """What is recorded and logged of a run. TRL has no table of completions here."""

    def _show_advantages(self, row_ids_N: Sequence[int], means_N: Sequence[float]) -> None: ...


class Steps:
    """Everything of ours that acts in the training process."""

    def __init__(self, trainer: Any, plugins: SelectedPlugins) -> None:
        self._trainer, self._plugins = trainer, plugins
        accelerator = trainer.accelerator
        facts: Any = SimpleNamespace(  # those of `RunFacts` that are read here
            rank=accelerator.process_index,
            ranks=accelerator.num_processes,
            device=accelerator.device,
            gather=self.gather,
            sum_over_ranks=functools.partial(accelerator.reduce, reduction="sum"),
            agreement=Agreement(accelerator.process_index, accelerator.num_processes, accelerator.gather),
            accumulation=1,
            steps_per_generation=1,
        )
        self._facts, self._agreement = facts, facts.agreement
        self._reduction = reduction_of(plugins, facts, LOSS_TYPE, knows_weights=True)
        self._token_losses = TokenLosses(plugins.losses_by_name, facts)
        self._settings = LossSettings(LOSS_TYPE, auxiliary_loss=trainer.aux_loss_enabled)
        self.records = Records(trainer, facts, plugins, evaluates=False)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """All ranks' rows, of which each may have another number."""
        counts = self._agreement.gather(torch.tensor([len(values)], device=values.device)).tolist()
        missing = values.new_zeros(max(counts) - len(values), *values.shape[1:])
        both = torch.split(self._agreement.gather(torch.cat([values, missing])), max(counts))
        return torch.cat([rows[:count] for rows, count in zip(both, counts, strict=True)])

    # ------------------------------------------------------------------ once per optimizer step

    def prepare(self, micro_batches: Sequence[dict[str, Any]]) -> None:
        """Weigh and record an optimizer step, whose micro-batches are all here."""
        self._trainer.model.train()  # as for each step; before the first, metrics would be those of an evaluation
        rows: list[Row] = []
        own: list[slice] = []
        for inputs in micro_batches:
            here = pickle.loads(inputs[ROWS].cpu().numpy().tobytes())  # which this run has made itself
            inputs[ROWS] = {COLUMN_M: torch.as_tensor(np.concatenate([np.flatnonzero(row.mask) for row in here]))}
            own.append(slice(len(rows), len(rows) + len(here)))
            rows += here
        with self._agreement.section():
            rollout = self._rollout(rows, len(micro_batches))
            entries = self._entries(rows, rollout)
        self._token_losses.carry(entries, rollout)
        stages = {name: padded([row.stages[name] for row in rows], self._facts.device) for name in rows[0].stages}
        changes = [Change(name, stages[before], stages[name]) for before, name in itertools.pairwise(stages)]
        outcomes = {name: [row.outcomes.get(name) for row in rows] for row in rows for name in row.outcomes}
        self.records.saw_batch(rollout, {**entries, "advantages": stages["trl"]}, changes, outcomes)
        for inputs, place in zip(micro_batches, own, strict=True):
            inputs[ROWS] |= {name: values[place] for name, values in entries.items()}
            inputs[ROWS][BatchKeys.totals] = rollout.totals

    def _rollout(self, rows: Sequence[Row], micro_batches: int) -> Rollout:
        """The context of a step: its rows of this rank, with the counts and groups of all."""
        trl, rank, device = self._trainer, self._facts.rank, self._facts.device
        facts_N_C = self.gather(torch.tensor([[row.group, int(row.mask.sum()), rank] for row in rows], device=device))
        _, groups_N = torch.unique(facts_N_C[:, 0], return_inverse=True)
        tokens, sequences = int(facts_N_C[:, 1].sum()), len(groups_N)
        totals = Totals(
            tokens=tokens,
            sequences=sequences,
            prompts=int(groups_N.max()) + 1,
            max_completion_length=trl.args.max_completion_length,
            processes=self._facts.ranks,
            micro_batches=micro_batches,
            step=StepTotals(tokens=tokens, sequences=sequences, micro_batches=micro_batches),
        )
        of_run = {"tokenizer": trl.processing_class, "end_ids": trl.eos_token_ids, "step": trl.state.global_step}
        rollout = rollout_of(rows, totals, self.gather, **of_run, device=device)
        first = int((facts_N_C[:, 2] < rank).sum())
        local = slice(first, first + len(rows))
        return replace(
            rollout,
            num_generations=trl.args.num_generations,
            group_ids_B=groups_N[local],
            local_rows=local,
            advantages_B_T=padded([row.advantages for row in rows], device),
        )

    def _entries(self, rows: Sequence[Row], rollout: Rollout) -> dict[str, Any]:
        """What the losses of a step read, named as in TRL's synchronous trainer."""
        mask_B_T, aggregation = rollout.mask_B_T, self._plugins.aggregation
        entries: dict[str, Any] = {
            "advantages": rollout.advantages_B_T,
            "completion_ids": rollout.completion_ids_B_T,
            "completion_mask": mask_B_T,
            "old_per_token_logps": rollout.old_logps_B_T,
            "sampling_per_token_logps": rollout.sampling_logps_B_T,
            BatchKeys.row_id: torch.arange(len(rows), device=mask_B_T.device),
            BatchKeys.reward: rollout.rewards_B,
            BatchKeys.raw_reward: rollout.raw_rewards_B,
            BatchKeys.baseline: rollout.group_baselines_B,
            BatchKeys.zero_variance: torch.tensor([row.zero_variance for row in rows], device=mask_B_T.device),
        }
        if rows[0].allowed_signs is not None:
            entries[BatchKeys.allowed_signs] = padded([row.allowed_signs for row in rows], mask_B_T.device)
        if implements(aggregation, "weights"):
            weights_B_T = entries[BatchKeys.weights] = flow.token_weights(aggregation, rollout)
            self.records.saw_weights(weights_B_T, entries["advantages"], mask_B_T)
        return entries

    # ------------------------------------------------------------------ at every loss forward

    def compute_loss(self, inherited: Callable[..., Any], model: Any, inputs: dict[str, Any], *arguments: Any) -> Any:
        """The loss of a micro-batch: TRL's, with the forward hooks' advantages and the selected terms and weights."""
        trl, plugins = self._trainer, self._plugins
        if ROWS not in inputs or not (plugins.reduces or plugins.forward_hooks or self.records.records_tokens):
            return inherited(model, inputs, *arguments)
        forward = LossForward(dict(inputs[ROWS]), inputs[ROWS]["completion_mask"])
        accumulation = int(trl.current_gradient_accumulation_steps)
        progress = Progress(True, trl.state.global_step, accumulation, steps_per_generation=accumulation)
        selected = inputs["token_index"] >= 0
        places = inputs["segment_id"][selected], forward.inputs[COLUMN_M].to(selected.device)
        leaf_B_T = forward.inputs["advantages"].clone().requires_grad_(self._reduction.takes_apart)
        late_M = leaf_B_T[places]

        def spread(values_M: torch.Tensor) -> torch.Tensor:
            """Numbers of the terms as `(B, T)`, with 0 elsewhere, and with their graph."""
            return values_M.new_zeros(leaf_B_T.shape).index_put(places, values_M)

        def policy(**given: Any) -> Any:
            outputs = model(**given)
            logps_B_T = spread(outputs.log_probs.flatten()[inputs["token_index"][selected]].float())
            entropies_B_T = spread(outputs.entropy.flatten()[inputs["token_index"][selected]].detach().float())
            changes = self._apply_hooks(forward, progress, logps_B_T, entropies_B_T) if plugins.forward_hooks else ()
            forward.passes.append(PolicyPass(logps_B_T, entropies_B_T, changes))
            with torch.no_grad():
                leaf_B_T.copy_(forward.inputs["advantages"])
                late_M.copy_(leaf_B_T[places])
            return outputs

        trl_loss = inherited(policy, {**inputs, "advantages": upstream.LateAdvantages(late_M)}, *arguments)
        forward.inputs["advantages"] = leaf_B_T
        weights_B_T = spread(upstream.reduction_weights(trl, inherited, inputs)[selected])
        values, metrics = self._token_losses.values(forward, progress)
        self.records.add_metrics(metrics)
        further = FurtherTerms(values, bool(self._token_losses.replaced_by))
        reduced = self._reduction.reduce(
            Computed(trl_loss, forward, self._settings, progress, self._facts, further, weights_B_T)
        )
        self.records.saw_loss(forward, reduced)
        return reduced.loss

    def _apply_hooks(
        self, forward: LossForward, progress: Progress, logps_B_T: torch.Tensor, entropies_B_T: torch.Tensor
    ) -> Sequence[Change]:
        inputs = forward.inputs
        with self._agreement.section():
            context = forward.context(logps_B_T, entropies_B_T, progress, self.gather)
            signs_B_T = inputs.get(BatchKeys.allowed_signs)
            inputs["advantages"], changes = self._plugins.chain.on_forward(inputs["advantages"], context, signs_B_T)
        self.records.saw_changes(changes, inputs[BatchKeys.row_id], forward.mask_B_T)
        return changes
