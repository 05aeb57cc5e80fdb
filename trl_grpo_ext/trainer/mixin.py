"""The adapter to TRL's trainer. It wraps its methods here and in the bases below, and copies none.

| TRL calls | we add |
| --- | --- |
| `_calculate_rewards` | check what rewards return; their errors and time limits, on all ranks; keep their spans |
| `_generate_and_score_completions` | rollout hooks: advantages `(B, T)`; aggregation: weights `(B, T)`; metrics |
| `_prepare_inputs` | counts of every optimizer step, once its rows are dealt |
| `_get_per_token_logps_and_entropies` | forward hooks; keep the log-probabilities for the KL term |
| `_compute_loss` | the same loss with the selected aggregation |
| `compute_loss` | stop if the above was bypassed |
| `log` | write the token records |

With no plugin selected every method returns what `super()` returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from accelerate.utils import gather, gather_object
from trl import GRPOTrainer

from ..credit import flow
from ..credit.chain import Change, HookChain, change_tables, metrics_of
from ..credit.metrics import row_table, weight_metrics
from ..credit.signal import share_without_signal, signal_table
from ..errors import ConfigurationError, UpstreamError
from ..guard.agreement import Agreement
from ..guard.calls import unique_names
from ..guard.reward_watch import RewardWatch, reward_limit
from ..plugins.loading import (
    LoadedList,
    RewardList,
    load_advantage_hooks,
    load_rewards,
    resolve_loss_aggregation,
)
from ..records.token_records import TokenRecorder, write_records
from ..types import Rollout, Totals, implements
from . import self_check, upstream
from .compact.rows import FACTOR_KEY
from .compact.updates import CompactUpdates
from .contexts import RowKeys, Scored, agreed_spans, make_forward, make_rollout, row_entries, step_totals
from .hook_states import states_of
from .live.training import CanBeWatched
from .own_loss import OwnLosses, built_with, places_of
from .phase_times import TimesPhases
from .plugin_records import RecordsPlugins
from .reaggregation import LossForward, check_aggregation, pieces, trl_weights
from .scoring import Scorer


class GRPOExtMixin(TimesPhases, OwnLosses, CompactUpdates, RecordsPlugins, CanBeWatched):
    """Plugins for any subclass of TRL's `GRPOTrainer`; put it first among the bases.

    Takes `GRPOTrainer`'s arguments and two more. `args` may be a `GRPOExtConfig` (or a plain `GRPOConfig`, then plugins
    can only be given here).

    Args:
        model: As in TRL.
        reward_funcs: As in TRL. What `load_rewards` returns brings its weights along, unless `args.reward_weights` are
            set. Rewards selected by `args.rewards` are added behind.
        args: As in TRL.
        train_dataset: As in TRL.
        eval_dataset: As in TRL.
        processing_class: As in TRL.
        reward_processing_classes: As in TRL, for the `reward_funcs` given here.
        *arguments: As in TRL.
        advantage_hooks: Selections or hook objects, in the order in which they act.
        loss_aggregation: A selection or an aggregation object.
        **keywords: As in TRL.

    Raises:
        UpstreamError: The installed TRL is not one that we can stand on.
        ConfigurationError: A plugin is given twice, or cannot be exact with these settings.
        PluginError: A selected plugin does not load.
    """

    _logs: Any
    args: Any
    accelerator: Any
    model: Any
    state: Any
    _scored: Scored | None = None
    _places = 0
    _undealt_totals: Totals | None = None
    _loss_forward: LossForward | None = None
    _self_checked = False
    _loss_path_ran = False
    _weights_key: ClassVar[str] = "trl_grpo_ext_weights"
    _totals_key: ClassVar[str] = "trl_grpo_ext_totals"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        *arguments: Any,
        advantage_hooks: Any = None,
        loss_aggregation: Any = None,
        **keywords: Any,
    ) -> None:
        upstream.check_version()
        upstream.check_class(GRPOTrainer)
        self.advantage_hooks: list[Any] = load_advantage_hooks(
            _given_once("advantage_hooks", advantage_hooks, getattr(args, "advantage_hooks", None)) or []
        )
        aggregation = _given_once("loss_aggregation", loss_aggregation, getattr(args, "loss_aggregation", None))
        loaded_aggregation = None if aggregation is None else resolve_loss_aggregation(aggregation)
        self.loss_aggregation: Any = loaded_aggregation and loaded_aggregation.object
        self._find_own_losses(GRPOExtMixin, args, self.loss_aggregation)
        upstream.check_loss_type(getattr(args, "loss_type", None) if self.loss_aggregation is not None else None)
        given = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        selected = load_rewards(getattr(args, "rewards", None) or [])
        weights = [*(given.weights if isinstance(given, RewardList) else [1.0] * len(given)), *selected.weights]
        if selected and reward_processing_classes is not None:
            classes = reward_processing_classes
            classes = classes if isinstance(classes, list) else [classes]
            reward_processing_classes = [*classes, *([None] * len(selected))]
        chosen = [*given, *selected]  # as they are now: TRL adds an environment's reward to the list that it was given
        functions = LoadedList.joined(given, selected) if selected else reward_funcs
        sources = (train_dataset, eval_dataset, processing_class, reward_processing_classes)
        positional, named = built_with((model, functions, args), sources, arguments, keywords)
        super().__init__(*positional, **named)
        upstream.check_instance(self)
        self._trl.reward_func_names = unique_names(self._trl.reward_func_names)
        self._check_compact()
        self._chain = HookChain(self.advantage_hooks)
        self._scorer = Scorer(self, self.advantage_hooks)
        self._recorder = TokenRecorder(n, self.args.seed) if (n := getattr(self.args, "token_records", 0)) else None
        if (states := states_of(self.advantage_hooks)) is not None:
            self._trl.add_callback(states)
        if self.args.reward_weights is None:
            self.reward_weights: torch.Tensor
            self.reward_weights[places_of(chosen, self._trl.reward_funcs, weights)] = torch.tensor(weights)
        if self.loss_aggregation is not None:
            check_aggregation(self)
        accelerator = self.accelerator
        self._agreement = Agreement(
            accelerator.process_index, accelerator.num_processes, accelerator.gather, accelerator.device
        )
        self._record_plugins(loaded_aggregation)

    @property
    def _trl(self) -> Any:
        """This object as TRL's trainer, whose attributes the type checker cannot see from a mixin."""
        return self

    @property
    def _needs_rollout(self) -> bool:
        return self.loss_aggregation is not None or bool(self.advantage_hooks) or self._recorder is not None

    @property
    def _acts_at_forward(self) -> bool:
        return self.loss_aggregation is not None or self._chain.acts("on_forward")

    # ------------------------------------------------------------------ once per generation batch

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        trl, watch = self._trl, RewardWatch(reward_limit(self.args, self.accelerator.num_processes))
        functions, failure = trl.reward_funcs, None
        trl.reward_funcs = [watch.around(*pair) for pair in zip(functions, trl.reward_func_names, strict=True)]
        try:
            with watch.limited():
                rewards_N_K = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: the other ranks wait in the one gather of this method
            failure = error
            gather(torch.full((len(prompts), len(functions)), torch.nan, device=self.accelerator.device))
        finally:
            trl.reward_funcs = functions
        with self._agreement.section():
            if failure is not None:
                raise failure
            watch.check_finite(rewards_N_K, trl.reward_func_names)
        self._log_metrics(watch.counts(rewards_N_K, trl.reward_func_names, self.accelerator.gather))
        if self._needs_rollout:
            self._scored = Scored(inputs, prompts, completions, completion_ids_list, rewards_N_K, **watch.beside)
        return rewards_N_K

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if not self._needs_rollout:
            return batch
        upstream.check_batch(batch)
        scores, (scored, self._scored) = self._scorer.scores(batch), (self._scored, None)
        scored = scored and agreed_spans(self, scored)
        with self._agreement.section():
            rollout = make_rollout(self, batch, scored, scores)
            advantages_B_T, changes = self._chain.on_rollout(batch["advantages"], rollout)
            rollout = replace(rollout, advantages_B_T=advantages_B_T)
            if implements(self.loss_aggregation, "weights"):
                batch[self._weights_key] = flow.token_weights(self.loss_aggregation, rollout)
        assert scored is not None  # or there would be no rollout
        batch.update(row_entries(rollout, scored, self._places))
        self._places += rollout.totals.sequences
        if self._recorder is not None and rollout.training:
            at_first_B_T = flow.expand_advantages(batch["advantages"], rollout.mask_B_T)
            stages = [("trl", at_first_B_T), *((change.name, change.after_B_T) for change in changes)]
            self._recorder.start(rollout, batch[RowKeys.place], stages, scored.outcomes)
        if changes:
            batch["advantages"] = advantages_B_T
            self._log_changes(changes, batch[RowKeys.place], rollout.mask_B_T)
        if self.loss_aggregation is not None:
            self._check_one_batch(self._undealt_totals)
            self._undealt_totals = rollout.totals
            self._log_weights(rollout, advantages_B_T, batch.get(self._weights_key))
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        totals, self._undealt_totals = self._undealt_totals, None
        if totals is None:
            return inputs
        micro_batches = self._trl._buffered_inputs if self.model.training else [inputs]
        steps = step_totals(self, micro_batches)
        for micro_batch, step in zip(micro_batches, steps, strict=True):
            micro_batch[self._totals_key] = replace(totals, step=step)
        return inputs

    def _log_changes(self, changes: Sequence[Change], places_B: torch.Tensor, mask_B_T: torch.Tensor) -> None:
        """Log what each hook did, and let TRL's table of completions show the advantage that the loss gets.

        The table has one number for a completion: the mean over its live tokens.
        """
        means_B = changes[-1].after_B_T.sum(1) / mask_B_T.sum(1).clamp(min=1.0)
        places_N = self.accelerator.gather(places_B).tolist()
        rows_B_C = torch.cat([means_B.float().unsqueeze(1), change_tables(changes, mask_B_T)], dim=1)
        rows_N_C = self.accelerator.gather(rows_B_C)
        self._log_metrics(metrics_of(changes, rows_N_C[:, 1:]))
        logged = self._logs["advantages"]
        for place, mean in zip(places_N, rows_N_C[:, 0].tolist(), strict=True):
            if (row := place - self._places + len(logged)) >= 0:  # else it has left the table
                logged[row] = mean

    def _log_weights(self, rollout: Rollout, advantages_B_T: torch.Tensor, weights_B_T: torch.Tensor | None) -> None:
        """Metrics of one generation batch: groups without signal and, known already for weights, what tokens count."""
        signal_N_C = self.accelerator.gather(signal_table(rollout))
        self._log_metrics({"groups/zero_variance": share_without_signal(signal_N_C)})
        if weights_B_T is not None:
            rows_B_C = row_table(weights_B_T, advantages_B_T, rollout.mask_B_T)
            self._log_metrics(weight_metrics(self.accelerator.gather(rows_B_C)))

    def _log_metrics(self, metrics: dict[str, float]) -> None:
        kept = self._trl._metrics["train" if self.model.training else "eval"]
        for name, value in metrics.items():
            kept[name].append(value)

    # ------------------------------------------------------------------ at every loss forward

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute TRL's loss and stop if the selected plugins had no part in it."""
        self._loss_path_ran = False
        loss = super().compute_loss(*arguments, **keywords)
        needed = self._acts_at_forward or (self.advantage_hooks and not self._own_losses)  # those have been tried out
        if needed and not self._loss_path_ran:
            raise UpstreamError(
                f"compute_loss of {type(self).__qualname__} (or code that patches TRL, such as Unsloth) does not go "
                "through TRL's _compute_loss, so the selected loss aggregation and advantage hooks would be ignored. "
                "Put GRPOExtMixin in front of that override, or remove it, or the plugins."
            )
        return loss

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self._made_up_pass is not None or (not self._acts_at_forward and self._recorder is None):
            self._loss_path_ran = True
            return super()._compute_loss(model, inputs)  # type: ignore[misc]
        if self.model.training and self._acts_at_forward and self._per_token and not self._self_checked:
            self_check.check_loss(self, inputs)
            self._self_checked = True
        forward = LossForward(dict(inputs), self._loss_mask(inputs), keep_graph=torch.is_grad_enabled())
        if self.loss_aggregation is None:
            loss = self._trl_loss(model, forward)
        else:
            with torch.enable_grad():  # in evaluation too: the split needs the graph from the advantages to the loss
                loss = self._reaggregated(self._trl_loss(model, forward), forward)
        if self._recorder is not None and self.model.training:
            self._record(forward)
        return loss if forward.keep_graph else loss.detach()

    def _record(self, forward: LossForward) -> None:
        """Hand what this loss forward used to the token records."""
        places_B, inputs = forward.inputs[RowKeys.place], forward.inputs
        if self._recorder is None or not self._recorder.wants(places_B):
            return
        used = {"advantage": flow.expand_advantages(inputs["advantages"], forward.mask_B_T)}
        if self.loss_aggregation is None and not self._own_losses and self._trl.loss_type in upstream.LOSS_TYPES:
            forward.weights_B_T = trl_weights(self, inputs, forward.mask_B_T) / self.accelerator.num_processes
        if (factor_B := inputs.get(FACTOR_KEY)) is not None and forward.weights_B_T is not None:
            used["advantage"] = used["advantage"] / factor_B.unsqueeze(1)  # as it was before it was put into a part
            forward.weights_B_T = forward.weights_B_T * factor_B.unsqueeze(1)
        seen = {"weight": forward.weights_B_T, "logp": forward.logps_B_T, "entropy": forward.entropies_B_T}
        used |= {name: values_B_T.detach() for name, values_B_T in seen.items() if values_B_T is not None}
        stages = [(change.name, change.after_B_T) for change in forward.changes]
        self._recorder.trained(places_B, stages, used)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Log as TRL does; in training, write the token records beside it."""
        if self._recorder is not None and self.model.training:
            records = gather_object(self._recorder.records())
            if self.accelerator.is_main_process:
                write_records(records, self.args.output_dir, self.state.global_step)
        super().log(logs, *arguments, **keywords)  # type: ignore[misc]

    def _trl_loss(self, model: Any, forward: LossForward) -> torch.Tensor:
        """TRL's loss on `forward.inputs`; the policy's forward pass inside it fills in the rest of `forward`."""
        self._loss_forward = forward
        try:
            loss: torch.Tensor = super()._compute_loss(model, forward.inputs)  # type: ignore[misc]
        finally:
            self._loss_forward = None
        return loss

    def _loss_on_made_up(self, inputs: dict[str, Any], logps_B_T: torch.Tensor) -> tuple[torch.Tensor, LossForward]:
        """TRL's loss where the policy's forward pass is replaced by given log-probabilities, for the self-check."""
        entropies_B_T, auxiliary_loss = torch.ones_like(logps_B_T), logps_B_T.new_zeros(())
        output = (logps_B_T, entropies_B_T, auxiliary_loss)
        forward = LossForward(dict(inputs), self._loss_mask(inputs), keep_graph=True, made_up_output=output)
        return self._trl_loss(self.model, forward), forward

    def _get_per_token_logps_and_entropies(self, model: Any, *arguments: Any, **keywords: Any) -> Any:
        forward = self._loss_forward
        if self._made_up_pass is not None:
            return self._made_up_pass()
        if forward is None:  # the old policy's or the reference's pass, at generation
            return super()._get_per_token_logps_and_entropies(model, *arguments, **keywords)
        inputs = forward.inputs
        # TRL reads the advantages after this call, from the same dict: here is where they can still change.
        if forward.made_up_output is not None:
            result: Any = forward.made_up_output
        else:
            if self._chain.acts("on_forward") and len(arguments) <= upstream.ENTROPY_ARGUMENT:
                keywords.setdefault("compute_entropy", True)  # which a loss of somebody's own may not have asked for
            with torch.set_grad_enabled(forward.keep_graph):
                result = super()._get_per_token_logps_and_entropies(model, *arguments, **keywords)
            if self._chain.acts("on_forward"):
                with self._agreement.section():
                    context = make_forward(self, forward, result[0], result[1])
                    inputs["advantages"], forward.changes = self._chain.on_forward(inputs["advantages"], context)
                    if not self._per_token:
                        inputs["advantages"] = self._one_per_completion(inputs)
                self._log_changes(forward.changes, inputs[RowKeys.place], forward.mask_B_T)
            self._loss_path_ran = True
        forward.logps_B_T, forward.entropies_B_T = result[:2]
        if self.loss_aggregation is not None or forward.made_up_output is not None:
            # In the precision of the log-probabilities, because the slope in the advantages has theirs.
            precision = torch.promote_types(torch.float32, result[0].dtype)
            advantages_B_T = flow.expand_advantages(inputs["advantages"], forward.mask_B_T)
            inputs["advantages"] = advantages_B_T.detach().to(precision, copy=True).requires_grad_()
        return result

    def _reaggregated(self, loss: torch.Tensor, forward: LossForward) -> torch.Tensor:
        """The same per-token losses under the selected aggregation."""
        loss_B_T, others = pieces(self, loss, forward)
        if implements(self.loss_aggregation, "weights"):
            # The weights' sum spans the generation batch. Ranks are averaged by DDP, ZeRO and FSDP; and each optimizer
            # step takes `accumulation` of the batch's `steps_per_generation` micro-batches.
            scale: float = self.accelerator.num_processes * self._steps_per_generation / self._accumulation
            weights_B_T: torch.Tensor = forward.inputs[self._weights_key]
            forward.weights_B_T = weights_B_T * (scale / self.accelerator.num_processes)
            return (weights_B_T * loss_B_T).sum() * scale + others
        if not loss_B_T.requires_grad:  # evaluation of a loss that is linear in the advantages
            loss_B_T = loss_B_T.detach().requires_grad_()
        with self._agreement.section():
            totals = forward.inputs[self._totals_key]
            reduced = flow.reduced_loss(self.loss_aggregation, loss_B_T, forward.mask_B_T, totals)
            weights_B_T = flow.reduced_weights(self.loss_aggregation, reduced, loss_B_T, forward.mask_B_T)
        rows_B_C = row_table(weights_B_T, forward.inputs["advantages"], forward.mask_B_T)
        self._log_metrics(weight_metrics(self.accelerator.gather(rows_B_C)))
        forward.weights_B_T = weights_B_T / (self._accumulation * self.accelerator.num_processes)
        return reduced / self._accumulation + others

    def _loss_mask(self, batch: dict[str, Any]) -> torch.Tensor:
        """1.0 where a token counts, in the precision of the loss, which is float32 unless the policy has more."""
        mask_B_T: torch.Tensor = batch["completion_mask"]
        if "tool_mask" in batch:
            mask_B_T = mask_B_T * batch["tool_mask"]
        return mask_B_T.to(torch.promote_types(torch.float32, self.model.dtype))

    @property
    def _accumulation(self) -> int:
        """Micro-batches in the optimizer step at hand; evaluation does not accumulate."""
        return int(self._trl.current_gradient_accumulation_steps) if self.model.training else 1

    @property
    def _steps_per_generation(self) -> int:
        return int(self.args.steps_per_generation) if self.model.training else 1


class GRPOExtTrainer(GRPOExtMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with plugins; a drop-in: `from trl_grpo_ext import GRPOExtTrainer as GRPOTrainer`."""


def _given_once(name: str, in_python: Any, in_config: Any) -> Any:
    if in_python is not None and in_config is not None:
        raise ConfigurationError(
            f"{name} is given twice: {in_python!r} to the trainer and {in_config!r} in its config. Keep one of them."
        )
    return in_config if in_python is None else in_python
