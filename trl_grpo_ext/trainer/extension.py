"""What the plugins of one trainer add to it: three stages, put together once TRL has constructed the trainer.

| stage | from | to |
| --- | --- | --- |
| `rollouts` | prompts | a generation batch, scored, with advantages and weights |
| `losses` | its micro-batches | the loss of each micro-step |
| `records` | both | metrics, token records, the manifest |

Each owns its state. They get the trainer; their collaborators get `RunFacts`, a `Progress`, or the function they need.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ..credit import flow
from ..credit.terms import Term
from ..errors import ConfigurationError
from ..guard.agreement import Agreement
from ..guard.calls import unique_names
from ..plugins.loading import load_prompt_sampler
from ..records.log import LiveLog
from .compact.packed import packing_of
from .compact.sampling import sharing_of
from .compact.updates import CompactUpdates, PlainUpdates, Updates, freedom_of
from .config import our_settings
from .facts import RunFacts
from .hook_states import AdvantageHookStates, has_state
from .live import use_console_summary
from .logps import LogpsForHooks, Models, needs_reference
from .loss_forward import Inherited, PassRouter
from .loss_stage import LossStage
from .own_loss import OwnLoss
from .prompts import DealtPrompts, DrawnPrompts, PromptsState
from .record_stage import RecordStage
from .reductions import Reduction, reduction_of, terms_of
from .resampling import Resampling, refuse_inexact
from .rollout_stage import RolloutStage
from .selected import SelectedPlugins, SelectedRewards
from .token_losses import TokenLosses, refuse_token_losses
from .upstream import acting, contract, reading, releases


class Extension:
    """Everything of ours in one trainer. `attach` makes the stages."""

    rollouts: RolloutStage
    losses: LossStage
    records: RecordStage

    def __init__(
        self,
        trainer: Any,
        between: Sequence[type],
        args: Any,
        given: Mapping[str, Any],
    ) -> None:
        self._trainer, self._between = trainer, between
        plugins = self.plugins = SelectedPlugins(args, given)
        self._own_loss = OwnLoss(
            between,
            hooks=plugins.change_advantages,
            forward_hooks=bool(plugins.forward_hooks),
            aggregation=None if plugins.aggregation is None else flow.plugin_label(plugins.aggregation),
            compact=plugins.compact,
        )

    def keep_reference(self, model: Any, args: Any, peft_config: Any) -> None:
        """Keep a copy of an adapter that is trained further, if a plugin needs the reference policy."""
        if any(map(needs_reference, self.plugins.needing_logps)):
            acting.keep_adapter_as_reference(model, args, peft_config)

    def attach(self, rewards: SelectedRewards, policy_logps: Inherited, *, evaluates: bool) -> None:
        """Make the stages for the trainer that TRL has constructed."""
        trl, plugins = self._trainer, self.plugins
        plugins.settings = our_settings(trl.args)  # a base class may have changed them, or made them
        contract.check_instance(trl)
        trl.reward_func_names = unique_names(trl.reward_func_names)
        rewards.set_weights(trl)
        facts = reading.facts_of(trl)
        agreement = Agreement(facts.rank, facts.ranks, facts.gather)
        self._add_callbacks()
        reduction = reduction_of(
            plugins.aggregation,
            facts,
            trl.loss_type,
            agreement.section,
            knows_weights=not self._own_loss.owners,
            has_token_losses=bool(plugins.token_losses),
        )
        refuse_token_losses(plugins.losses_by_name, trl, self._own_loss.owners)
        token_losses = TokenLosses(plugins.losses_by_name, facts, agreement.section)
        self.records = RecordStage(trl, facts, plugins, agreement, evaluates=evaluates)
        updates = self._make_updates(policy_logps, facts, reduction, token_losses.terms())
        self.rollouts = RolloutStage(
            trl,
            facts,
            plugins,
            agreement,
            self.records,
            hook_logps=LogpsForHooks(plugins.needing_logps, self._models(), facts.tokenizer),
            prompts=self._make_prompts(facts, agreement),
            resampling=self._make_resampling(facts, agreement, reduction),
            token_losses=token_losses,
            trls_advantages=not contract.has_own_scoring(self._between),
            sharing=sharing_of(trl) if plugins.settings.share_prompts else contextlib.nullcontext,
        )
        self.losses = LossStage(
            trl,
            facts,
            plugins,
            agreement,
            self.records,
            passes=PassRouter(default=self.rollouts.pass_outside_losses),
            own_loss=self._own_loss,
            reduction=reduction,
            token_losses=token_losses,
            updates=updates,
        )

    def _add_callbacks(self) -> None:
        trl, plugins = self._trainer, self.plugins
        trl.add_callback(LiveLog())
        if plugins.settings.summary_steps:
            use_console_summary(trl, plugins.settings.summary_steps)
        if any(map(has_state, plugins.hooks)):
            trl.add_callback(AdvantageHookStates.of(hooks=plugins.hooks))

    def _make_updates(
        self, policy_logps: Inherited, facts: RunFacts, reduction: Reduction, further: Sequence[Term]
    ) -> Updates:
        trl, plugins = self._trainer, self.plugins
        if not plugins.compact:
            return PlainUpdates()
        if trl.args.use_liger_kernel:
            raise ConfigurationError(
                "compact_updates: exact does not work with use_liger_kernel, whose loss counts the rows of each "
                "micro-batch. Turn one of them off."
            )
        loss = reading.loss_settings_of(trl)
        terms = terms_of(loss, plugins.forward_hooks, further)
        freedom = freedom_of(terms, reduction.divides_by, loss.loss_type)
        packing = packing_of(
            trl.model,
            loss,
            share=plugins.settings.share_prompts,
            compiled=trl.args.torch_compile,
            overridden=contract.has_own_passes(self._between),
        )
        return CompactUpdates(
            freedom,
            facts,
            loss_type=loss.loss_type if plugins.aggregation is None else None,
            packing=packing,
            policy=lambda: (policy_logps, trl.model),
            log=self.records.add_metrics,
        )

    def _make_resampling(self, facts: RunFacts, agreement: Agreement, reduction: Reduction) -> Resampling | None:
        trl, plugins = self._trainer, self.plugins
        if plugins.resample is None:
            return None
        refuse_inexact(plugins.group_filter, plugins.hooks, reading.batch_statistics_of(trl))
        counts_rows = reduction.divides_by == "rows"
        return Resampling(plugins.resample, plugins.group_filter, facts, agreement, counts_rows)

    def _make_prompts(self, facts: RunFacts, agreement: Agreement) -> DealtPrompts | DrawnPrompts:
        trl, plugins = self._trainer, self.plugins
        drawing = "resample" if plugins.resample is not None else "prompt_sampler"
        if plugins.resample is None and plugins.prompt_sampler is None:
            return DealtPrompts()
        reading.refuse_stream(trl.train_dataset, drawing)
        if (inside := reading.saves_inside_batches(trl)) is not None:
            raise ConfigurationError(
                f"{drawing}: {inside}: a checkpoint inside a generation batch could not be resumed from."
            )
        sampler = plugins.prompt_sampler or load_prompt_sampler("trl-grpo-ext:in_order")
        prompts = DrawnPrompts(trl, facts, sampler, agreement, drawing, self.records.add_metrics)
        trl.add_callback(PromptsState.of(prompts=prompts))
        return prompts

    def _models(self) -> Models:
        trl = self._trainer
        return Models(
            policy_pass=functools.partial(acting.policy_pass, trl),
            prompt_tokens=functools.partial(acting.prompt_tokens, trl),
            as_reference=reading.reference_of(trl),
            prepared=functools.partial(acting.prepare_like_policy, trl),
            in_tiles=releases.add_fused_lm_head is not None,
            autocast=trl.accelerator.autocast,
            samples_with_logps=trl.use_vllm or trl.rollout_func is not None,
            one_update=reading.one_update_of(trl),
            temperature=float(trl.temperature),
            trust_remote_code=bool(trl.args.trust_remote_code),
        )

    def begin(self, resume_from_checkpoint: str | bool | None) -> None:
        """A training begins: compare and write records, and start with the first prompts."""
        self.records.begin(resume_from_checkpoint)
        self.rollouts.prompts.begin()
