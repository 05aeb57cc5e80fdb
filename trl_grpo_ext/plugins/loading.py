"""From a plugin's name to a usable object: find it, import it, build it, check its kind.

A plugin is imported only when it is selected, so a broken one hurts nobody else.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigurationError, PluginError, PluginTypeError, reworded
from ..guard.calls import has_plugins, reward_name, running_methods, start_workers, unique_names
from ..guard.outcomes import OutcomePolicy
from ..types import Declaration, acting_order, implements
from .building import build, check_parameters, describe, import_plugin, plugin_code
from .checking import check_contract
from .discovery import ENVIRONMENT_VARIABLE, PluginInfo, available, find, is_allowed
from .kinds import FACTS, GROUPS, LABELS, Kind, kind_of, with_article
from .selection import Selection, parse_selection

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "GROUPS",
    "Kind",
    "Loaded",
    "PluginInfo",
    "RewardList",
    "Selection",
    "available",
    "find",
    "is_allowed",
    "load_advantage_hooks",
    "load_group_filter",
    "load_loss_aggregation",
    "load_prompt_sampler",
    "load_rewards",
    "load_token_losses",
    "parse_selection",
    "resolve",
]


@dataclass(frozen=True)
class Loaded:
    """A usable plugin. `info` and `selection` are None for an object that was passed in already built."""

    object: Any
    info: PluginInfo | None = None
    selection: Selection | None = None
    own: bool = False  # whether the object was made for this selection, so that nothing else refers to it
    inner: tuple[tuple[str, Loaded], ...] = ()  # plugins that its parameters select, with places such as `rewards[0]`


class LoadedList(list[Any]):
    """Plugins with their origin, which is known as long as they are in this list or in one made from it by `join`."""

    _sources: Sequence[Loaded] = ()

    def source(self, item: Any) -> Loaded | None:
        """A plugin's origin, if known."""
        return next((loaded for loaded in self._sources if loaded.object is item), None)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles forget the plugins' origin."""
        return {name: value for name, value in vars(self).items() if name != "_sources"}

    @classmethod
    def from_loaded(cls, sources: Sequence[Loaded]) -> LoadedList:
        made = LoadedList(item.object for item in sources)
        made._sources = sources
        return made

    @classmethod
    def join(cls, *lists: list[Any]) -> LoadedList:
        return cls.from_loaded([item for plugins in lists for item in with_origin(plugins)])


def with_origin(plugins: Iterable[Any]) -> list[Loaded]:
    """Plugins with their origin, as far as it is known."""
    source = plugins.source if isinstance(plugins, LoadedList) else lambda plugin: None
    return [source(plugin) or Loaded(plugin) for plugin in plugins]


class RewardList(LoadedList):
    """Reward functions as `GRPOTrainer(reward_funcs=...)` takes them, with their weights and names.

    Attributes:
        weights: One per function, by default 1.0; plain TRL takes them as `GRPOConfig(reward_weights=...)`.
        names: Each function's name in TRL's metrics; `load_rewards` makes them unique.

    Raises:
        ConfigurationError: When a trainer of TRL takes the functions and would ignore their weights.
    """

    def __init__(self, rewards: Iterable[Any] = (), weights: Iterable[float] | None = None) -> None:
        super().__init__(rewards)
        self.weights: list[float] = [1.0] * len(self) if weights is None else list(weights)
        self.names: list[str] = [reward_name(reward) for reward in self]

    def __iter__(self) -> Iterator[Any]:
        if any(weight != 1.0 for weight in self.weights):
            self._refuse_lost_weights()
        return super().__iter__()

    def _refuse_lost_weights(self) -> None:
        for owner, names in running_methods():
            held = (names.get("reward_funcs"), getattr(owner, "reward_funcs", None))
            is_of_trl = any(base.__module__.startswith("trl.") for base in type(owner).__mro__)
            if not is_of_trl or not any(one is self for one in held):
                continue
            args = names.get("args") or getattr(owner, "args", None)
            if has_plugins(owner) or getattr(args, "reward_weights", None) is not None:
                return
            what = f"{type(owner).__name__} would ignore the weights {self.weights} of these rewards"
            advice = "set reward_weights=rewards.weights in its config, or combine them by the reward 'weighted'"
            raise ConfigurationError(f"{what}: {advice}.")


def resolve(kind: Kind, selection_or_object: Any) -> Loaded:
    """Import, build and check one plugin that a selection names; an object that is already built is only checked.

    Raises:
        BrokenPluginError: Importing it failed, or its module has no such attribute. The cause is chained.
        PluginParameterError: It does not take these parameters, or refused their values.
        PluginTypeError: It is not of this kind.
        PluginContractError: Its role, declaration or signatures are not those of the contract, or of another version.
        ConfigurationError, UnknownPluginError, AmbiguousPluginError, PluginBlockedError: As for `find`.
    """
    kind = kind_of(kind)
    if isinstance(selection_or_object, list | tuple) and not FACTS[kind].several:
        combine = " Combine them by {name: all_of, filters: [...]}." if kind == "group_filter" else ""
        raise ConfigurationError(f"Select one {LABELS[kind]}, not a list: {selection_or_object!r}.{combine}")
    if not isinstance(selection_or_object, str | Mapping | Selection):
        _check_kind(kind, selection_or_object, "The object that was passed")
        return Loaded(selection_or_object)
    asked = parse_selection(kind, selection_or_object)
    info = find(kind, asked)
    exported = import_plugin(info)
    inner: list[tuple[str, Loaded]] = []
    with plugin_code(info, "building it"):
        parameters = _with_selected(info, exported, asked.parameters, inner)
        built = build(info, exported, parameters)
        _check_kind(kind, built, str(info))
        own = isinstance(exported, type)
        has_own_name = "__name__" in getattr(built, "__dict__", {})  # which its parameters decide
        if own and not has_own_name and (not info.dotted or getattr(built, "__name__", None) is None):
            _rename(built, info.name.rpartition(".")[2])  # what metrics and messages call it
    if asked.guard is not None:
        from ..guard.guarded import guarded  # here, because most rewards need none

        try:
            built = guarded(built, **asked.guard, name=reward_name(built))
            own = True
        except (ConfigurationError, TypeError) as error:  # TypeError: it has no such parameter
            raise ConfigurationError(f"{info}, in its guard: {error}") from error
    if asked.weight is not None:
        with contextlib.suppress(Exception):  # slots; a list that is made of a `RewardList` has forgotten the weights
            weighed = built
            if inspect.isroutine(built) or isinstance(built, functools.partial):
                weighed = functools.update_wrapper(functools.partial(built), built)
            elif not own:  # others hold it too
                weighed = copy.copy(built)
            vars(weighed)["trl_grpo_ext_weight"] = asked.weight
            built = weighed
    if "skip_zero_variance" in asked.switches:
        if not implements(built, "weights"):
            raise ConfigurationError(f"{info} has `reduce`, and skip_zero_variance works with `weights`: leave it out.")
        from ..credit.signal import SkipZeroVariance  # here, because it imports torch

        built = SkipZeroVariance(built)
    return Loaded(built, info, asked, own, tuple(inner))


def load_rewards(selections: Any) -> RewardList:
    """Load reward functions: `GRPOTrainer(..., reward_funcs=load_rewards(["gsm8k_accuracy", "think_format"]))`.

    Those that work in processes of their own start them now, so that their imports overlap with loading the model.

    Args:
        selections: One selection or a list of them. Callables pass through unchanged. The second reward of one name is
            `name_2` in the metrics of `GRPOExtTrainer`; TRL's own trainer logs callables of one name as one metric.

    Raises:
        PluginError, ConfigurationError: As for `resolve`.
    """
    rewards = _reward_list(selections, _resolve_several("reward", selections))
    for reward in rewards:
        start_workers(reward)
    return rewards


def _reward_list(selections: Any, loaded: Sequence[Loaded]) -> RewardList:
    given = [item.selection.weight if item.selection else None for item in loaded]
    weights = [1.0 if weight is None else weight for weight in given]
    made = RewardList((item.object for item in loaded), getattr(selections, "weights", weights))
    made.names = _unique(loaded)
    made._sources = loaded
    return made


def _unique(loaded: Sequence[Loaded]) -> list[str]:
    """Names for plugins of one kind, the second of a name with a number; those that nobody else holds take theirs."""
    names = unique_names([reward_name(item.object) for item in loaded])
    for item, name in zip(loaded, names, strict=True):
        if item.own and name != reward_name(item.object):
            _rename(item.object, name)
    return names


def _rename(plugin: Any, name: str) -> None:
    """Rename a plugin in its metrics; one that takes no name keeps its own."""
    with contextlib.suppress(Exception):  # slots, a frozen dataclass
        plugin.__name__ = name
        for value in vars(plugin).values():
            if isinstance(value, OutcomePolicy):  # it counts outcomes under the reward's name
                value.reward = name


def load_advantage_hooks(selections: Any) -> list[Any]:
    """Load advantage hooks, one or a list, in the order in which they act. The errors are those of `resolve`."""
    loaded = sorted(_resolve_several("advantage_hook", selections), key=lambda item: acting_order(item.object))
    _unique(loaded)
    return LoadedList.from_loaded(loaded)


def load_loss_aggregation(selection: Any) -> Any:
    """Load the loss aggregation; a run has only one. The errors are those of `resolve`."""
    return resolve("loss_aggregation", selection).object


def load_group_filter(selection: Any) -> Any:
    """Load the group filter for `resample`; combine several by `all_of`. The errors are those of `resolve`."""
    return resolve("group_filter", selection).object


def load_prompt_sampler(selection: Any) -> Any:
    """Load the prompt sampler; a run has only one. The errors are those of `resolve`."""
    return resolve("prompt_sampler", selection).object


def load_token_losses(selections: Any) -> list[Any]:
    """Load token losses, one selection or a list of them, in this order. The errors are those of `resolve`."""
    return LoadedList.from_loaded(_resolve_several("token_loss", selections))


def _resolve_several(kind: Kind, selections: Any) -> list[Loaded]:
    """Resolve one selection or a list of them; plugins of a `LoadedList` are already loaded and shared."""
    found = []
    for item in selections if isinstance(selections, list | tuple) else [selections]:
        known = selections.source(item) if isinstance(selections, LoadedList) else None
        found.append(resolve(kind, item) if known is None else replace(known, own=False))
    return found


def _with_selected(
    info: PluginInfo, exported: Any, parameters: dict[str, Any], inner: list[tuple[str, Loaded]]
) -> dict[str, Any]:
    """Load the plugins that parameters select (`takes` of the declaration), and add them to `inner`."""
    kind = info.kind
    takes = Declaration.of(exported).takes if isinstance(exported, type) else ()
    if not takes:
        return parameters
    check_parameters(info, exported, parameters)  # before what is inside: a typo outside comes first

    def load(selection: Any, place: str, weighed: bool = False) -> Loaded:
        try:
            loaded = resolve(kind, selection)
            if loaded.selection is not None and loaded.selection.weight is not None and not weighed:
                what = f"the weight {loaded.selection.weight} of {loaded.selection.name!r} would have no effect"
                raise ConfigurationError(f"{what}: only rewards in a list have weights.")
        except (ConfigurationError, PluginError) as error:
            raise reworded(error, f"{info}, in {place}: {error}") from error
        inner.append((place, loaded))
        return loaded

    def several(value: Any, place: str) -> Any:
        if value is None or _is_built(kind, value):
            inner.extend([] if value is None else [(place, Loaded(value))])
            return value
        if isinstance(value, list | tuple):
            items = [load(item, f"{place}[{index}]", weighed=True) for index, item in enumerate(value)]
            return _reward_list(value, items) if kind == "reward" else [item.object for item in items]
        if isinstance(value, Mapping) and "name" not in value:
            return {key: load(inner, f"{place}[{key!r}]").object for key, inner in value.items()}
        return load(value, place).object

    return {name: several(value, name) if name in takes else value for name, value in parameters.items()}


def _is_built(kind: Kind, value: Any) -> bool:
    if isinstance(value, type) or kind == "reward":
        return callable(value) and not isinstance(value, type)
    return any(implements(value, method) for method in FACTS[kind].methods)


def _check_kind(kind: Kind, plugin: Any, subject: str) -> None:
    name = getattr(plugin, "__qualname__", "")
    if isinstance(plugin, type):
        raise PluginTypeError(f"{subject} is the class {name}, not {with_article(kind)}: pass {name}(...).")
    has = [method for method in FACTS[kind].methods if implements(plugin, method)]
    if kind == "reward" and not callable(plugin):  # an instance may carry a `__call__` that its class lacks
        has = []
    if len(has) == 1 or (has and kind == "advantage_hook"):
        check_contract(kind, plugin, subject)
        return
    what = f"has both {' and '.join(has)}" if has else f"is {describe(plugin)}, not {with_article(kind)}"
    raise PluginTypeError(f"{subject} {what}. Required: {FACTS[kind].required}.")
