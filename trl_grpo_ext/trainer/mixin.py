"""The adapter to TRL's trainer: every override of a TRL method, each in one place, none of them a copy.

They go to three stages: from prompts `rollouts` makes a generation batch with advantages and weights, `losses` the loss
of each micro-step of it, and `records` keeps what both did. All of it lives in `_trl_grpo_ext`, so no names collide.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trl import GRPOTrainer

from ..errors import ConfigurationError
from ..guard.calls import unique_names
from ..records.log import LiveLog
from .compact.updates import Freedom, freedom_of, updates_of
from .hook_states import AdvantageHookStates, BatchPlace, UnusedStates, has_state
from .logps import needs_reference
from .loss_stage import LossStage
from .own_loss import OwnLoss
from .record_stage import RecordStage
from .reductions import Inherited, reduction_of, terms_of
from .rollout_stage import RolloutStage
from .selected import SelectedPlugins, SelectedRewards
from .token_losses import TokenLosses, refuse_token_losses
from .upstream import acting, contract, reading

_Next: type = GRPOTrainer if TYPE_CHECKING else object
"""The class whose methods `super()` finds: TRL's trainer, or a user's in between."""


class Extension:
    """Everything of ours in one trainer. `attach` makes the stages."""

    rollouts: RolloutStage
    losses: LossStage
    records: RecordStage
    micro_batches: list[dict[str, Any]] | None  # of a generation batch; TRL's None before the first

    def __init__(self, trainer: Any, between: Sequence[type], args: Any, given: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._between = between
        self.plugins = SelectedPlugins(args, given)
        owners = [owner for owner in between if {"_compute_loss", "compute_loss"} & vars(owner).keys()]
        self._own_loss = OwnLoss(owners, self.plugins)

    def attach(self, rewards: SelectedRewards, policy_logps: Inherited, *, evaluates: bool) -> None:
        trl = self._trainer
        plugins = self.plugins
        owners = self._own_loss.owners
        plugins.reread(trl.args)
        contract.check_instance(trl)
        trl.reward_func_names = unique_names(trl.reward_func_names)
        rewards.set_weights(trl)
        facts = reading.RunFacts(trl)
        trl.add_callback(LiveLog())
        trl.add_callback(BatchPlace(trl))
        if any(map(has_state, plugins.hooks)):
            trl.add_callback(AdvantageHookStates.of(hooks=plugins.hooks))
        settings = reading.loss_settings_of(trl)
        reduction = reduction_of(plugins, facts, settings, knows_weights=not owners)
        refuse_token_losses(plugins.losses_by_name, trl, owners)
        token_losses = TokenLosses(plugins.losses_by_name, facts)
        order = type(trl).__mro__
        users = [owner for owner in order[: order.index(GRPOTrainer)] if owner is not GRPOExtMixin]
        own_batches = any("_prepare_inputs" in vars(owner) for owner in users)

        def freedom() -> Freedom:
            terms = terms_of(reading.loss_settings_of(trl), plugins.forward_hooks, token_losses.terms())
            return freedom_of(terms, reduction.divides_by, own_batches=own_batches)

        records = self.records = RecordStage(trl, facts, plugins, evaluates=evaluates)
        own_passes = self._overridden("_get_per_token_logps_and_entropies")
        updates = updates_of(trl, facts, plugins, freedom, policy_logps, records.add_metrics, own_passes=own_passes)
        own_scoring = self._overridden("_generate_and_score_completions")
        self.rollouts = RolloutStage(trl, facts, plugins, records, token_losses, reduction.divides_by, own_scoring)
        outside = self.rollouts.pass_outside_losses
        trl.add_callback(UnusedStates(trl))
        self.losses = LossStage(trl, facts, plugins, records, token_losses, outside, self._own_loss, reduction, updates)

    def _overridden(self, name: str) -> bool:
        return any(name in vars(owner) for owner in self._between)

    def begin(self, resume_from_checkpoint: str | bool | None) -> None:
        """A training begins: compare and write records, and start with the first prompts."""
        self.records.begin(resume_from_checkpoint)
        if self.rollouts.prompts is not None:
            self.rollouts.prompts.begin()


def _public(stage: str, name: str) -> Any:
    return property(lambda trainer: getattr(getattr(trainer._trl_grpo_ext, stage), name))


class GRPOExtMixin(_Next):
    """Plugins for any subclass of TRL's `GRPOTrainer`; put it first among the bases.

    Takes `GRPOTrainer`'s arguments and five more. `args` may be a `GRPOExtConfig` (or a plain `GRPOConfig`; then
    plugins can only be given here). What is not listed here is as in TRL.

    Args:
        reward_funcs: As in TRL. A list from `load_rewards` brings its weights, unless `args.reward_weights` is set.
            Rewards selected by `args.rewards` follow them.
        reward_processing_classes: As in TRL, for the `reward_funcs` given here.
        advantage_hooks: Selections or hook objects. They run in order of their roles; hooks of one role run in this
            order.
        loss_aggregation: A selection or an aggregation object.
        resample: As in `GRPOExtConfig`; its `filter` may be a filter object.
        prompt_sampler: A selection or a prompt sampler object.
        token_losses: Selections or token loss objects: further terms of the loss, or one in place of TRL's.

    Attributes:
        advantage_hooks: The hooks in use, in the order in which they act.
        loss_aggregation: The aggregation in use, or None.
        group_filter: The group filter in use, or None.
        token_losses: The token losses in use.
        prompt_sampler: The prompt sampler in use, or None.
        plugin_manifest: The plugins that this trainer was constructed with.

    Raises:
        UpstreamError: The installed TRL is not supported.
        ConfigurationError: A plugin is given twice, or cannot be exact with these settings.
        PluginError: A selected plugin does not load.
    """

    advantage_hooks = _public("plugins", "hooks")
    loss_aggregation = _public("plugins", "aggregation")
    group_filter = _public("plugins", "group_filter")
    prompt_sampler = _public("plugins", "prompt_sampler")
    token_losses = _public("plugins", "token_losses")
    plugin_manifest = _public("records", "manifest")
    _trl_grpo_ext: Extension

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Refuse an order of base classes in which no method of ours would run."""
        super().__init_subclass__(**keywords)
        order = cls.__mro__
        if GRPOTrainer in order and order.index(GRPOExtMixin) > order.index(GRPOTrainer):
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            what = f"class {cls.__name__}({bases}): GRPOExtMixin comes after TRL's trainer, and would do nothing"
            raise ConfigurationError(f"{what}. Put it first.")

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
        token_losses: Any = None,
        prompt_sampler: Any = None,
        **keywords: Any,
    ) -> None:
        contract.check_version()
        contract.check_class(GRPOTrainer)
        between = contract.classes_between(type(self), GRPOExtMixin)
        chosen = {"advantage_hooks": advantage_hooks, "loss_aggregation": loss_aggregation, "resample": resample}
        chosen |= {"token_losses": token_losses, "prompt_sampler": prompt_sampler}
        ours = self._trl_grpo_ext = Extension(self, between, args, chosen)
        if any(map(needs_reference, ours.plugins.needing_logps)):
            acting.keep_adapter_as_reference(model, args, keywords.get("peft_config"))
        rewards = SelectedRewards(reward_funcs, ours.plugins.settings.rewards, reward_processing_classes)
        given = {"model": model, "reward_funcs": rewards.functions, "args": args}
        sources = {
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "processing_class": processing_class,
            "reward_processing_classes": rewards.processing_classes,
        }
        if arguments:
            super().__init__(*given.values(), *sources.values(), *arguments, **keywords)
        else:  # by name, because a subclass may take fewer, or only keywords
            present = {name: source for name, source in sources.items() if source is not None}
            super().__init__(**given, **present, **keywords)
        ours.attach(rewards, super()._get_per_token_logps_and_entropies, evaluates=eval_dataset is not None)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Train as TRL does, after comparing the plugins with those of the checkpoint to resume from.

        Raises:
            ManifestError: They differ and `plugin_changes` is `stop`; the checkpoint's record of them cannot be read;
                or this run's cannot be written.
        """
        self._trl_grpo_ext.begin(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *arguments, **keywords)

    def evaluation_loop(
        self, dataloader: Any, *arguments: Any, metric_key_prefix: str = "eval", **keywords: Any
    ) -> Any:
        """Evaluate as transformers does, and add pass@k to the metrics if configured."""
        keywords["metric_key_prefix"] = metric_key_prefix
        evaluation = functools.partial(super().evaluation_loop, dataloader, *arguments, **keywords)
        return self._trl_grpo_ext.records.evaluate(evaluation, dataloader, metric_key_prefix)

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """Run TRL's step; at the end of an optimizer step log the seconds of its phases."""
        return self._trl_grpo_ext.losses.training_step(super().training_step, *arguments, **keywords)

    @property
    def _buffered_inputs(self) -> Any:
        return self._trl_grpo_ext.micro_batches

    @_buffered_inputs.setter
    def _buffered_inputs(self, micro_batches: list[dict[str, Any]] | None) -> None:
        ours = self._trl_grpo_ext
        if micro_batches is not None:
            micro_batches = ours.losses.arrange(micro_batches, ours.rollouts.totals)
        ours.micro_batches = micro_batches

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        ours = self._trl_grpo_ext
        inherited = super()._prepare_inputs, super().compute_loss
        return ours.losses.prepare_inputs(*inherited, generation_batch, ours.rollouts.totals)

    def _generate(self, prompts: Any) -> Any:
        return self._trl_grpo_ext.rollouts.generate(super()._generate, prompts)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        given = (inputs, prompts, completions, completion_ids_list)
        return self._trl_grpo_ext.rollouts.calculate_rewards(super()._calculate_rewards, *given)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return self._trl_grpo_ext.rollouts.generate_and_score(super()._generate_and_score_completions, inputs)

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Compute TRL's loss, and stop if the selected plugins were bypassed."""
        return self._trl_grpo_ext.losses.compute_loss(super().compute_loss, model, inputs, *arguments, **keywords)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return self._trl_grpo_ext.losses.policy_loss(super()._compute_loss, model, inputs)

    def _get_per_token_logps_and_entropies(self, model: Any, *arguments: Any, **keywords: Any) -> Any:
        inherited = super()._get_per_token_logps_and_entropies
        return self._trl_grpo_ext.losses.forward_pass(inherited, model, *arguments, **keywords)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Log as TRL does; in training, write the token records beside it."""
        self._trl_grpo_ext.records.before_log()
        super().log(logs, *arguments, **keywords)

    def _save(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        super()._save(output_dir, *arguments, **keywords)
        self._trl_grpo_ext.records.write_beside_weights(output_dir)

    def save_model(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        """Save as TRL does, with the manifest."""
        super().save_model(output_dir, *arguments, **keywords)
        if self.is_fsdp_enabled:  # which does not call `_save` for a sharded state
            self._trl_grpo_ext.records.write_beside_weights(output_dir)


class GRPOExtTrainer(GRPOExtMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with plugins; a drop-in: `from trl_grpo_ext import GRPOExtTrainer as GRPOTrainer`."""
