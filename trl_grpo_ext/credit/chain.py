"""The advantage hooks of one run, in order, and what each of them did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..types import Forward, Rollout, implements
from .flow import Observe, apply_forward_hooks, apply_rollout_hooks, plugin_label
from .metrics import COLUMNS, change_metrics, change_table, unique_names


@dataclass(frozen=True)
class Change:
    """What one hook did at one stage. `name` is that of its metrics."""

    name: str
    before_B_T: torch.Tensor
    after_B_T: torch.Tensor


class HookChain:
    """Runs the hooks of one stage after the other and tells what each changed.

    Args:
        hooks: Advantage hooks, in the order in which they act.
    """

    def __init__(self, hooks: Sequence[Any]) -> None:
        self.hooks = list(hooks)
        self._names = unique_names([plugin_label(hook) for hook in hooks])

    def acts(self, method: str) -> bool:
        """Whether any of the hooks has this method."""
        return any(implements(hook, method) for hook in self.hooks)

    def on_rollout(self, advantages: torch.Tensor, rollout: Rollout) -> tuple[torch.Tensor, list[Change]]:
        """Advantages `(B, T)` after the rollout stage, and what each hook changed."""
        changes: list[Change] = []
        result_B_T = apply_rollout_hooks(advantages, self.hooks, rollout, self._watch(changes, "on_rollout"))
        return result_B_T, changes

    def on_forward(self, advantages: torch.Tensor, forward: Forward) -> tuple[torch.Tensor, list[Change]]:
        """Advantages `(B, T)` after the forward stage, and what each hook changed."""
        changes: list[Change] = []
        result_B_T = apply_forward_hooks(advantages, self.hooks, forward, self._watch(changes, "on_forward"))
        return result_B_T, changes

    def _watch(self, changes: list[Change], method: str) -> Observe:
        acting = iter([place for place, hook in enumerate(self.hooks) if implements(hook, method)])

        def observe(hook: Any, before_B_T: torch.Tensor, after_B_T: torch.Tensor) -> None:
            name = self._names[next(acting)]
            if method == "on_forward" and implements(hook, "on_rollout"):
                name += "/forward"
            changes.append(Change(name, before_B_T, after_B_T))

        return observe


def change_tables(changes: Sequence[Change], mask_B_T: torch.Tensor) -> torch.Tensor:
    """What the metrics of all changes need of each completion, `(B, 6·hooks)`, for one gather over all ranks."""
    return torch.cat([change_table(change.before_B_T, change.after_B_T, mask_B_T) for change in changes], dim=1)


def metrics_of(changes: Sequence[Change], tables_N_C: torch.Tensor) -> dict[str, float]:
    """The metrics of all changes from the `change_tables` of all ranks."""
    metrics: dict[str, float] = {}
    for place, change in enumerate(changes):
        metrics |= change_metrics(change.name, tables_N_C[:, place * COLUMNS : (place + 1) * COLUMNS])
    return metrics
