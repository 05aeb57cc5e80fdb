"""What the plugins of one trainer add to it: three stages, put together once TRL has constructed the trainer.

From prompts `rollouts` makes a generation batch, scored, with advantages and weights; `losses` makes the loss of each
micro-step of it; `records` keeps what both did. Each owns its state.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..guard.calls import unique_names
from ..records.log import LiveLog
from .compact.updates import freedom_of, updates_of
from .config import our_settings
from .hook_states import AdvantageHookStates, has_state
from .loss_forward import Inherited
from .loss_stage import LossStage
from .own_loss import OwnLoss
from .record_stage import RecordStage
from .reductions import reduction_of, terms_of
from .rollout_stage import RolloutStage
from .selected import SelectedPlugins, SelectedRewards
from .token_losses import TokenLosses, refuse_token_losses
from .upstream import contract, reading


class Extension:
    """Everything of ours in one trainer. `attach` makes the stages."""

    rollouts: RolloutStage
    losses: LossStage
    records: RecordStage

    def __init__(self, trainer: Any, between: Sequence[type], args: Any, given: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._between = between
        self.plugins = SelectedPlugins(args, given)
        self._own_loss = OwnLoss(between, self.plugins)

    def attach(self, rewards: SelectedRewards, policy_logps: Inherited, *, evaluates: bool) -> None:
        trl, plugins, between, owners = self._trainer, self.plugins, self._between, self._own_loss.owners
        plugins.settings = our_settings(trl.args)  # a base class may have changed them, or made them
        contract.check_instance(trl)
        trl.reward_func_names = unique_names(trl.reward_func_names)
        rewards.set_weights(trl)
        facts = reading.facts_of(trl)
        trl.add_callback(LiveLog())
        if any(map(has_state, plugins.hooks)):
            trl.add_callback(AdvantageHookStates.of(hooks=plugins.hooks))
        reduction = reduction_of(plugins, facts, trl.loss_type, knows_weights=not owners)
        refuse_token_losses(plugins.losses_by_name, trl, owners)
        token_losses = TokenLosses(plugins.losses_by_name, facts)
        terms = terms_of(reading.loss_settings_of(trl), plugins.forward_hooks, token_losses.terms())
        freedom = freedom_of(terms, reduction.divides_by, trl.loss_type)
        records = self.records = RecordStage(trl, facts, plugins, evaluates=evaluates)
        own_passes = contract.has_own_passes(between)
        updates = updates_of(trl, facts, plugins, freedom, policy_logps, records.add_metrics, own_passes=own_passes)
        own_scoring = contract.has_own_scoring(between)
        self.rollouts = RolloutStage(
            trl, facts, plugins, records, token_losses, reduction.divides_by, own_scoring=own_scoring
        )
        outside = self.rollouts.pass_outside_losses
        self.losses = LossStage(trl, facts, plugins, records, token_losses, outside, self._own_loss, reduction, updates)

    def begin(self, resume_from_checkpoint: str | bool | None) -> None:
        """A training begins: compare and write records, and start with the first prompts."""
        self.records.begin(resume_from_checkpoint)
        self.rollouts.prompts.begin()
