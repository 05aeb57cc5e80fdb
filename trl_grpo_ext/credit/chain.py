"""The advantage hooks of one run: order them by role, run them and record what each changed.

    shapers ──▶ TRL's advantages, or the estimator's ──▶ transforms ──▶ masks ║ forward hooks, masks held

Roles decide the order; within a role hooks act as listed. A selection in which one hook would discard another's work is
refused when the chain is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigurationError
from ..types import Forward, Rollout, acting_order, implements, role_of
from .flow import Observe, apply_forward_hooks, apply_rollout_hooks, plugin_label, shape_rewards
from .metrics import COLUMNS, change_metrics, change_table, unique_names


@dataclass(frozen=True)
class Change:
    """What one hook did at one stage. `name` is the name in its metrics."""

    name: str
    before_B_T: torch.Tensor
    after_B_T: torch.Tensor


class HookChain:
    """Runs the hooks by their roles and reports what each changed.

    Args:
        hooks: Advantage hooks, in the order selected.
        aggregation: The loss aggregation used with them, if any.

    Attributes:
        hooks: In the order in which they act.

    Raises:
        PluginContractError: A hook's role is missing or wrong.
        ConfigurationError: One hook's work would be discarded; the message names it and the plugin that discards it.
    """

    def __init__(self, hooks: Sequence[Any], aggregation: Any = None) -> None:
        self.hooks = sorted(hooks, key=acting_order)
        refuse_discarded(self.hooks, aggregation)
        self._names = unique_names([plugin_label(hook) for hook in self.hooks])
        self._masks = [hook for hook in self.hooks if role_of(hook) == "transform" and getattr(hook, "last", False)]

    def acts(self, method: str) -> bool:
        """Whether any of the hooks has this method."""
        return any(implements(hook, method) for hook in self.hooks)

    def on_rewards(self, rollout: Rollout) -> Rollout:
        """The rollout after the shapers: each adds a column to the rewards, and the total includes it."""
        for hook in (hook for hook in self.hooks if implements(hook, "on_rewards")):
            rollout = shape_rewards(hook, rollout, unique_names([*rollout.reward_names, plugin_label(hook)])[-1])
        return rollout

    def on_rollout(self, advantages: torch.Tensor, rollout: Rollout) -> tuple[torch.Tensor, list[Change]]:
        """Advantages `(B, T)` after the rollout stage, and what each hook changed."""
        changes: list[Change] = []
        watch = self._watch(changes, "on_rollout")
        result_B_T = apply_rollout_hooks(advantages, self.hooks, rollout, watch)
        return result_B_T, changes

    def held_signs(self, rollout: Rollout) -> torch.Tensor | None:
        """The signs that the masks allow each advantage, enforced again after the forward stage, `(B, T)`, int8.

        1 for positive, 2 for negative, 3 for both, 0 for none. None without a mask or without a hook at the forward
        stage.
        """
        if not self._masks or not self.acts("on_forward"):
            return None
        ones_B_T = torch.ones_like(rollout.mask_B_T)
        positive_B_T, negative_B_T = (
            apply_rollout_hooks(sign * ones_B_T, self._masks, rollout) != 0 for sign in (1.0, -1.0)
        )
        return positive_B_T.to(torch.int8) + 2 * negative_B_T.to(torch.int8)

    def on_forward(
        self, advantages: torch.Tensor, forward: Forward, held_signs_B_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[Change]]:
        """Advantages `(B, T)` after the forward stage, and what each hook changed.

        Args:
            advantages: `(B,)` or `(B, T)`.
            forward: The micro-batch.
            held_signs_B_T: The micro-batch's rows of `held_signs`.
        """
        changes: list[Change] = []

        def held(advantages_B_T: torch.Tensor) -> torch.Tensor:
            if held_signs_B_T is None:
                return advantages_B_T
            sign_B_T = (advantages_B_T > 0).to(torch.int8) + 2 * (advantages_B_T < 0).to(torch.int8)
            return torch.where((held_signs_B_T & sign_B_T) > 0, advantages_B_T, torch.zeros_like(advantages_B_T))

        watch = self._watch(changes, "on_forward")
        result_B_T = apply_forward_hooks(advantages, self.hooks, forward, watch, held)
        return result_B_T, changes

    def _watch(self, changes: list[Change], method: str) -> Observe:
        names = iter([name for name, hook in zip(self._names, self.hooks, strict=True) if implements(hook, method)])

        def observe(hook: Any, before_B_T: torch.Tensor, after_B_T: torch.Tensor) -> None:
            name = next(names)
            if method == "on_forward" and implements(hook, "on_rollout"):
                name += "/forward"
            changes.append(Change(name, before_B_T, after_B_T))

        return observe


def refuse_discarded(hooks: Sequence[Any], aggregation: Any = None) -> None:
    """Refuse hooks if one would discard another's work.

    Args:
        hooks: Advantage hooks, each with a role.
        aggregation: The loss aggregation used with them.

    Raises:
        ConfigurationError: Names both and says what to do.
    """
    by_role = {role: [hook for hook in hooks if role_of(hook) == role] for role in map(role_of, hooks)}
    estimators, shapers = by_role.get("estimator", []), by_role.get("shaper", [])
    if len(estimators) > 1:
        first, second = (plugin_label(hook) for hook in estimators[:2])
        raise ConfigurationError(
            f"The advantage hooks {first!r} and {second!r} are both estimators: each makes the advantages out of the "
            "rewards, so one would throw away what the other made. Keep one of them."
        )
    if shapers and estimators and not getattr(estimators[0], "uses_total_reward", True):
        raise ConfigurationError(
            f"The advantage hook {plugin_label(shapers[0])!r} shapes the total reward, which the estimator "
            f"{plugin_label(estimators[0])!r} does not read, so the shaping would be thrown away. Keep one of them."
        )
    makers = [hook for hook in hooks if getattr(hook, "makes_signal", False)]
    if len(makers) > 1:
        first, second = (plugin_label(hook) for hook in makers[:2])
        raise ConfigurationError(
            f"The advantage hooks {first!r} and {second!r} both give groups without signal an advantage, so the second "
            "would throw away what the first gave. Keep one of them."
        )
    if makers and (masks := [hook for hook in hooks if getattr(hook, "masks_zero_variance", False)]):
        raise ConfigurationError(
            f"The advantage hook {plugin_label(masks[0])!r} masks the groups without signal, to which "
            f"{plugin_label(makers[0])!r} gives an advantage, so it would do nothing. Keep one of them."
        )
    if makers and (givers := [hook for hook in hooks if getattr(hook, "signal_everywhere", False)]):
        raise ConfigurationError(
            f"The advantage hook {plugin_label(givers[0])!r} gives every completion an advantage, so there are no "
            f"groups without signal, for which {plugin_label(makers[0])!r} is, and it would do nothing. Keep one of "
            "them; a KL penalty may stand in TRL's loss instead (beta)."
        )
    if makers and getattr(aggregation, "skips_zero_variance", False):
        raise ConfigurationError(
            f"The advantage hook {plugin_label(makers[0])!r} gives groups without signal an advantage, and the loss "
            f"aggregation {plugin_label(aggregation)!r} gives their tokens weight 0, so it would do nothing. Take "
            "skip_zero_variance out, or the hook."
        )


def change_tables(changes: Sequence[Change], mask_B_T: torch.Tensor) -> torch.Tensor:
    """Per-completion inputs of the metrics of all changes, `(B, 6·hooks)`, for one gather over all ranks."""
    return torch.cat([change_table(change.before_B_T, change.after_B_T, mask_B_T) for change in changes], dim=1)


def metrics_of(changes: Sequence[Change], tables_N_C: torch.Tensor) -> dict[str, float]:
    """The metrics of all changes from the `change_tables` of all ranks."""
    metrics: dict[str, float] = {}
    for place, change in enumerate(changes):
        metrics |= change_metrics(change.name, tables_N_C[:, place * COLUMNS : (place + 1) * COLUMNS])
    return metrics
