"""`AsyncGRPOExtTrainer`: the overrides of TRL's `AsyncGRPOTrainer`, none of them a copy.

TRL's worker scores groups in a process of its own (`loop`); here act the forward hooks, token losses and aggregation.
TRL packs samples into one row per rank and lists the terms of the loss, `M` of them. Plugins see `(B, T)`: `B` samples,
`T` completion tokens, the mask 1 at the tokens that have a term. With no plugin selected the numbers are TRL's to the
bit.
"""

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
from ..trainer.hook_states import has_state
from ..trainer.loss_forward import LossForward, PolicyPass
from ..trainer.record_stage import RecordStage
from ..trainer.reductions import Computed, reduction_of
from ..trainer.selected import SelectedPlugins, SelectedRewards
from ..trainer.token_losses import TokenLosses, losses_that_replace
from ..trainer.upstream import asynchronous as upstream
from ..types import Declaration, HookDeclaration, Rollout, StepTotals, Totals, implements, role_of
from .loop import ExtRolloutLoop, Row, padded, rollout_of

_Next: type = AsyncGRPOTrainer if TYPE_CHECKING else object

LOSS_TYPE = "dapo"
"""What TRL's synchronous trainer calls this trainer's loss."""

THERE = {"advantages", "entropies", "offsets", "old_logps", "sampling_logps", "several_updates"}
"""What plugins may need here."""

ROWS = "trl_grpo_ext_rows"
"""The entry of a micro-batch that holds a rank's rows, as bytes; later what losses read of them."""

COLUMN_M = "trl_grpo_ext_column"
"""The completion token of each term of a micro-batch's loss, `(M,)`. TRL lists the terms by sample and token."""


class AsyncGRPOExtMixin(_Next):
    """Plugins for any subclass of TRL's `AsyncGRPOTrainer`; put it first among the bases. Experimental.

    Takes `AsyncGRPOTrainer`'s arguments and these. A list from `load_rewards` as `reward_funcs` brings its weights.

    Args:
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

    _trl_grpo_ext: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        *arguments: Any,
        rewards: Any = None,
        advantage_hooks: Any = None,
        loss_aggregation: Any = None,
        token_losses: Any = None,
        group_filter: Any = None,
        token_records: int = 0,
        reward_timeout: float | None = 3600.0,
        plugin_changes: str = "stop",
        **keywords: Any,
    ) -> None:
        upstream.check()
        given = {
            "advantage_hooks": advantage_hooks,
            "loss_aggregation": loss_aggregation,
            "token_losses": token_losses,
            "resample": None if group_filter is None else {"filter": group_filter},
            "prompt_sampler": None,
        }
        settings = {"token_records": token_records, "reward_timeout": reward_timeout, "plugin_changes": plugin_changes}
        plugins = SelectedPlugins(SimpleNamespace(loss_type=LOSS_TYPE, **settings), given)
        refuse(plugins)
        self._trl_grpo_ext = plugins
        listed = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs] * (reward_funcs is not None)
        chosen = SelectedRewards(listed, rewards, None)
        super().__init__(model, [*chosen.functions], *arguments, **keywords)
        of_loop = {"plugins": plugins, "reward_weights": chosen.weights, "updates": self.args.weight_sync_steps}
        needed = plugins.read_rollouts or {*chosen.weights} != {1.0}
        upstream.install_loop(self, ExtRolloutLoop, of_loop, needed=needed)
        self.reward_funcs = chosen.functions
        self.reward_func_names = unique_names([flow.plugin_label(function) for function in chosen.functions])
        self.reward_weights = torch.tensor(chosen.weights)
        self.advantage_hooks = plugins.hooks
        self.loss_aggregation = plugins.aggregation
        self.group_filter = plugins.group_filter
        self.token_losses = plugins.token_losses
        self.add_callback(LiveLog())
        self._trl_grpo_ext = Steps(self, plugins)
        self.plugin_manifest = self._trl_grpo_ext.records.manifest

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Train as TRL does, after comparing the plugins with those of the checkpoint to resume from."""
        self._trl_grpo_ext.records.begin(resume_from_checkpoint)
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
        if micro_batches and ROWS in micro_batches[0]:
            self._trl_grpo_ext.prepare(micro_batches)
        return micro_batches, items

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Compute TRL's loss, with what the plugins make of it."""
        if ROWS not in inputs:
            return super().compute_loss(model, inputs, *arguments, **keywords)
        return self._trl_grpo_ext.compute_loss(super().compute_loss, model, inputs, *arguments, **keywords)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Log as TRL does, and write the token records beside it."""
        self._trl_grpo_ext.records.before_log()
        super().log(logs, *arguments, **keywords)

    def _save(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        super()._save(output_dir, *arguments, **keywords)
        self._trl_grpo_ext.records.write_beside_weights(output_dir)


class AsyncGRPOExtTrainer(AsyncGRPOExtMixin, AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` with plugins. Experimental."""


def refuse(plugins: SelectedPlugins) -> None:
    """Refuse what cannot act in the asynchronous trainer."""
    roles = {role_of(hook) for hook in plugins.hooks}
    for plugin in plugins.needing_logps:
        declared: Any = Declaration.of(plugin)
        problems = [f"needs {need}, which TRL does not compute here" for need in declared.needs if need not in THERE]
        problems += [f"needs the teacher {name}" for name in getattr(declared, "teachers", ())]
        if plugin in plugins.hooks and has_state(plugin):
            problems.append("has a state, which no checkpoint would keep")
        if plugin in plugins.hooks and role_of(plugin) != "forward" and not HookDeclaration.of(plugin).independent:
            problems.append("may look beyond a group, as it does not declare independent=True")
        if plugin in plugins.hooks and role_of(plugin) == "shaper" and "estimator" not in roles:
            problems.append("shapes rewards, which TRL's own advantages do not read: add an estimator")
        if problems:
            raise ConfigurationError(
                f"The plugin {flow.plugin_label(plugin)!r} cannot act in the asynchronous trainer: it {problems[0]}. "
                "Remove it, or train with GRPOExtTrainer."
            )
    losses_that_replace(plugins.losses_by_name)


def pack_rows(packed: Sequence[Any], batch: dict[str, Any]) -> None:
    """On rank 0, for all ranks: the rows beside the micro-batch, and the advantage of each term.

    TRL deals tensors alone to the ranks, so the rows are packed into bytes; zeros may follow.
    """
    rows = [[sample["advantage"].row for sample in of_rank.samples] for of_rank in packed]
    batch["advantages"] = padded(
        [np.concatenate([row.advantages[row.mask > 0] for row in of_rank]) for of_rank in rows]
    ).float()
    batch[ROWS] = padded([np.frombuffer(bytearray(pickle.dumps(of_rank)), dtype=np.uint8) for of_rank in rows])


class Records(RecordStage):
    """What is recorded and logged of a run. TRL has no table of completions here."""

    def _saw_advantages(self, row_ids_N: Sequence[int], table_N_2: torch.Tensor) -> None: ...


class Steps:
    """Everything of ours that acts in the training process."""

    def __init__(self, trainer: Any, plugins: SelectedPlugins) -> None:
        self._trainer, self.plugins = trainer, plugins
        accelerator = trainer.accelerator
        rank, ranks = accelerator.process_index, accelerator.num_processes
        facts: Any = SimpleNamespace(  # those of `RunFacts` that are read here
            rank=rank,
            ranks=ranks,
            device=accelerator.device,
            gather=self.gather,
            sum_over_ranks=partial(accelerator.reduce, reduction="sum"),
            agreement=Agreement(rank, ranks, accelerator.gather),
            accumulation=1,
            steps_per_generation=1,
        )
        self._facts, self._agreement = facts, facts.agreement
        self._reduction = reduction_of(plugins, facts, LOSS_TYPE, knows_weights=True)
        self._token_losses = TokenLosses(plugins.losses_by_name, facts, facts.agreement.section)
        self._settings = LossSettings(LOSS_TYPE, auxiliary_loss=trainer.aux_loss_enabled)
        self.records = Records(trainer, facts, plugins, evaluates=False)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """All ranks' rows, of which each may have another number."""
        counts = self._agreement.gather(torch.tensor([len(values)], device=values.device)).tolist()
        missing = values.new_zeros(max(counts) - len(values), *values.shape[1:])
        both = torch.split(self._agreement.gather(torch.cat([values, missing])), max(counts))
        return torch.cat([rows[:count] for rows, count in zip(both, counts, strict=True)])

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
            with self._facts.device:
                rollout = self._rollout(rows, len(micro_batches))
                entries = entries_of(rows, rollout)
                stages = {name: padded([row.stages[name] for row in rows]) for name in rows[0].stages}
            if implements(self.plugins.aggregation, "weights"):
                entries[BatchKeys.weights] = flow.token_weights(self.plugins.aggregation, rollout)
                self.records.saw_weights(entries[BatchKeys.weights], entries["advantages"], rollout.mask_B_T)
        self._token_losses.carry(entries, rollout)
        changes = [Change(name, stages[before], stages[name]) for before, name in itertools.pairwise(stages)]
        outcomes = {name: [row.outcomes.get(name) for row in rows] for row in rows for name in row.outcomes}
        self.records.saw_batch(rollout, {**entries, "advantages": stages["trl"]}, changes, outcomes)
        for inputs, place in zip(micro_batches, own, strict=True):
            inputs[ROWS] |= {name: values[place] for name, values in entries.items()}
            inputs[ROWS][BatchKeys.totals] = rollout.totals

    def _rollout(self, rows: Sequence[Row], micro_batches: int) -> Rollout:
        """The context of a step: its rows of this rank, with the counts and groups of all."""
        trl, rank = self._trainer, self._facts.rank
        facts_N_C = self.gather(torch.tensor([[row.group, int(row.mask.sum()), rank] for row in rows]))
        _, groups_N = torch.unique(facts_N_C[:, 0], return_inverse=True)
        counts = {"tokens": int(facts_N_C[:, 1].sum()), "sequences": len(groups_N), "micro_batches": micro_batches}
        totals = Totals(
            prompts=int(groups_N.max()) + 1,
            max_completion_length=trl.args.max_completion_length,
            processes=self._facts.ranks,
            step=StepTotals(**counts),
            **counts,
        )
        of_run = {"tokenizer": trl.processing_class, "end_ids": trl.eos_token_ids, "step": trl.state.global_step}
        first = int((facts_N_C[:, 2] < rank).sum())
        local = slice(first, first + len(rows))
        return replace(
            rollout_of(rows, totals, self.gather, trl.reward_weights.tolist(), **of_run),
            num_generations=trl.args.num_generations,
            group_ids_B=groups_N[local],
            local_rows=local,
            advantages_B_T=padded([row.advantages for row in rows]),
        )

    def compute_loss(self, inherited: Any, model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        """The loss of a micro-batch: TRL's, with the forward hooks' advantages and the selected terms and weights."""
        trl = self._trainer
        forward = LossForward(dict(inputs[ROWS]), inputs[ROWS]["completion_mask"])
        accumulation = int(trl.current_gradient_accumulation_steps)
        progress = Progress(True, trl.state.global_step, accumulation, steps_per_generation=accumulation)
        selected = inputs["token_index"] >= 0
        index_M = inputs["token_index"][selected]
        places = inputs["segment_id"][selected], forward.inputs[COLUMN_M].to(selected.device)
        leaf_B_T = forward.inputs["advantages"].clone().requires_grad_(self._reduction.takes_apart)
        late_M = leaf_B_T[places]

        def spread(values_M: torch.Tensor) -> torch.Tensor:
            """Numbers of the terms as `(B, T)`, with 0 elsewhere, and with their graph."""
            return values_M.new_zeros(leaf_B_T.shape).index_put(places, values_M)

        def policy(**given: Any) -> Any:
            outputs = model(**given)
            logps_B_T = spread(outputs.log_probs.flatten()[index_M].float())
            entropies_B_T = spread(outputs.entropy.flatten()[index_M].detach().float())
            changes = self._apply_hooks(forward, progress, logps_B_T, entropies_B_T)
            forward.passes.append(PolicyPass(logps_B_T, entropies_B_T, changes))
            with torch.no_grad():
                leaf_B_T.copy_(forward.inputs["advantages"])
                late_M.copy_(leaf_B_T[places])
            return outputs

        late = {**inputs, "advantages": upstream.LateAdvantages(late_M)}
        trl_loss = inherited(policy, late, *arguments, **keywords)
        forward.inputs["advantages"] = leaf_B_T
        weights_B_T = spread(upstream.reduction_weights(trl, inherited, inputs)[selected])
        values, metrics = self._token_losses.values(forward, progress)
        self.records.add_metrics(metrics)
        further = FurtherTerms(values, bool(self._token_losses.replaced_by))
        reduced = self._reduction.reduce(Computed(trl_loss, forward, self._settings, progress, further, weights_B_T))
        self.records.saw_loss(forward, reduced)
        return reduced.loss

    def _apply_hooks(
        self, forward: LossForward, progress: Progress, logps_B_T: torch.Tensor, entropies_B_T: torch.Tensor
    ) -> Sequence[Change]:
        inputs = forward.inputs
        with self._agreement.section():
            context = forward.context(logps_B_T, entropies_B_T, progress, self.gather)
            signs_B_T = inputs.get(BatchKeys.allowed_signs)
            inputs["advantages"], changes = self.plugins.chain.on_forward(inputs["advantages"], context, signs_B_T)
        self.records.saw_changes(changes, inputs[BatchKeys.row_id], forward.mask_B_T)
        return changes


def entries_of(rows: Sequence[Row], rollout: Rollout) -> dict[str, Any]:
    """What the losses of a step read, named as in TRL's synchronous trainer."""
    entries: dict[str, Any] = {
        "advantages": rollout.advantages_B_T,
        "completion_ids": rollout.completion_ids_B_T,
        "completion_mask": rollout.mask_B_T,
        "old_per_token_logps": rollout.old_logps_B_T,
        "sampling_per_token_logps": rollout.sampling_logps_B_T,
        BatchKeys.row_id: torch.arange(len(rows)),
        BatchKeys.reward: rollout.rewards_B,
        BatchKeys.raw_reward: rollout.raw_rewards_B,
        BatchKeys.baseline: rollout.group_baselines_B,
        BatchKeys.zero_variance: torch.tensor([row.zero_variance for row in rows]),
    }
    if rows[0].allowed_signs is not None:
        entries[BatchKeys.allowed_signs] = padded([row.allowed_signs for row in rows])
    return entries
