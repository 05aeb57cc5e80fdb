"""The adapter to TRL's trainer: every override of a TRL method, each in one place, none of them a copy.

| TRL calls | we add, in this order |
| --- | --- |
| `__init__` | plugins loaded; collaborators built; callbacks for log, summary and states of hooks |
| `evaluation_loop` | pass@k and mean@k |
| `train` | the checkpoint's plugins compared; the run's plugins and settings written |
| `training_step` | its time |
| `_prepare_inputs` | compact micro-batches; counts of every optimizer step; a subclass's own loss tried out |
| `_generate_and_score_completions` | rounds (`resample`); rollout hooks: advantages `(B, T)`; weights; records |
| `_generate` | who wrote which token; what was generated, for shapers |
| `_generate_single_turn` | a bar |
| `_calculate_rewards` | what rewards return checked, errors and limits on all ranks, spans; rates; bars; shapers |
| `compute_loss` | a micro-step of several parts; stop if the selected plugins were bypassed |
| `_compute_loss` | the self-check, once; the same loss with the selected aggregation; records |
| `_get_per_token_logps_and_entropies` | passes sorted, prompts shared; forward hooks; what the KL term needs |
| `log` | the token records written |
| `_save_rng_state` | what `resample` has drawn, into the checkpoint |
| `_load_optimizer_and_scheduler` | the same out of it |
| `_save`, `save_model` | the manifest beside the weights |
| `create_model_card` | a table of the plugins |

With no plugin selected every method returns what `super()` returned. Collaborators get `RunFacts`, a `Moment`, or the
one function that they need, never the trainer.
"""

from __future__ import annotations

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
from ..plugins.loading import (
    LoadedList,
    RewardList,
    load_advantage_hooks,
    load_rewards,
    resolve_group_filter,
    resolve_loss_aggregation,
)
from ..records.log import LiveLog
from ..records.manifest import Manifest
from ..records.prompt_rates import PromptRates, read_prompt_weights, shares_of, solved_groups
from ..records.settings import write_settings
from ..records.token_records import TokenRecorder
from ..types import Totals
from . import upstream
from .batch import BatchKeys, whole_rows
from .compact.shared import shared_prompts
from .compact.updates import CompactUpdates, freedom_of, loss_of_parts
from .contexts import ScoredBatch, loss_mask, make_forward, make_rollout, row_entries, step_totals
from .facts import LossSettings, Moment
from .hook_states import states_of
from .live.bars import bars_wanted, generation_bar, with_bar
from .live.summary import use_console_summary
from .logps import Models, Scorer, Scores
from .made_up import ForwardPass, LossOf
from .own_loss import LossNeeds, OwnLoss, constructor_arguments, reward_positions
from .pass_at_k import columns_of, pass_at_k_of
from .phase_times import PhaseClock
from .plugin_records import PluginRecords
from .reaggregation import LossForward, Reaggregation, trl_weights
from .resampling import Prompts, ResampleSettings, Resampling, SampledBatch, read_resample, refuse_inexact
from .self_check import SelfCheck
from .shaping import Shaping


class GRPOExtMixin:
    """Plugins for any subclass of TRL's `GRPOTrainer`; put it first among the bases.

    Takes `GRPOTrainer`'s arguments and three more. `args` may be a `GRPOExtConfig` (or a plain `GRPOConfig`; then
    plugins can only be given here).

    Args:
        model: As in TRL.
        reward_funcs: As in TRL. A list from `load_rewards` brings its weights, unless `args.reward_weights` is set.
            Rewards selected by `args.rewards` follow them.
        args: As in TRL.
        train_dataset: As in TRL.
        eval_dataset: As in TRL.
        processing_class: As in TRL.
        reward_processing_classes: As in TRL, for the `reward_funcs` given here.
        *arguments: As in TRL.
        advantage_hooks: Selections or hook objects. They run in order of their roles; hooks of one role run in this
            order.
        loss_aggregation: A selection or an aggregation object.
        resample: As in `GRPOExtConfig`; its `filter` may be a filter object.
        **keywords: As in TRL.

    Attributes:
        advantage_hooks: The hooks in use, in the order in which they act.
        loss_aggregation: The aggregation in use, or None.
        group_filter: The group filter in use, or None.
        plugin_manifest: The plugins that this trainer was constructed with.

    Raises:
        UpstreamError: The installed TRL is not supported.
        ConfigurationError: A plugin is given twice, or cannot be exact with these settings.
        PluginError: A selected plugin does not load.
    """

    accelerator: Any
    args: Any
    model: Any
    reward_weights: torch.Tensor
    state: Any
    _scored: ScoredBatch | None = None
    _tool_masks: Sequence[Sequence[int]] | None = None
    _shaping: Shaping | None = None
    _show_columns: Callable[[Sequence[str]], None] | None = None
    _places = 0
    _undealt_totals: Totals | None = None
    _loss_forward: LossForward | None = None
    _replaced_pass: ForwardPass | None = None
    _self_checked = False
    _loss_path_ran = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Refuse an order of base classes in which none of our methods would run."""
        super().__init_subclass__(**keywords)
        order = cls.__mro__
        if GRPOTrainer in order and order.index(GRPOExtMixin) > order.index(GRPOTrainer):
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise ConfigurationError(
                f"class {cls.__name__}({bases}): GRPOExtMixin comes after TRL's trainer, so none of its methods would "
                f"run. Put it first: class {cls.__name__}(GRPOExtMixin, ...)."
            )

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
        resample: Any = None,
        **keywords: Any,
    ) -> None:
        upstream.check_version()
        upstream.check_class(GRPOTrainer)
        self.advantage_hooks: list[Any] = load_advantage_hooks(
            _one_source("advantage_hooks", advantage_hooks, getattr(args, "advantage_hooks", None)) or []
        )
        aggregation = _one_source("loss_aggregation", loss_aggregation, getattr(args, "loss_aggregation", None))
        loaded_aggregation = None if aggregation is None else resolve_loss_aggregation(aggregation)
        self.loss_aggregation: Any = loaded_aggregation and loaded_aggregation.object
        asked = read_resample(_one_source("resample", resample, getattr(args, "resample", None)))
        loaded_filter = None if asked is None else resolve_group_filter(asked.filter)
        self.group_filter: Any = loaded_filter and loaded_filter.object
        self._chain = HookChain(self.advantage_hooks, self.loss_aggregation)
        self._changes_advantages = self._chain.acts("on_rollout") or self._chain.acts("on_forward")
        wanted = LossNeeds(
            hooks=self._changes_advantages,
            forward_hooks=self._chain.acts("on_forward"),
            aggregation=None if self.loss_aggregation is None else flow.plugin_label(self.loss_aggregation),
            compact=getattr(args, "compact_updates", "off") == "exact",
        )
        self._own_loss = OwnLoss(type(self), GRPOExtMixin, wanted)
        if self.loss_aggregation is not None:
            upstream.check_loss_type(getattr(args, "loss_type", None))
        if any("ref_logps" in getattr(hook, "needs", ()) for hook in self.advantage_hooks):
            upstream.keep_adapter_as_reference(model, args, keywords.get("peft_config"))
        given = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        selected = load_rewards(getattr(args, "rewards", None) or [])
        weights = [*(given.weights if isinstance(given, RewardList) else [1.0] * len(given)), *selected.weights]
        if selected and reward_processing_classes is not None:
            classes = reward_processing_classes
            classes = classes if isinstance(classes, list) else [classes]
            reward_processing_classes = [*classes, *([None] * len(selected))]
        chosen = [*given, *selected]  # as they are now: TRL adds an environment's reward to the list that it was given
        functions = LoadedList.join(given, selected) if selected else reward_funcs
        if (prompt_weights := read_prompt_weights(getattr(args, "prompt_weights", None))) is not None:
            train_dataset = upstream.weighted_prompts(train_dataset, prompt_weights, args)
        sources = (train_dataset, eval_dataset, processing_class, reward_processing_classes)
        positional, named = constructor_arguments((model, functions, args), sources, arguments, keywords)
        super().__init__(*positional, **named)

        trl: Any = self
        upstream.check_instance(trl)
        trl.reward_func_names = unique_names(trl.reward_func_names)
        if self.args.reward_weights is None:
            self.reward_weights[reward_positions(chosen, trl.reward_funcs, weights)] = torch.tensor(weights)
        trl.add_callback(LiveLog())
        if every := getattr(self.args, "summary_steps", 0):
            use_console_summary(trl, every)
        if (states := states_of(self.advantage_hooks)) is not None:
            trl.add_callback(states)
        self._facts = upstream.facts_of(trl)
        self._agreement = Agreement(self._facts.rank, self._facts.ranks, self._facts.gather, self.accelerator.device)
        self._phases = PhaseClock(self.accelerator.device)
        self._compact = self._make_compact_updates() if wanted.compact else None
        self._shaping = Shaping(self._facts, upstream.batch_shape_of(trl)) if self._chain.acts("on_rewards") else None
        self._trls_advantages = not upstream.makes_own_advantages(type(self), GRPOExtMixin)
        needing = [*self.advantage_hooks, *([] if self.group_filter is None else [self.group_filter])]
        self._scorer = Scorer(needing, self._models(), self._facts.tokenizer)
        self._resampling = None if asked is None else self._make_resampling(asked)
        self._recorder = TokenRecorder(n, self.args.seed) if (n := getattr(self.args, "token_records", 0)) else None
        self._pass_at_k = pass_at_k_of(
            getattr(self.args, "pass_at_k", None),
            getattr(self.args, "mean_at_k", False),
            getattr(self.args, "pass_thresholds", None),
            self._facts.reward_names,
            self._facts.group_size(training=False),
            evaluates=eval_dataset is not None,
        )
        self._prompt_rates: PromptRates | None = None
        if getattr(self.args, "prompt_rates", False):
            columns = columns_of(self.args.pass_thresholds, self._facts.reward_names)
            self._prompt_rates = PromptRates(columns, self._facts.group_size(training=True))
            trl.add_callback(self._prompt_rates)
        self._reaggregation: Reaggregation | None = None
        if self.loss_aggregation is not None:
            section = self._agreement.section
            self._reaggregation = Reaggregation(self.loss_aggregation, self._facts, trl.loss_type, section)
        self.plugin_manifest = Manifest.of(self, loaded_aggregation, loaded_filter)
        main_process = self.accelerator.is_main_process
        self._plugin_records = PluginRecords(self.plugin_manifest, self.args, main_process, self._agreement)

    def _make_compact_updates(self) -> CompactUpdates:
        if self.args.use_liger_kernel:
            raise ConfigurationError(
                "compact_updates: exact does not work with use_liger_kernel, whose loss counts the rows of each "
                "micro-batch. Turn one of them off."
            )
        settings = upstream.loss_settings_of(self)
        freedom = freedom_of(settings, self.loss_aggregation, self.advantage_hooks, self.model.config)
        sharing = None
        if self.args.share_prompts:
            sharing = shared_prompts(
                self.model,
                settings,
                relative=freedom.trim_left,
                compiled=self.args.torch_compile,
                ranks=self._facts.ranks,
                gather=self._facts.gather,
                budget=self.args.max_tokens_per_micro_batch,
            )
        scores = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        return CompactUpdates(
            freedom,
            self._facts,
            loss_type=settings.loss_type if self.loss_aggregation is None else None,
            max_tokens=self.args.max_tokens_per_micro_batch,
            balance=self.args.balance_ranks,
            keeps_records=bool(self.args.token_records),
            sharing=sharing,
            policy=lambda: (scores, self.model),
            log=self._log_metrics,
        )

    def _make_resampling(self, settings: ResampleSettings) -> Resampling:
        trl: Any = self
        upstream.refuse_stream(trl.train_dataset)
        statistics, saves_inside = upstream.batch_statistics_of(trl), upstream.saves_inside_batches(trl)
        refuse_inexact(self.group_filter, self.advantage_hooks, statistics, saves_inside)
        return Resampling(
            settings,
            self.group_filter,
            self._facts,
            upstream.batch_shape_of(trl),
            Prompts(trl, self._facts),
            self._agreement,
            loss_counts_rows=self.loss_aggregation is None and trl.loss_type in upstream.ROW_MEAN,
        )

    def _models(self) -> Models:
        """What the scorer needs of the models of this run."""
        trl: Any = self

        def policy_pass(
            batch: dict[str, Any], rows_at_once: int, entropies: bool
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            """Use TRL's own method, so that the numbers are TRL's."""
            images = {key: batch[key] for key in upstream.MULTIMODAL_KEYS if batch.get(key) is not None}
            length = batch["completion_ids"].size(1)
            with torch.no_grad():
                scored = self._get_per_token_logps_and_entropies(
                    self.model,
                    *whole_rows(batch),
                    length,
                    batch_size=rows_at_once,
                    compute_entropy=entropies,
                    **images,
                )
            return scored[0].detach(), scored[1].detach() if entropies else None

        return Models(
            policy_pass=policy_pass,
            as_reference=upstream.reference_of(self),
            prepared=functools.partial(upstream.prepare_like_policy, self),
            in_tiles=upstream.add_fused_lm_head is not None,
            autocast=self.accelerator.autocast,
            samples_with_logps=trl.use_vllm or trl.rollout_func is not None,
            one_update=upstream.one_update_of(trl),
            name=trl.model.config._name_or_path,
            temperature=float(trl.temperature),
            trust_remote_code=bool(getattr(self.args, "trust_remote_code", False)),
        )

    @property
    def _needs_rollout(self) -> bool:
        selected = (self._reaggregation, self._recorder, self._resampling)
        return bool(self.advantage_hooks) or any(one is not None for one in selected)

    @property
    def _has_plugins(self) -> bool:
        return bool(self._needs_rollout or self._compact or getattr(self.args, "rewards", None))

    @property
    def _acts_at_forward(self) -> bool:
        return self._reaggregation is not None or self._chain.acts("on_forward")

    # ------------------------------------------------------------------ once per run

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Train as TRL does, after comparing the plugins with those of the checkpoint to resume from.

        Args:
            resume_from_checkpoint: As in TRL.
            *arguments: As in TRL.
            **keywords: As in TRL.

        Raises:
            ManifestError: They differ and `plugin_changes` is `stop`; the checkpoint's record of them cannot be read;
                or this run's cannot be written.
        """
        self._plugin_records.begin(resume_from_checkpoint, functools.partial(write_settings, self))
        if self._resampling is not None:
            self._resampling.prompts.start_at(0)
        return super().train(resume_from_checkpoint, *arguments, **keywords)  # type: ignore[misc]

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as transformers does, and add pass@k and mean@k to the metrics if configured.

        Args:
            dataloader: As in transformers.
            description: As in transformers.
            prediction_loss_only: As in transformers.
            ignore_keys: As in transformers.
            metric_key_prefix: As in transformers.
        """
        below: Callable[..., Any] = super().evaluation_loop  # type: ignore[misc]
        arguments = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self._pass_at_k is None:
            return below(*arguments)
        with self._pass_at_k.evaluating():
            output = below(*arguments)
            metrics = self._pass_at_k.metrics(upstream.rows_of(dataloader, self._facts.ranks))
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """Run TRL's step; at the end of an optimizer step log the seconds of its phases."""
        if not self._has_plugins:
            return super().training_step(*arguments, **keywords)  # type: ignore[misc]
        with self._phases.during("update"):
            output = super().training_step(*arguments, **keywords)  # type: ignore[misc]
        trl: Any = self
        if trl._step % trl.current_gradient_accumulation_steps == 0:  # as TRL's own `step_time`
            self._log_metrics(self._phases.take())
        return output

    # ------------------------------------------------------------------ once per generation batch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        trl: Any = self
        with self._phases.during("generation"):
            inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
            moment = upstream.moment_of(self)
            if self._compact is not None and moment.training:
                trl._buffered_inputs = self._compact.plan(trl._buffered_inputs, moment.precision)
                inputs = trl._buffered_inputs[trl._step % len(trl._buffered_inputs)]
            totals, self._undealt_totals = self._undealt_totals, None
            if totals is not None:
                self._deal_totals(totals, trl._buffered_inputs if moment.training else [inputs], moment)
            if self._own_loss.untried:
                trls_loss = functools.partial(GRPOTrainer._compute_loss, self)
                with upstream.restore_after_trial(self):
                    own = self._loss_with_pass(super().compute_loss)  # type: ignore[misc]
                    self._own_loss.try_out(inputs, own, self._loss_with_pass(trls_loss))
            if not self._own_loss.per_token:
                with self._agreement.section():
                    mask_B_T = loss_mask(inputs, moment.precision)
                    inputs["advantages"] = self._own_loss.advantages(inputs["advantages"], mask_B_T)
        return inputs

    def _deal_totals(self, totals: Totals, micro_batches: Sequence[dict[str, Any]], moment: Moment) -> None:
        """Give every micro-batch the counts of its generation batch and, for `reduce`, of its optimizer step."""
        assert self._reaggregation is not None
        steps: Sequence[Any] = [None] * len(micro_batches)
        if not self._reaggregation.by_weights:
            steps = step_totals(self._facts, moment, micro_batches)
        for micro_batch, step in zip(micro_batches, steps, strict=True):
            micro_batch[BatchKeys.totals] = replace(totals, step=step)

    def _generate(self, prompts: Any) -> Any:
        generated = super()._generate(prompts)  # type: ignore[misc]
        self._tool_masks = generated[2] if len(generated) > 2 else None
        if self._shaping is not None:
            self._shaping.record_generated(generated)
        return generated

    def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **keywords: Any) -> Any:
        generate: Callable[..., Any] = super()._generate_single_turn  # type: ignore[misc]
        trl: Any = self
        if not bars_wanted(self.args, self.accelerator.is_main_process):
            return generate(prompt_ids, *arguments, **keywords)
        elsewhere = trl.use_vllm or trl.use_transformers_continuous_batching
        layer = None if elsewhere else self.accelerator.unwrap_model(self.model).get_output_embeddings()
        with generation_bar(len(prompt_ids), self._facts.max_completion_length, self._latest("reward"), layer):
            return generate(prompt_ids, *arguments, **keywords)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        watch, failure = RewardWatch(reward_limit(self.args, self._facts.ranks)), None
        shape = len(prompts), len(self._facts.reward_names)  # now: a reward may empty what it is given
        if self._show_columns is not None:
            self._show_columns(())
        try:
            with self._phases.during("rewards"), self._watch_rewards(watch, shape[0]), watch.time_limit():
                rewards_N_K = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)  # type: ignore[misc]
        except BaseException as error:  # also SystemExit and Ctrl-C: the others wait in the one gather of this method
            failure = error
            self._agreement.stand_in(error, gather, torch.full(shape, torch.nan, device=self._facts.device))
        with self._agreement.section():
            if failure is not None:
                raise failure
            watch.check_finite(rewards_N_K, self._facts.reward_names)
        if self._pass_at_k is not None:
            self._pass_at_k.add(rewards_N_K)
        if self._prompt_rates is not None and self.model.training:
            self._write_rates(self._prompt_rates, [row.get("prompt") for row in inputs], rewards_N_K)
        self._log_metrics(watch.counts(rewards_N_K, self._facts.reward_names, self._facts.gather))
        if self._needs_rollout or self._compact is not None:
            seen = (inputs, prompts, completions, completion_ids_list, rewards_N_K)
            self._scored = ScoredBatch(*seen, **watch.extras, tool_masks=self._tool_masks)
        return rewards_N_K if self._shaping is None else self._shape_rewards(self._shaping)

    def _write_rates(self, rates: PromptRates, prompts: Sequence[Any], rewards_N_K: torch.Tensor) -> None:
        groups = solved_groups(rewards_N_K, rates.thresholds, rates.group_size)
        prompts_N = gather_object(list(prompts))
        if self.accelerator.is_main_process:
            rates.write(self.state.global_step, prompts_N[:: rates.group_size], groups)
        self._log_metrics(shares_of(groups))

    def _shape_rewards(self, shaping: Shaping) -> torch.Tensor:
        """The rewards of all ranks, with a column for what each shaper adds."""
        trl: Any = self
        assert self._scored is not None  # shapers are hooks, so the rollout is needed
        batch, moment = shaping.batch(has_reference=trl.beta != 0.0), upstream.moment_of(self)
        shaping.refuse_images(self._scored.rows, self._scorer.missing(batch))
        scores = self._scorer.scores(batch, self._facts.rows_at_once(moment.training))
        scored = self._scored = self._scored.agreed(self._facts)
        with self._agreement.section():
            weights_K, collective = self.reward_weights, self._agreement.gather
            raw = make_rollout(self._facts, moment, batch, scored, scores, weights_K, collective)
            shaping.rollout = rollout = self._chain.on_rewards(raw)
        added_N_S = self._facts.gather(rollout.rewards_B_K[:, len(raw.reward_names) :])
        rewards_N_K = torch.cat([scored.rewards_N_K, added_N_S], dim=1)
        scored.rewards_N_K = rewards_N_K
        assert self._show_columns is not None
        self._show_columns(rollout.reward_names[len(raw.reward_names) :])
        raw_N = self._facts.gather(rollout.raw_rewards_B)
        known_N = raw_N[~torch.isnan(raw_N)]
        self._log_metrics({"raw_reward": float(known_N.mean()), "raw_reward_std": float(known_N.std())})
        return rewards_N_K

    @contextmanager
    def _watch_rewards(self, watch: RewardWatch, rows: int) -> Iterator[None]:
        """Inside, TRL's reward functions are watched and, on a terminal, show progress bars."""
        trl: Any = self
        functions, names = trl.reward_funcs, self._facts.reward_names
        watched = [watch.wrap(*pair) for pair in zip(functions, names, strict=True)]
        if bars_wanted(self.args, self.accelerator.is_main_process):
            watched = [
                with_bar(function, name, rows, self._latest(f"rewards/{name}/mean"))
                for function, name in zip(watched, names, strict=True)
            ]
        trl.reward_funcs = watched
        try:
            yield
        finally:
            trl.reward_funcs = functions

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        below: Callable[[Any], dict[str, Any]] = super()._generate_and_score_completions  # type: ignore[misc]
        if not self._needs_rollout:
            batch, scored = self._scored_batch(below, inputs)
            if self._compact is not None and scored is not None:
                self._zero_rounding(batch, scored)
            return batch
        moment = upstream.moment_of(self)
        if self._resampling is None or not moment.training:
            return self._finish_batch(self._sample(below, inputs, moment), moment)
        refill, weights_K = self._resampling, self.reward_weights

        def one_round(rows: list[Any]) -> SampledBatch:
            sampled = self._sample(below, rows, moment)
            return self._apply_rollout_hooks(sampled) if refill.reads_advantages else sampled

        filled, metrics = refill.fill(one_round, moment, weights_K)
        self._log_metrics(metrics)
        return self._finish_batch(filled, moment)

    def _scored_batch(
        self, below: Callable[[Any], dict[str, Any]], inputs: Any
    ) -> tuple[dict[str, Any], ScoredBatch | None]:
        """TRL's batch, and what `_calculate_rewards` saw of it."""
        batch = below(inputs) if self._shaping is None else self._with_shaper_columns(below, inputs, self._shaping)
        scored, self._scored = self._scored, None
        return batch, scored

    def _sample(self, below: Callable[[Any], dict[str, Any]], inputs: Any, moment: Moment) -> SampledBatch:
        """Let TRL sample and score a batch, and make its rollout."""
        batch, scored = self._scored_batch(below, inputs)
        upstream.check_batch(batch)
        scores = Scores()
        if self._shaping is None:
            scores = self._scorer.scores(batch, self._facts.rows_at_once(moment.training))
            scored = scored and scored.agreed(self._facts)
        with self._agreement.section():
            if self._shaping is None:
                weights_K, collective = self.reward_weights, self._agreement.gather
                rollout = make_rollout(self._facts, moment, batch, scored, scores, weights_K, collective)
            else:
                rollout = self._shaping.check(batch)
            assert scored is not None  # otherwise there would be no rollout
            selected = (self._reaggregation, self._compact, self._resampling)
            if self._changes_advantages or any(one is not None for one in selected):
                self._zero_rounding(batch, scored)
        numbers_N = torch.arange(rollout.totals.sequences, device=rollout.mask_B_T.device)
        places_B = self._places + numbers_N[rollout.local_rows]
        self._places += rollout.totals.sequences
        return SampledBatch(batch, scored, scores, rollout, places_B)

    def _apply_rollout_hooks(self, sampled: SampledBatch) -> SampledBatch:
        """Apply the rollout hooks to the advantages."""
        with self._agreement.section():
            advantages_B_T, changes = self._chain.on_rollout(sampled.batch["advantages"], sampled.rollout)
            held_signs_B_T = self._chain.held_signs(sampled.rollout)
            uninformative_B = self._chain.uninformative(sampled.rollout)
        rollout = replace(sampled.rollout, advantages_B_T=advantages_B_T, uninformative_B=uninformative_B)
        return replace(sampled, rollout=rollout, changes=changes, held_signs_B_T=held_signs_B_T)

    def _finish_batch(self, sampled: SampledBatch, moment: Moment) -> dict[str, Any]:
        """Finish the batch to train on: hooks, the aggregation's weights, entries of rows, records, metrics."""
        sampled = self._apply_rollout_hooks(sampled) if sampled.changes is None else sampled
        batch, rollout, changes, scored = sampled.batch, sampled.rollout, sampled.changes or [], sampled.scored
        advantages_B_T = rollout.advantages_B_T
        assert advantages_B_T is not None
        if self._reaggregation is not None and self._reaggregation.by_weights:
            with self._agreement.section():
                batch[BatchKeys.weights] = flow.token_weights(self._reaggregation.aggregation, rollout)
        signal_N_C = self._facts.gather(signal_table(rollout))
        self._warn(self._chain.overruled(signal_N_C))
        batch.update(row_entries(rollout, zero_variance_of(signal_N_C), sampled.held_signs_B_T, sampled.places_B))
        if self._recorder is not None and moment.training:
            at_first_B_T = flow.expand_advantages(batch["advantages"], rollout.mask_B_T)
            stages = [("trl", at_first_B_T), *((change.name, change.after_B_T) for change in changes)]
            self._recorder.start(rollout, batch[BatchKeys.place], stages, scored.outcomes)
        if changes:
            batch["advantages"] = advantages_B_T
            self._log_changes(changes, batch[BatchKeys.place], rollout.mask_B_T)
        if self._reaggregation is not None:
            self._check_one_batch()
            self._undealt_totals = rollout.totals
            self._log_metrics({"groups/zero_variance": share_without_signal(signal_N_C)})
            if self._reaggregation.by_weights:
                self._log_weights(batch[BatchKeys.weights], advantages_B_T, rollout.mask_B_T)
        return batch

    def _with_shaper_columns(
        self, below: Callable[[Any], dict[str, Any]], inputs: Any, shaping: Shaping
    ) -> dict[str, Any]:
        """Make TRL's batch from rewards with a column for each shaper."""
        try:
            with upstream.reward_columns(self) as self._show_columns, shaping.capture():
                return below(inputs)
        finally:
            self._show_columns = None

    def _zero_rounding(self, batch: dict[str, Any], scored: ScoredBatch) -> None:
        """Set TRL's own advantages to exactly 0 if a group's rewards are equal, where rounding may leave a rest."""
        if not self._trls_advantages:
            return
        trl: Any = self
        moment, rewards_N_K = upstream.moment_of(self), scored.rewards_N_K
        more = rewards_N_K.size(1) - len(self.reward_weights)
        weights_K = torch.cat([self.reward_weights, self.reward_weights.new_ones(more)]).to(rewards_N_K.device)
        groups_N = torch.arange(len(rewards_N_K), device=rewards_N_K.device) // self._facts.group_size(moment.training)
        equal_N = rewards_are_equal(rewards_N_K, weights_K, groups_N, trl.multi_objective_aggregation)
        rows, advantages_B = len(scored.prompts), batch["advantages"]
        equal_B = equal_N[self._facts.rank * rows : (self._facts.rank + 1) * rows]
        batch["advantages"] = torch.where(equal_B, torch.zeros_like(advantages_B), advantages_B)

    def _check_one_batch(self) -> None:
        """Refuse a second generation batch before the first one's weights are dealt."""
        if self._undealt_totals is not None:
            raise ConfigurationError(
                f"_generate_and_score_completions of {type(self).__qualname__} makes one batch out of several, but "
                f"the loss aggregation has weighted each by itself. Let it call super() once, or put GRPOExtMixin in "
                f"front "
                "of it."
            )

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self._resampling is not None and self.args.should_save:
            self._resampling.save(output_dir, upstream.between_batches(self))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if self._resampling is not None and checkpoint is not None:
            self._resampling.load(checkpoint, upstream.batches_done(self, checkpoint))

    # ------------------------------------------------------------------ at every loss forward

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Compute TRL's loss, part by part, and stop if the selected plugins were bypassed."""
        below: Callable[..., Any] = super().compute_loss  # type: ignore[misc]
        self._loss_path_ran = False
        idle = isinstance(inputs, dict) and inputs.get(BatchKeys.idle, False)
        with upstream.restore_after_trial(self) if idle else nullcontext():  # placeholders alone log nothing
            loss = loss_of_parts(
                lambda batch: below(model, batch, *arguments, **keywords), model, inputs, self.accelerator
            )
        needed = self._acts_at_forward or (self._changes_advantages and not self._own_loss.owners)  # those were tried
        if needed and not self._loss_path_ran:
            raise UpstreamError(
                f"compute_loss of {type(self).__qualname__} (or code that patches TRL, such as Unsloth) bypasses "
                f"TRL's _compute_loss, so the selected loss aggregation and advantage hooks would be ignored. "
                "Put GRPOExtMixin in front of that override, or remove it, or the plugins."
            )
        return loss

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        below: Callable[..., torch.Tensor] = super()._compute_loss  # type: ignore[misc]
        if self._replaced_pass is not None or not (self._acts_at_forward or self._recorder is not None):
            self._loss_path_ran = True
            return _without_masked_groups(below(model, inputs), inputs)
        moment, settings = upstream.moment_of(self), upstream.loss_settings_of(self)
        mask_B_T, keep_graph = loss_mask(inputs, moment.precision), torch.is_grad_enabled()
        if moment.training and self._acts_at_forward and self._own_loss.per_token and not self._self_checked:
            slope = upstream.slope_at_ratio_one(self)
            with self._agreement.section(), upstream.restore_after_trial(self):
                check = SelfCheck(self._loss_with_pass(below), self._facts, settings, moment, slope)
                check.run(inputs, mask_B_T, self._reaggregation)
            self._self_checked = True
        forward = LossForward(dict(inputs), mask_B_T, keep_graph)
        if self._reaggregation is None:
            loss = self._run_loss(below, model, forward)
        else:
            with torch.enable_grad():  # in evaluation too: the split needs the graph from the advantages to the loss
                trl_loss = self._run_loss(below, model, forward)
                loss = self._reaggregation.loss(trl_loss, forward, settings, moment)
            if not self._reaggregation.by_weights and forward.weights_B_T is not None:
                self._log_weights(forward.weights_B_T, forward.inputs["advantages"], mask_B_T)
        if self._recorder is not None and moment.training:
            self._record(forward, settings, moment)
        return _without_masked_groups(loss if keep_graph else loss.detach(), inputs)

    def _run_loss(self, below: Callable[..., torch.Tensor], model: Any, forward: LossForward) -> torch.Tensor:
        """TRL's loss on `forward.inputs`; the policy's forward pass inside it fills in the rest of `forward`."""
        self._loss_forward = forward
        try:
            return below(model, forward.inputs)
        finally:
            self._loss_forward = None

    def _loss_with_pass(self, loss: Callable[..., torch.Tensor]) -> LossOf:
        """A loss that takes a replacement for the policy's forward pass."""

        def of(batch: dict[str, Any], forward_pass: ForwardPass) -> torch.Tensor:
            self._replaced_pass = forward_pass
            try:
                return loss(self.model, batch)
            finally:
                self._replaced_pass = None

        return of

    def _get_per_token_logps_and_entropies(self, model: Any, *arguments: Any, **keywords: Any) -> Any:
        if self._replaced_pass is not None:
            return self._replaced_pass()
        policy_pass = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if self._compact is not None:
            policy_pass = functools.partial(self._compact.logps, policy_pass)
        forward = self._loss_forward
        if forward is None:  # the old policy's or the reference's pass, at generation
            result = policy_pass(model, *arguments, **keywords)
            if self._shaping is not None:
                self._shaping.record_logps(result[0])
            return result
        acts = self._chain.acts("on_forward")
        if acts and len(arguments) <= upstream.ENTROPY_ARGUMENT:
            keywords.setdefault("compute_entropy", True)  # which a subclass's loss may not have asked for
        with torch.set_grad_enabled(forward.keep_graph):
            result = policy_pass(model, *arguments, **keywords)
        self._loss_path_ran = True
        forward.logps_B_T, forward.entropies_B_T = result[:2]
        # TRL reads the advantages from this dict after this call, so they can still change here.
        if acts:
            self._apply_forward_hooks(forward, *result[:2])
        if self._reaggregation is not None:
            # In the precision of the log-probabilities, because the slope in the advantages has theirs.
            precision = torch.promote_types(torch.float32, result[0].dtype)
            advantages_B_T = flow.expand_advantages(forward.inputs["advantages"], forward.mask_B_T)
            forward.inputs["advantages"] = advantages_B_T.detach().to(precision, copy=True).requires_grad_()
        return result

    def _apply_forward_hooks(self, forward: LossForward, logps_B_T: torch.Tensor, entropies_B_T: torch.Tensor) -> None:
        inputs = forward.inputs
        with self._agreement.section():
            context = make_forward(upstream.moment_of(self), inputs, logps_B_T, entropies_B_T, self._agreement.gather)
            held_signs_B_T = inputs.get(BatchKeys.held_signs)
            changed, forward.changes = self._chain.on_forward(inputs["advantages"], context, held_signs_B_T)
            inputs["advantages"] = self._own_loss.advantages(changed, forward.mask_B_T)
        self._log_changes(forward.changes, inputs[BatchKeys.place], forward.mask_B_T)

    # ------------------------------------------------------------------ what is logged and written

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Log as TRL does; in training, write the token records beside it."""
        if self._recorder is not None and self.model.training:
            records = gather_object(self._recorder.records())
            if self.accelerator.is_main_process:
                self._recorder.write(records, self.args.output_dir, self.state.global_step)
        if self._has_plugins:
            upstream.drop_undefined_metrics(self)
        super().log(logs, *arguments, **keywords)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        super()._save(output_dir, *arguments, **keywords)  # type: ignore[misc]
        self._plugin_records.write_beside_weights(output_dir)

    def save_model(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        """Save as TRL does, with the manifest."""
        super().save_model(output_dir, *arguments, **keywords)  # type: ignore[misc]
        trl: Any = self
        if trl.is_fsdp_enabled:  # which does not call `_save` for a sharded state
            self._plugin_records.write_beside_weights(output_dir)

    def create_model_card(self, model_name: str | None = None, *arguments: Any, **keywords: Any) -> None:
        """Write the model card as TRL does, with a section on the plugins."""
        super().create_model_card(model_name, *arguments, **keywords)  # type: ignore[misc]
        self._plugin_records.add_to_model_card()

    def _record(self, forward: LossForward, settings: LossSettings, moment: Moment) -> None:
        """Record what this loss forward used."""
        places_B, inputs = forward.inputs[BatchKeys.place], forward.inputs
        if self._recorder is None or not self._recorder.wants(places_B):
            return
        used = {"advantage": flow.expand_advantages(inputs["advantages"], forward.mask_B_T)}
        if self._reaggregation is None and not self._own_loss.owners and settings.loss_type in upstream.LOSS_TYPES:
            forward.weights_B_T = trl_weights(forward, settings, self._facts, moment) / self._facts.ranks
        if (factor_B := inputs.get(BatchKeys.factor)) is not None and forward.weights_B_T is not None:
            used["advantage"] = used["advantage"] / factor_B.unsqueeze(1)  # undo the factor of its part
            forward.weights_B_T = forward.weights_B_T * factor_B.unsqueeze(1)
        if forward.weights_B_T is not None:
            forward.weights_B_T = _without_masked_groups(forward.weights_B_T, inputs)
        seen = {"weight": forward.weights_B_T, "logp": forward.logps_B_T, "entropy": forward.entropies_B_T}
        used |= {name: values_B_T.detach() for name, values_B_T in seen.items() if values_B_T is not None}
        stages = [(change.name, change.after_B_T) for change in forward.changes]
        self._recorder.add_trained(places_B, stages, used)

    def _log_changes(self, changes: Sequence[Change], places_B: torch.Tensor, mask_B_T: torch.Tensor) -> None:
        """Log what each hook did, and put the advantages that the loss gets into TRL's table of completions.

        The table has one number per completion: the mean over its live tokens.
        """
        means_B = changes[-1].after_B_T.sum(1) / mask_B_T.sum(1).clamp(min=1.0)
        places_N = self._facts.gather(places_B).tolist()
        rows_B_C = torch.cat([means_B.float().unsqueeze(1), change_tables(changes, mask_B_T)], dim=1)
        rows_N_C = self._facts.gather(rows_B_C)
        self._log_metrics(metrics_of(changes, rows_N_C[:, 1:]))
        if self.model.training:
            self._warn(self._chain.without_effect(changes, rows_N_C[:, 1:], self.state.global_step))
        trl: Any = self
        logged = trl._logs["advantages"]
        for place, mean in zip(places_N, rows_N_C[:, 0].tolist(), strict=True):
            if (row := place - self._places + len(logged)) >= 0:  # else it has left the table
                logged[row] = mean

    def _log_weights(self, weights_B_T: torch.Tensor, advantages_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> None:
        rows_N_C = self._facts.gather(row_table(weights_B_T, advantages_B_T, mask_B_T))
        self._log_metrics(weight_metrics(rows_N_C))

    def _warn(self, sentences: Iterable[str]) -> None:
        for sentence in sentences if self.accelerator.is_main_process else ():
            warnings.warn(sentence, stacklevel=2)

    def _log_metrics(self, metrics: Mapping[str, float]) -> None:
        trl: Any = self
        kept = trl._metrics["train" if self.model.training else "eval"]
        for name, value in metrics.items():
            kept[name].append(value)

    def _latest(self, metric: str) -> float | None:
        """The newest value of a metric in training."""
        trl: Any = self
        if kept := trl._metrics["train"].get(metric):
            return float(kept[-1])
        return next((log[metric] for log in reversed(self.state.log_history) if metric in log), None)


class GRPOExtTrainer(GRPOExtMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with plugins; a drop-in: `from trl_grpo_ext import GRPOExtTrainer as GRPOTrainer`."""


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
