"""What the plugins of one trainer add to the methods of TRL that `mixin` overrides.

`inherited` is the method that the override replaces: TRL's, or that of a user's class in between. Collaborators get
`RunFacts`, a `Progress`, or the one function that they need, never the trainer.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from trl import GRPOTrainer

from ..credit import flow
from ..credit.chain import Change, HookChain, change_tables, metrics_of
from ..credit.metrics import row_table, weight_metrics
from ..credit.signal import rewards_are_equal, share_without_signal, signal_table, zero_variance_of
from ..errors import ConfigurationError, UpstreamError
from ..guard.agreement import Agreement
from ..guard.calls import unique_names
from ..guard.reward_watch import RewardWatch, reward_limit
from ..plugins.loading import LoadedList, RewardList, load_advantage_hooks, load_rewards, resolve
from ..records.log import LiveLog
from ..records.manifest import Manifest
from ..records.settings import write_settings
from ..records.token_records import TokenRecorder
from ..types import Forward, Rollout, StepTotals, Totals
from . import upstream
from .batch import BatchKeys, counting_mask, whole_rows
from .compact.packed import packing_of
from .compact.updates import CompactUpdates, freedom_of
from .config import our_settings
from .contexts import SampledBatch, Sampling, ScoredBatch, make_rollout
from .facts import LossSettings, Progress
from .hook_states import AdvantageHookStates, has_state
from .live import use_console_summary
from .logps import Models, Scorer, Scores
from .own_loss import ForwardPass, LossOf, OwnLoss, reward_positions
from .pass_at_k import pass_at_k_of
from .phase_times import PhaseClock
from .plugin_records import PluginRecords
from .reaggregation import LossForward, Reaggregation, self_check, trl_weights
from .resampling import Prompts, Resampling, ResamplingState, read_resample, refuse_inexact
from .shaping import batch_before_trls, refuse_images, rollout_of_shapers

Inherited = Callable[..., Any]


class Rewards:
    """The reward functions given in Python, then those selected in the config, with their weights."""

    def __init__(self, given: Any, selections: Any, processing_classes: Any) -> None:
        listed = [] if given is None else given if isinstance(given, list) else [given]
        selected = load_rewards(selections or [])
        self.functions: Any = LoadedList.join(listed, selected) if selected else given
        weights = listed.weights if isinstance(listed, RewardList) else ()
        if len(weights) != len(listed):  # another list, or one that something was added to
            weights = [getattr(one, "trl_grpo_ext_weight", 1.0) for one in listed]
        self.weights = [*weights, *selected.weights]
        self.processing_classes = processing_classes
        if selected and processing_classes is not None:
            classes = processing_classes if isinstance(processing_classes, list) else [processing_classes]
            self.processing_classes = [*classes, *([None] * len(selected))]
        self._chosen = [*listed, *selected]  # now, since TRL adds an environment's to the list

    def set_weights(self, trainer: Any) -> None:
        """Put the weights where the trainer keeps them, unless the config has some."""
        if trainer.args.reward_weights is None:
            positions = reward_positions(self._chosen, trainer.reward_funcs, self.weights)
            trainer.reward_weights[positions] = torch.tensor(self.weights)


class Extension:
    """Everything of ours in one trainer: the plugins, their collaborators, and what each override adds."""

    def __init__(
        self,
        trainer: Any,
        between: Sequence[type],
        args: Any,
        advantage_hooks: Any,
        loss_aggregation: Any,
        resample: Any,
    ) -> None:
        self._trainer, self._between, self._args = trainer, between, args
        settings = self.settings = our_settings(args)
        self.advantage_hooks: list[Any] = load_advantage_hooks(
            _one_source("advantage_hooks", advantage_hooks, settings.advantage_hooks) or []
        )
        aggregation = _one_source("loss_aggregation", loss_aggregation, settings.loss_aggregation)
        self._loaded_aggregation = None if aggregation is None else resolve("loss_aggregation", aggregation)
        self.loss_aggregation: Any = self._loaded_aggregation and self._loaded_aggregation.object
        self._resample = read_resample(_one_source("resample", resample, settings.resample))
        self._loaded_filter = None if self._resample is None else resolve("group_filter", self._resample.filter)
        self.group_filter: Any = self._loaded_filter and self._loaded_filter.object
        self.chain = HookChain(self.advantage_hooks, self.loss_aggregation)
        self._changes_advantages = self.chain.acts("on_rollout") or self.chain.acts("on_forward")
        self._own_loss = OwnLoss(
            between,
            hooks=self._changes_advantages,
            forward_hooks=self.chain.acts("on_forward"),
            aggregation=None if self.loss_aggregation is None else flow.plugin_label(self.loss_aggregation),
            compact=settings.compact_updates == "exact",
        )
        if self.loss_aggregation is not None and args is not None:
            upstream.check_loss_type(args.loss_type)
        self._sampling: Sampling | None = None  # while TRL samples and scores a generation batch
        self._undealt: Totals | None = None  # of the generation batch whose micro-batches have no counts yet
        self._pass: Inherited | None = None  # what a forward pass is for; None for the passes at generation
        self._loss_passes = 0
        self.self_checked = False
        self.row_count = 0

    def keep_reference(self, model: Any, peft_config: Any) -> None:
        """Keep a copy of an adapter that is trained further, if a hook needs the reference policy."""
        if any("ref_logps" in getattr(hook, "needs", ()) for hook in self.advantage_hooks):
            upstream.keep_adapter_as_reference(model, self._args, peft_config)

    def attach(self, rewards: Rewards, policy_logps: Inherited, *, evaluates: bool) -> None:
        """Build the collaborators for the trainer that TRL has constructed."""
        trl = self._trainer
        args = self._args = trl.args
        settings = self.settings = our_settings(args)
        upstream.check_instance(trl)
        if (served := upstream.served_instead(trl)) is not None:
            warnings.warn(
                f"The vLLM server has the model {served!r}, and this run trains {trl.model.config._name_or_path!r}. If "
                "they differ in shape, vLLM keeps weights of its own and says so in its own log alone: start it with "
                "the model that is trained.",
                stacklevel=2,
            )
        trl.reward_func_names = unique_names(trl.reward_func_names)
        rewards.set_weights(trl)
        trl.add_callback(LiveLog())
        if settings.summary_steps:
            use_console_summary(trl, settings.summary_steps)
        if any(map(has_state, self.advantage_hooks)):
            trl.add_callback(AdvantageHookStates.of(hooks=self.advantage_hooks))
        facts = self.facts = upstream.facts_of(trl)
        self.agreement = Agreement(facts.rank, facts.ranks, facts.gather, facts.device)
        self._phases = PhaseClock(facts.device)
        self.compact = self._make_compact_updates(policy_logps) if settings.compact_updates == "exact" else None
        self.shapes = self.chain.acts("on_rewards")
        own_scoring = any("_generate_and_score_completions" in vars(owner) for owner in self._between)
        self._trls_advantages = not upstream.transforms_advantages(trl) and not own_scoring
        needing = [*self.advantage_hooks, *([] if self.group_filter is None else [self.group_filter])]
        self.scorer = Scorer(needing, self._models(), facts.tokenizer)
        self._resampling = self._make_resampling()
        self._recorder = TokenRecorder(settings.token_records, args.seed) if settings.token_records else None
        self._pass_at_k = pass_at_k_of(settings, facts, evaluates=evaluates)
        self.reaggregation: Reaggregation | None = None
        if self.loss_aggregation is not None:
            self.reaggregation = Reaggregation(self.loss_aggregation, facts, trl.loss_type, self.agreement.section)
        self.plugin_manifest = Manifest.of(trl, self._loaded_aggregation, self._loaded_filter)
        self._reward_plugins = any(
            record.selected or record.distribution == "trl-grpo-ext" for record in self.plugin_manifest.plugins
        )
        self.plugin_records = PluginRecords(self.plugin_manifest, args, settings.plugin_changes, self.agreement)

    def _make_compact_updates(self, policy_logps: Inherited) -> CompactUpdates:
        trl, settings = self._trainer, self.settings
        if self._args.use_liger_kernel:
            raise ConfigurationError(
                "compact_updates: exact does not work with use_liger_kernel, whose loss counts the rows of each "
                "micro-batch. Turn one of them off."
            )
        loss = upstream.loss_settings_of(trl)
        freedom = freedom_of(loss, self.loss_aggregation, self.advantage_hooks)
        packing = packing_of(
            trl.model,
            loss,
            share=settings.share_prompts,
            compiled=self._args.torch_compile,
            overridden=any("_get_per_token_logps_and_entropies" in vars(owner) for owner in self._between),
        )
        return CompactUpdates(
            freedom,
            self.facts,
            loss_type=loss.loss_type if self.loss_aggregation is None else None,
            packing=packing,
            policy=lambda: (policy_logps, trl.model),
            log=self.add_metrics,
        )

    def _make_resampling(self) -> Resampling | None:
        trl, facts = self._trainer, self.facts
        if self._resample is None:
            return None
        upstream.refuse_stream(trl.train_dataset)
        statistics, saves_inside = upstream.batch_statistics_of(trl), upstream.saves_inside_batches(trl)
        refuse_inexact(self.group_filter, self.advantage_hooks, statistics, saves_inside)
        prompts = Prompts(trl, facts)
        trl.add_callback(ResamplingState.of(prompts=prompts))
        return Resampling(
            self._resample,
            self.group_filter,
            facts,
            prompts,
            self.agreement,
            loss_counts_rows=self.loss_aggregation is None and trl.loss_type in upstream.ROW_MEAN,
        )

    def _policy_pass(
        self, batch: dict[str, Any], rows_at_once: int, entropies: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The policy's log-probabilities and entropies of a batch, by TRL's own method."""
        trl = self._trainer
        images = {key: batch[key] for key in upstream.MULTIMODAL_KEYS if batch.get(key) is not None}
        options = {"batch_size": rows_at_once, "compute_entropy": entropies, **images}
        with torch.no_grad():
            logps_B_T, entropies_B_T, *_ = trl._get_per_token_logps_and_entropies(
                trl.model, *whole_rows(batch), batch["completion_ids"].size(1), **options
            )
        return logps_B_T.detach(), entropies_B_T.detach() if entropies else None

    def _models(self) -> Models:
        trl = self._trainer
        return Models(
            policy_pass=self._policy_pass,
            prompt_tokens=lambda prompts: trl._tokenize_prompts(prompts)[0],
            as_reference=upstream.reference_of(trl),
            prepared=functools.partial(upstream.prepare_like_policy, trl),
            in_tiles=upstream.add_fused_lm_head is not None,
            autocast=trl.accelerator.autocast,
            samples_with_logps=trl.use_vllm or trl.rollout_func is not None,
            one_update=upstream.one_update_of(trl),
            temperature=float(trl.temperature),
            trust_remote_code=bool(self._args.trust_remote_code),
        )

    @property
    def _needs_rollout(self) -> bool:
        selected = (self.reaggregation, self._recorder, self._resampling)
        return bool(self.advantage_hooks) or any(one is not None for one in selected)

    @property
    def _has_plugins(self) -> bool:
        beside = self.compact is not None or self._pass_at_k is not None
        return self._reward_plugins or self._needs_rollout or beside

    @property
    def _acts_at_forward(self) -> bool:
        return self.reaggregation is not None or self.chain.acts("on_forward")

    # ------------------------------------------------------------------ once per run

    def begin(self, resume_from_checkpoint: str | bool | None) -> None:
        """Compare the plugins with those of the checkpoint, and write this run's."""
        self.plugin_records.begin(resume_from_checkpoint, functools.partial(write_settings, self._trainer))
        if self._resampling is not None:
            self._resampling.prompts.start_at(0)

    def evaluate(self, evaluation: Inherited, dataloader: Any, prefix: str) -> Any:
        """An evaluation, with pass@k."""
        if self._pass_at_k is None:
            return evaluation()
        with self._pass_at_k.evaluating():
            output = evaluation()
            metrics = self._pass_at_k.metrics(upstream.problems_of(dataloader, self.facts.ranks))
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    def training_step(self, inherited: Inherited, *arguments: Any, **keywords: Any) -> Any:
        """A micro-step, timed."""
        if not self._has_plugins:
            return inherited(*arguments, **keywords)
        tiles = nullcontext() if self.compact is None else upstream.small_head_tiles(self.facts.device)
        with self._phases.during("update"), tiles:
            output = inherited(*arguments, **keywords)
        if self._trainer._step % self._trainer.current_gradient_accumulation_steps == 0:  # as TRL's own `step_time`
            self.add_metrics(self._phases.take())
        return output

    # ------------------------------------------------------------------ once per generation batch

    def prepare_inputs(self, inherited: Inherited, compute_loss: Inherited, generation_batch: Any) -> Any:
        """The micro-batch to train on; `compute_loss` is the inherited one, to be tried out."""
        trl = self._trainer
        with self._phases.during("generation"):
            inputs = inherited(generation_batch)
            progress = upstream.progress_of(trl)
            if self.compact is not None and progress.training:
                trl._buffered_inputs = self.compact.plan(trl._buffered_inputs, progress.precision)
                inputs = trl._buffered_inputs[trl._step % len(trl._buffered_inputs)]
            if self._undealt is not None:
                self._deal_totals(trl._buffered_inputs if progress.training else [inputs], progress)
            if self._own_loss.untried:
                trls_loss = functools.partial(GRPOTrainer._compute_loss, trl)
                with upstream.restore_after_trial(trl):
                    self._own_loss.try_out(inputs, self.on_trial(compute_loss), self.on_trial(trls_loss))
            if not self._own_loss.per_token:
                with self.agreement.section():
                    mask_B_T = counting_mask(inputs).to(progress.precision)
                    inputs["advantages"] = self._own_loss.advantages(inputs["advantages"], mask_B_T)
        return inputs

    def _deal_totals(self, micro_batches: Sequence[dict[str, Any]], progress: Progress) -> None:
        """Give every micro-batch the counts of its generation batch and, for `reduce`, of its optimizer step."""
        totals, self._undealt = self._undealt, None
        assert totals is not None and self.reaggregation is not None  # noqa: PT018
        for micro_batch in micro_batches:
            micro_batch[BatchKeys.totals] = totals
        length = self.facts.accumulation if progress.training else 1
        if self.reaggregation.by_weights or len(micro_batches) % length:  # or a step reaches beyond this batch
            return
        masks = [counting_mask(micro_batch).to(progress.precision) for micro_batch in micro_batches]
        counts_M_C = torch.stack([torch.stack([mask.sum(), mask.new_tensor(float(len(mask)))]) for mask in masks])
        counts_S_C = self.facts.sum_over_ranks(counts_M_C.view(-1, length, 2).sum(1)).tolist()
        for number, micro_batch in enumerate(micro_batches):
            tokens, sequences = map(round, counts_S_C[number // length])
            step = StepTotals(tokens=tokens, sequences=sequences, micro_batches=length)
            micro_batch[BatchKeys.totals] = replace(totals, step=step)

    def generate(self, inherited: Inherited, prompts: Any) -> Any:
        """What TRL generates, which shapers and the rollout need."""
        generated = inherited(prompts)
        if self._sampling is not None:
            self._sampling.generated, self._sampling.passes = generated, []
        return generated

    def calculate_rewards(
        self, inherited: Inherited, inputs: Any, prompts: Any, completions: Any, completion_ids: Any
    ) -> torch.Tensor:
        """The rewards of all ranks, `(N, K)`, with a column for each shaper."""
        trl, names, sampling = self._trainer, self.facts.reward_names, self._sampling
        limit = reward_limit(self.settings.reward_timeout, float(self._args.ddp_timeout), self.facts.ranks)
        watch, failure = RewardWatch(limit), None
        shape = len(prompts), len(names)  # now: a reward may empty what it is given
        if sampling is not None and sampling.show_columns is not None:
            sampling.show_columns(())
        functions = trl.reward_funcs
        trl.reward_funcs = [watch.wrap(*pair) for pair in zip(functions, names, strict=True)]
        try:
            with self._phases.during("rewards"), watch.time_limit():
                columns = {name: [row[name] for row in inputs] for name in inputs[0]}
                for reward in trl.reward_funcs:  # one that waits for a server waits while the others compute
                    if callable(start := getattr(reward, "start_scoring", None)):
                        start(completions, prompts=prompts, **columns)
                rewards_N_K = inherited(inputs, prompts, completions, completion_ids)
        except BaseException as error:  # also SystemExit and Ctrl-C: the others wait in the one gather of this method
            failure = error
            self.agreement.stand_in(error, gather, torch.full(shape, torch.nan, device=self.facts.device))
        finally:
            trl.reward_funcs = functions
        with self.agreement.section():
            if failure is not None:
                raise failure
            watch.check_finite(rewards_N_K, names)
        if self._pass_at_k is not None:
            self._pass_at_k.add(rewards_N_K)
        self.add_metrics(watch.counts(rewards_N_K, names, self.facts.gather))
        if sampling is not None:
            seen = (inputs, prompts, completions, completion_ids, rewards_N_K)
            extras = {"spans": watch.spans, "outcomes": watch.outcomes, "tool_masks": sampling.tool_masks}
            sampling.scored = ScoredBatch(*seen, **extras)  # type: ignore[arg-type]
        return self._shape_rewards(sampling) if self.shapes else rewards_N_K

    def _shape_rewards(self, sampling: Sampling | None) -> torch.Tensor:
        """The rewards of all ranks, with a column for what each shaper adds."""
        trl, progress = self._trainer, upstream.progress_of(self._trainer)
        batch = batch_before_trls(self.facts, sampling, has_reference=trl.beta != 0.0)
        assert sampling and sampling.scored and sampling.show_columns  # noqa: PT018
        refuse_images(sampling, self.scorer.missing(batch))
        scores = self._scores(batch, sampling.scored.rows, progress)
        scored = sampling.scored = sampling.scored.agreed(self.facts)
        with self.agreement.section():
            raw = self._rollout(progress, batch, scored, scores)
            rollout = sampling.rollout = self.chain.on_rewards(raw)
        added_N_S = self.facts.gather(rollout.rewards_B_K[:, len(raw.reward_names) :])
        scored.rewards_N_K = torch.cat([scored.rewards_N_K, added_N_S], dim=1)
        sampling.show_columns(rollout.reward_names[len(raw.reward_names) :])
        raw_N = self.facts.gather(rollout.raw_rewards_B)
        known_N = raw_N[~torch.isnan(raw_N)]
        self.add_metrics({"raw_reward": float(known_N.mean()), "raw_reward_std": float(known_N.std())})
        return scored.rewards_N_K

    def _rollout(self, progress: Progress, batch: dict[str, Any], scored: ScoredBatch, scores: Scores) -> Rollout:
        weights_K = self._trainer.reward_weights
        return make_rollout(self.facts, progress, batch, scored, scores, weights_K, self.agreement.gather)

    def generate_and_score(self, inherited: Inherited, inputs: Any) -> dict[str, Any]:
        """TRL's generation batch with the advantages, weights and entries that the plugins make."""
        if not self._needs_rollout:
            if self.compact is None:
                batch: dict[str, Any] = inherited(inputs)
                return batch
            batch, sampling = self._sample_as_trl(inherited, inputs)
            if sampling.scored is not None:
                self._zero_rounding(batch, sampling.scored)
            return batch
        progress, refill = upstream.progress_of(self._trainer), self._resampling
        if refill is None or not progress.training:
            return self._finish_batch(self._sample(inherited, inputs, progress), progress)

        def one_round(rows: list[Any]) -> tuple[SampledBatch, Rollout]:
            sampled = self._sample(inherited, rows, progress)
            return sampled, self._apply_rollout_hooks(sampled)[0] if refill.reads_advantages else sampled.rollout

        filled, metrics = refill.fill(one_round, progress, self._trainer.reward_weights)
        self.add_metrics(metrics)
        return self._finish_batch(filled, progress)

    def _sample_as_trl(self, inherited: Inherited, inputs: Any) -> tuple[dict[str, Any], Sampling]:
        """TRL's batch, and what the other overrides saw of it."""
        columns = upstream.reward_columns(self._trainer) if self.shapes else nullcontext()
        sampling = self._sampling = Sampling()
        try:
            with columns as sampling.show_columns:
                return inherited(inputs), sampling
        finally:
            self._sampling = None

    def _scores(self, batch: dict[str, Any], rows: Sequence[Mapping[str, Any]], progress: Progress) -> Scores:
        with self.agreement.section():
            prompted = self.scorer.with_prompts(batch, rows)
        return self.scorer.scores(batch, prompted, self.facts.rows_at_once(progress.training))

    def _sample(self, inherited: Inherited, inputs: Any, progress: Progress) -> SampledBatch:
        """Let TRL sample and score a batch, and make its rollout."""
        batch, sampling = self._sample_as_trl(inherited, inputs)
        upstream.check_batch(batch)
        if (scored := sampling.scored) is None:
            raise UpstreamError(
                f"The rewards of this generation batch were never seen: a base class of {self.facts.trainer} overrides "
                "_generate_and_score_completions without calling _calculate_rewards. Advantage hooks and loss "
                "aggregations need it."
            )
        scores = Scores()
        if not self.shapes:
            scores = self._scores(batch, scored.rows, progress)
            scored = scored.agreed(self.facts)
        with self.agreement.section():
            if self.shapes:
                rollout = rollout_of_shapers(self.facts, sampling, batch)
            else:
                rollout = self._rollout(progress, batch, scored, scores)
            selected = (self.reaggregation, self.compact, self._resampling)
            if self._changes_advantages or any(one is not None for one in selected):
                self._zero_rounding(batch, scored)
        numbers_N = torch.arange(rollout.totals.sequences, device=rollout.mask_B_T.device)
        batch[BatchKeys.row_id] = self.row_count + numbers_N[rollout.local_rows]
        self.row_count += rollout.totals.sequences
        return SampledBatch(batch, scored, scores, rollout)

    def _apply_rollout_hooks(self, sampled: SampledBatch) -> tuple[Rollout, list[Change], torch.Tensor | None]:
        """The rollout with the advantages, what each hook did, and the signs that its masks allow."""
        with self.agreement.section():
            advantages_B_T, changes = self.chain.on_rollout(sampled.batch["advantages"], sampled.rollout)
        with self.agreement.section():  # another, which gathers: so that a hook that gathers on one rank is found out
            allowed_signs_B_T = self.chain.allowed_signs(sampled.rollout)
            uninformative_B = self.chain.uninformative(sampled.rollout)
        rollout = replace(sampled.rollout, advantages_B_T=advantages_B_T, uninformative_B=uninformative_B)
        return rollout, changes, allowed_signs_B_T

    def _finish_batch(self, sampled: SampledBatch, progress: Progress) -> dict[str, Any]:
        """Finish the batch to train on: hooks, the aggregation's weights, entries of rows, records, metrics."""
        rollout, changes, allowed_signs_B_T = self._apply_rollout_hooks(sampled)
        batch, advantages_B_T = sampled.batch, rollout.advantages_B_T
        assert advantages_B_T is not None
        if self.reaggregation is not None and self.reaggregation.by_weights:
            with self.agreement.section():
                batch[BatchKeys.weights] = flow.token_weights(self.reaggregation.aggregation, rollout)
        signal_N_C = self.facts.gather(signal_table(rollout))
        self._warn(self.chain.overruled(signal_N_C))
        batch[BatchKeys.reward], batch[BatchKeys.raw_reward] = rollout.rewards_B, rollout.raw_rewards_B
        batch[BatchKeys.baseline] = rollout.group_baselines_B
        batch[BatchKeys.zero_variance] = zero_variance_of(signal_N_C)[rollout.local_rows]
        if allowed_signs_B_T is not None:
            batch[BatchKeys.allowed_signs] = allowed_signs_B_T
        if self._recorder is not None and progress.training:
            at_first_B_T = flow.expand_advantages(batch["advantages"], rollout.mask_B_T)
            stages = [("trl", at_first_B_T), *((change.name, change.after_B_T) for change in changes)]
            self._recorder.start(rollout, batch[BatchKeys.row_id], stages, sampled.scored.outcomes)
        if changes:
            batch["advantages"] = advantages_B_T
            self._log_changes(changes, batch[BatchKeys.row_id], rollout.mask_B_T)
        if self.reaggregation is not None:
            if self._undealt is not None:
                raise ConfigurationError(
                    f"_generate_and_score_completions of {self.facts.trainer} makes one batch out of several, but the "
                    "loss aggregation has weighted each by itself. Let it call super() once, or put GRPOExtMixin in "
                    "front of it."
                )
            self._undealt = rollout.totals
            self.add_metrics({"groups/zero_variance": share_without_signal(signal_N_C)})
            if self.reaggregation.by_weights:
                self._log_weights(batch[BatchKeys.weights], advantages_B_T, rollout.mask_B_T)
        return batch

    def _zero_rounding(self, batch: dict[str, Any], scored: ScoredBatch) -> None:
        """Set TRL's own advantages to exactly 0 if a group's rewards are equal, where rounding may leave a rest."""
        if not self._trls_advantages:
            return
        trl, rewards_N_K = self._trainer, scored.rewards_N_K
        more = rewards_N_K.size(1) - len(trl.reward_weights)
        weights_K = torch.cat([trl.reward_weights, trl.reward_weights.new_ones(more)]).to(rewards_N_K.device)
        group_size = self.facts.group_size(upstream.progress_of(trl).training)
        groups_N = torch.arange(len(rewards_N_K), device=rewards_N_K.device) // group_size
        equal_N = rewards_are_equal(rewards_N_K, weights_K, groups_N, trl.multi_objective_aggregation)
        rows, advantages_B = len(scored.prompts), batch["advantages"]
        equal_B = equal_N[self.facts.rank * rows : (self.facts.rank + 1) * rows]
        batch["advantages"] = torch.where(equal_B, torch.zeros_like(advantages_B), advantages_B)

    # ------------------------------------------------------------------ at every loss forward

    def compute_loss(self, inherited: Inherited, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """The loss of a micro-step."""
        trl, passes = self._trainer, self._loss_passes
        idle = isinstance(inputs, dict) and inputs.get(BatchKeys.idle, False)
        if idle and upstream.backward_may_be_left_out(trl):  # it would add zeros to all gradients
            return torch.zeros((), device=self.facts.device, requires_grad=True)
        with upstream.restore_after_trial(trl) if idle else nullcontext():  # placeholders alone log nothing
            loss = inherited(model, inputs, *arguments, **keywords)
        needed = self._acts_at_forward or (self._changes_advantages and not self._own_loss.owners)  # those were tried
        if needed and self._loss_passes == passes:
            raise UpstreamError(
                f"compute_loss of {self.facts.trainer} (or code that patches TRL, such as Unsloth) bypasses TRL's "
                "_compute_loss, so the selected loss aggregation and advantage hooks would be ignored. Put "
                "GRPOExtMixin in front of that override, or remove it, or the plugins."
            )
        return loss

    def policy_loss(self, inherited: Inherited, model: Any, inputs: Any) -> Any:
        """TRL's `_compute_loss`, with the selected aggregation in place of its reduction."""
        if self._pass is not None or not (self._acts_at_forward or self._recorder is not None):  # a trial, or no plugin
            self._loss_passes += 1
            return _without_masked_groups(inherited(model, inputs), inputs)
        trl = self._trainer
        progress, settings = upstream.progress_of(trl), upstream.loss_settings_of(trl)
        mask_B_T, keep_graph = counting_mask(inputs).to(progress.precision), torch.is_grad_enabled()
        if progress.training and self._acts_at_forward and self._own_loss.per_token and not self.self_checked:
            slope = upstream.slope_at_ratio_one(trl)
            with self.agreement.section(), upstream.restore_after_trial(trl):
                trial = self.on_trial(inherited)
                self_check(trial, inputs, mask_B_T, self.reaggregation, self.facts, settings, progress, slope)
            self.self_checked = True
        forward = LossForward(dict(inputs), mask_B_T, keep_graph)
        if self.reaggregation is None:
            loss = self.run_loss(inherited, model, forward)
        else:
            with torch.enable_grad():  # in evaluation too: the split needs the graph from the advantages to the loss
                trl_loss = self.run_loss(inherited, model, forward)
                loss = self.reaggregation.loss(trl_loss, forward, settings, progress)
            if not self.reaggregation.by_weights and forward.weights_B_T is not None:
                self._log_weights(forward.weights_B_T, forward.inputs["advantages"], mask_B_T)
        if self._recorder is not None and progress.training:
            self._record(forward, settings, progress)
        return _without_masked_groups(loss if keep_graph else loss.detach(), inputs)

    def run_loss(self, inherited: Inherited, model: Any, forward: LossForward) -> Any:
        """TRL's loss on `forward.inputs`; the policy's forward pass inside it fills in the rest of `forward`."""
        with self._passing(functools.partial(self._pass_of_loss, forward)):
            return inherited(model, forward.inputs)

    def on_trial(self, loss: Inherited) -> LossOf:
        """A loss that takes a replacement for the policy's forward pass."""

        def of(batch: dict[str, Any], forward_pass: ForwardPass) -> torch.Tensor:
            with self._passing(lambda *_, **__: forward_pass()):
                tried: torch.Tensor = loss(self._trainer.model, batch)
                return tried

        return of

    @contextmanager
    def _passing(self, forward_pass: Inherited) -> Iterator[None]:
        self._pass = forward_pass
        try:
            yield
        finally:
            self._pass = None

    def forward_pass(self, inherited: Inherited, model: Any, *arguments: Any, **keywords: Any) -> Any:
        """A pass of the policy or the reference: for a loss, for a trial of one, or at generation."""
        if self.compact is not None:
            inherited = functools.partial(self.compact.logps, inherited)
        return (self._pass or self._pass_at_generation)(inherited, model, *arguments, **keywords)

    def _pass_at_generation(self, inherited: Inherited, model: Any, *arguments: Any, **keywords: Any) -> Any:
        result = inherited(model, *arguments, **keywords)
        if self._sampling is not None and not self._sampling.tensors:  # else the batch is already known
            self._sampling.passes.append(result[0])
        return result

    def _pass_of_loss(
        self, forward: LossForward, inherited: Inherited, model: Any, *arguments: Any, **keywords: Any
    ) -> Any:
        acts = self.chain.acts("on_forward")
        if acts and len(arguments) <= upstream.ENTROPY_ARGUMENT:
            keywords.setdefault("compute_entropy", True)  # which a subclass's loss may not have asked for
        with torch.set_grad_enabled(forward.keep_graph):
            result = inherited(model, *arguments, **keywords)
        self._loss_passes += 1
        forward.logps_B_T, forward.entropies_B_T = result[:2]
        # TRL reads the advantages from this dict after this call, so they can still change here.
        if acts:
            self._apply_forward_hooks(forward, *result[:2])
        if self.reaggregation is not None:
            # In the precision of the log-probabilities, because the slope in the advantages has theirs.
            precision = torch.promote_types(torch.float32, result[0].dtype)
            advantages_B_T = flow.expand_advantages(forward.inputs["advantages"], forward.mask_B_T)
            forward.inputs["advantages"] = advantages_B_T.detach().to(precision, copy=True).requires_grad_()
        return result

    def _apply_forward_hooks(self, forward: LossForward, logps_B_T: torch.Tensor, entropies_B_T: torch.Tensor) -> None:
        inputs, progress = forward.inputs, upstream.progress_of(self._trainer)
        with self.agreement.section():
            context = Forward(
                logps_B_T=logps_B_T.detach(),
                entropies_B_T=entropies_B_T.detach(),
                old_logps_B_T=inputs.get("old_per_token_logps", logps_B_T.detach()),
                mask_B_T=forward.mask_B_T,
                ref_logps_B_T=inputs.get("ref_per_token_logps"),
                completion_ids_B_T=inputs["completion_ids"],
                rewards_B=inputs[BatchKeys.reward],
                raw_rewards_B=inputs[BatchKeys.raw_reward],
                group_baselines_B=inputs[BatchKeys.baseline],
                zero_variance_B=inputs[BatchKeys.zero_variance],
                step=progress.step,
                training=progress.training,
                gather=self.agreement.gather,
            )
            allowed_signs_B_T = inputs.get(BatchKeys.allowed_signs)
            changed, forward.changes = self.chain.on_forward(inputs["advantages"], context, allowed_signs_B_T)
            inputs["advantages"] = self._own_loss.advantages(changed, forward.mask_B_T)
        self._log_changes(forward.changes, inputs[BatchKeys.row_id], forward.mask_B_T)

    # ------------------------------------------------------------------ what is logged and written

    def before_log(self) -> None:
        """Write the token records, and take out metrics without a value."""
        trl = self._trainer
        if self._recorder is not None and trl.model.training:
            records = gather_object(self._recorder.records())
            if trl.accelerator.is_main_process:
                self._recorder.write(records, self._args.output_dir, trl.state.global_step)
        if self._has_plugins:
            upstream.drop_undefined_metrics(trl)

    def _record(self, forward: LossForward, settings: LossSettings, progress: Progress) -> None:
        """Record what this loss forward used."""
        row_ids_B, inputs = forward.inputs[BatchKeys.row_id], forward.inputs
        if self._recorder is None or not self._recorder.wants(row_ids_B):
            return
        used = {"advantage": flow.expand_advantages(inputs["advantages"], forward.mask_B_T)}
        if self.reaggregation is None and not self._own_loss.owners and settings.loss_type in upstream.LOSS_TYPES:
            forward.weights_B_T = trl_weights(forward, settings, self.facts, progress) / self.facts.ranks
        if (factor_B := inputs.get(BatchKeys.factor)) is not None and forward.weights_B_T is not None:
            used["advantage"] = used["advantage"] / factor_B.unsqueeze(1)  # undo the factor of its part
            forward.weights_B_T = forward.weights_B_T * factor_B.unsqueeze(1)
        if forward.weights_B_T is not None:
            forward.weights_B_T = _without_masked_groups(forward.weights_B_T, inputs)
        seen = {"weight": forward.weights_B_T, "logp": forward.logps_B_T, "entropy": forward.entropies_B_T}
        used |= {name: values_B_T.detach() for name, values_B_T in seen.items() if values_B_T is not None}
        stages = [(change.name, change.after_B_T) for change in forward.changes]
        self._recorder.add_trained(row_ids_B, stages, used)

    def _log_changes(self, changes: Sequence[Change], row_ids_B: torch.Tensor, mask_B_T: torch.Tensor) -> None:
        """Log what each hook did, and put each completion's mean advantage into TRL's table of completions."""
        means_B = changes[-1].after_B_T.sum(1) / mask_B_T.sum(1).clamp(min=1.0)
        row_ids_N = self.facts.gather(row_ids_B).tolist()
        rows_B_C = torch.cat([means_B.float().unsqueeze(1), change_tables(changes, mask_B_T)], dim=1)
        rows_N_C = self.facts.gather(rows_B_C)
        self.add_metrics(metrics_of(changes, rows_N_C[:, 1:]))
        if self._trainer.model.training:
            self._warn(self.chain.without_effect(changes, rows_N_C[:, 1:], self._trainer.state.global_step))
        logged = self._trainer._logs["advantages"]
        for row_id, mean in zip(row_ids_N, rows_N_C[:, 0].tolist(), strict=True):
            if (row := row_id - self.row_count + len(logged)) >= 0:  # else it has left the table
                logged[row] = mean

    def _log_weights(self, weights_B_T: torch.Tensor, advantages_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> None:
        self.add_metrics(weight_metrics(self.facts.gather(row_table(weights_B_T, advantages_B_T, mask_B_T))))

    def _warn(self, sentences: Iterable[str]) -> None:
        for sentence in sentences if self._trainer.accelerator.is_main_process else ():
            warnings.warn(sentence, stacklevel=2)

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add values to TRL's metrics, which it averages when it logs."""
        kept = self._trainer._metrics["train" if self._trainer.model.training else "eval"]
        for name, value in metrics.items():
            kept[name].append(value)


def _without_masked_groups(loss: Any, inputs: Any) -> Any:
    """The loss as if the groups that `resample` has masked were no rows; as it is if there are none."""
    factor = inputs.get(BatchKeys.loss_factor)
    return loss if factor is None else loss * factor


def _one_source(name: str, in_python: Any, in_config: Any) -> Any:
    if in_python is not None and in_config is not None:
        raise ConfigurationError(
            f"{name} is given twice: {in_python!r} to the trainer and {in_config!r} in its config. Keep one of them."
        )
    return in_config if in_python is None else in_python
