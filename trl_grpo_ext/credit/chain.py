"""The advantage hooks of one run: order them by role, run them and record what each changed.

shapers ──▶ TRL's advantages, or the estimator's ──▶ transforms ──▶ masks ║ forward hooks, masks held
"""

import copy
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import ConfigurationError
from ..guard.calls import unique_names
from ..types import Forward, HookDeclaration, Rollout, acting_order, adds_rewards, implements, role_of
from .flow import FIGURES, apply_hooks, expand_advantages, hook_metrics, plugin_label, run_hook, shape_rewards
from .groups import gather_groups
from .signal import SkipZeroVariance, rewards_are_equal

PATIENCE = 10
"""Steps in which a hook may change nothing before a warning says so."""
COLUMNS = 6  # of a change in its table


@dataclass(frozen=True)
class Change:
    """What one hook did at one stage."""

    name: str  # in its metrics
    before_B_T: torch.Tensor
    after_B_T: torch.Tensor


class HookChain:
    """Runs the hooks, given in the order selected, by their roles, and reports what each changed."""

    def __init__(self, hooks: Sequence[Any], aggregation: Any = None) -> None:
        self.hooks = sorted(hooks, key=acting_order)
        refuse_discarded(self.hooks, aggregation)
        self._names = unique_names([plugin_label(hook) for hook in self.hooks])
        self._masks = [one for one in self.hooks if role_of(one) == "transform" and HookDeclaration.of(one).last]
        self._idle_steps: dict[str, set[int]] = {}  # of the hooks that have changed nothing yet
        self._effective: set[str] = set()

    def acts(self, method: str) -> bool:
        """Whether any of the hooks has this method."""
        return any(implements(hook, method) for hook in self.hooks)

    def on_rewards(self, rollout: Rollout) -> Rollout:
        """The rollout after the shapers: with their weights, then a column for each that adds, part of the total."""
        for hook in (hook for hook in self.hooks if implements(hook, "on_rewards")):
            rollout = shape_rewards(hook, rollout, unique_names([*rollout.reward_names, plugin_label(hook)])[-1])
        return rollout

    def on_rollout(self, advantages: torch.Tensor, rollout: Rollout) -> tuple[torch.Tensor, list[Change]]:
        """Advantages `(B, T)` after the rollout stage, and what each hook changed."""
        return self._run("on_rollout", advantages, rollout)

    def metrics(self, forward: bool | None = None) -> dict[str, float]:
        """The hooks' own `metrics`, each under its hook's name; `forward`: those with `on_forward`, or without."""
        return {
            f"advantage/{label}/{name}": value
            for label, hook in zip(self._names, self.hooks, strict=True)
            for name, value in hook_metrics(hook).items()
            if forward in (None, implements(hook, "on_forward"))
        }

    def uninformative(self, rollout: Rollout) -> torch.Tensor | None:
        """`Rollout.uninformative_B`, from a rollout after the shapers. Gathers twice."""
        declared = [HookDeclaration.of(hook) for hook in self.hooks if role_of(hook) != "forward"]
        if any(one.makes_signal for one in declared):
            return None
        functions = len(rollout.reward_names) - sum(map(adds_rewards, self.hooks))
        rewards_N_K = rollout.gather(rollout.rewards_B_K[:, :functions].contiguous())
        weights_K = rollout.reward_weights_K[:functions]
        equal_N = rewards_are_equal(rewards_N_K, weights_K, gather_groups(rollout), "normalize_then_sum")
        return equal_N[rollout.local_rows]

    def allowed_signs(self, rollout: Rollout) -> torch.Tensor | None:
        """The signs that the masks let through, `(B, T)`: 1 positive, 2 negative, 3 both; None if all are."""
        if not self._masks or not self.acts("on_forward"):
            return None
        ones_B_T = torch.ones_like(rollout.mask_B_T)
        tried = [*map(copy_to_try, self._masks)]
        positive_B_T, negative_B_T = (apply_hooks(sign * ones_B_T, tried, rollout) != 0 for sign in (1.0, -1.0))
        return positive_B_T.to(torch.int8) + 2 * negative_B_T.to(torch.int8)

    def on_forward(
        self, advantages: torch.Tensor, forward: Forward, allowed_signs_B_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[Change]]:
        """Advantages `(B, T)` after the forward stage, and what each hook changed, within `allowed_signs`."""
        return self._run("on_forward", advantages, forward, allowed_signs_B_T)

    def _run(
        self, method: str, advantages: torch.Tensor, context: Rollout | Forward, allowed_B_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[Change]]:
        advantages_B_T = expand_advantages(advantages, context.mask_B_T)
        changes = list[Change]()
        for name, hook in zip(self._names, self.hooks, strict=True):
            if not implements(hook, method):
                continue
            before_B_T = advantages_B_T
            advantages_B_T = run_hook(hook, method, advantages_B_T, context)
            if allowed_B_T is not None:
                sign_B_T = (advantages_B_T > 0).to(torch.int8) + 2 * (advantages_B_T < 0).to(torch.int8)
                advantages_B_T = torch.where((allowed_B_T & sign_B_T) > 0, advantages_B_T, 0.0)
            again = method == "on_forward" and implements(hook, "on_rollout")
            changes.append(Change(f"{name}/forward" if again else name, before_B_T, advantages_B_T))
        return advantages_B_T, changes

    def without_effect(self, changes: Sequence[Change], tables_N_C: torch.Tensor, step: int) -> Iterator[str]:
        """Say once of each hook that it has changed nothing in its first steps of training."""
        for number, change in enumerate(changes):
            name = change.name.removesuffix("/forward")
            if name in self._effective or bool((tables_N_C[:, number * COLUMNS + 4] > 0).any()):
                self._effective.add(name)
                continue
            idle = self._idle_steps.setdefault(name, set())
            idle.add(step)
            if len(idle) == PATIENCE:
                self._effective.add(name)  # said once
                yield (
                    f"The advantage hook {name!r} has changed no advantage in {PATIENCE} steps. If it should have, "
                    "look at its parameters and at the hooks beside it (advantage/<hook>/mass_moved)."
                )


def copy_to_try(hook: Any) -> Any:
    """A hook whose own containers and tensors are copies; the objects that it holds, which may be large, are shared."""
    tried = copy.copy(hook)
    held = {} if tried is hook else getattr(tried, "__dict__", {})  # a function is its own copy
    of_module = ("_parameters", "_modules") if isinstance(hook, torch.nn.Module) else ()
    for name, value in held.items():
        if isinstance(value, dict | list | set | deque | np.ndarray | torch.Tensor) and name not in of_module:
            with suppress(Exception):  # what cannot be copied, such as a lock, is shared
                held[name] = copy.deepcopy(value)
    return tried


def refuse_discarded(hooks: Sequence[Any], aggregation: Any) -> None:
    """Refuse hooks, or an aggregation beside them, if one would discard another's work; the message names both."""
    estimators, forward = ([hook for hook in hooks if role_of(hook) == role] for role in ("estimator", "forward"))
    adding = [hook for hook in hooks if adds_rewards(hook)]
    makers = [hook for hook in forward if HookDeclaration.of(hook).makes_signal]
    weighing = [hook for hook in hooks if HookDeclaration.of(hook).changes_weights]
    blind = [hook for hook in estimators if not HookDeclaration.of(hook).uses_total_reward]
    unweighted = [hook for hook in estimators if not HookDeclaration.of(hook).uses_weights]
    skips = [aggregation] if isinstance(aggregation, SkipZeroVariance) else []
    gives = "The advantage hook {} gives groups of equal rewards an advantage"
    clashes = (
        (estimators, estimators[1:], "The advantage hooks {} and {} are both estimators; one would be discarded."),
        (adding, blind, "The advantage hook {} adds to the total reward, which the estimator {} does not read."),
        (weighing, unweighted, "The advantage hook {} changes weights of rewards, which {} does not read."),
        (makers, makers[1:], "The advantage hooks {} and {} both give groups of equal rewards an advantage."),
        (makers, skips, f"{gives}, and the loss aggregation {{}} weight 0."),
    )
    for first, second, what in clashes:
        if first and second:
            names = (repr(plugin_label(plugin)) for plugin in (first[0], second[0]))
            raise ConfigurationError(f"{what.format(*names)} Keep one of them.")


def refuse_normalised_shapers(hooks: Sequence[Any], multi_objective_aggregation: str) -> None:
    """Refuse shapers where TRL would normalise what they add by itself, which removes its size."""
    adding = [hook for hook in hooks if adds_rewards(hook)]
    estimates = any(role_of(hook) == "estimator" for hook in hooks)
    if adding and not estimates and multi_objective_aggregation == "normalize_then_sum":
        what = f"The advantage hook {plugin_label(adding[0])!r} adds to the total reward"
        why = "multi_objective_aggregation: normalize_then_sum does not read: it normalises each column by itself"
        raise ConfigurationError(f"{what}, which {why}. Set sum_then_normalize, or select an estimator.")


def change_tables(changes: Sequence[Change], mask_B_T: torch.Tensor) -> torch.Tensor:
    """Per completion what `metrics_of` reads, `(B, 6·hooks)`, for one gather over all ranks.

    Of each change tokens, mean A, Σ (A - mean)², sign flips, Σ |change|, Σ |A before|.
    """
    live_B_T = (mask_B_T > 0).float()
    tokens_B = live_B_T.sum(dim=1)
    columns = []
    for change in changes:
        before_B_T = change.before_B_T.float()
        after_B_T = change.after_B_T.float()
        means_B = (after_B_T * live_B_T).sum(dim=1) / tokens_B.clamp(min=1.0)
        flips_B_T = (torch.sign(before_B_T) * torch.sign(after_B_T) < 0).float()
        spread_B_T = (after_B_T - means_B.unsqueeze(1)) ** 2
        summed = (spread_B_T, flips_B_T, (after_B_T - before_B_T).abs(), before_B_T.abs())
        columns += [tokens_B, means_B, *((values_B_T * live_B_T).sum(dim=1) for values_B_T in summed)]
    return torch.stack(columns, dim=1)


def metrics_of(changes: Sequence[Change], tables_N_C: torch.Tensor) -> dict[str, float]:
    """The metrics of all changes from the `change_tables` of all ranks; NaN if undefined."""
    metrics: dict[str, float] = {}
    columns = tables_N_C.detach().cpu().double().unbind(dim=1)
    for place, change in enumerate(changes):
        tokens_N, means_N, within_N, flips_N, moved_N, mass_N = columns[place * COLUMNS : (place + 1) * COLUMNS]
        tokens = tokens_N.sum()
        mass = mass_N.sum()
        mean = (tokens_N * means_N).sum() / tokens
        spread = within_N.sum() + (tokens_N * (means_N - mean) ** 2).sum()
        moved = float(moved_N.sum() / mass) if mass > 0 else math.nan
        values = (float(mean), float((spread / tokens).sqrt()), float(flips_N.sum() / tokens), moved)
        metrics |= {f"advantage/{change.name}/{figure}": one for figure, one in zip(FIGURES, values, strict=True)}
    return metrics
