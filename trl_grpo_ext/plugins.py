"""From a plugin's name to a usable object: find it, import it, build it, check its kind.

Three entry-point groups, one per kind; the built-ins are in them like everybody else's plugins. A plugin is imported
when it is asked for and never before, so a broken one hurts nobody else. How a selection is written is in
`plugin_selection`; what is installed, and what may load, is in `plugin_discovery`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import (
    BrokenPluginError,
    ConfigurationError,
    PluginParameterError,
    PluginTypeError,
    UnknownPluginError,
)
from .plugin_discovery import (
    ENVIRONMENT_VARIABLE,
    GROUPS,
    PluginInfo,
    available,
    called,
    find,
    find_and_explain,
    is_allowed,
    near,
    neither,
)
from .plugin_metadata import metadata_directory
from .plugin_selection import KINDS, Kind, Selection, looks_like_a_number, parse_selection, with_article
from .types import implements

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
    "implements",
    "is_allowed",
    "load_advantage_hooks",
    "load_loss_aggregation",
    "load_rewards",
    "parse_selection",
    "resolve",
]

_METHODS: dict[Kind, tuple[str, ...]] = {
    "reward": ("__call__",),
    "advantage_hook": ("on_rollout", "on_forward"),
    "loss_aggregation": ("weights", "reduce"),
}
_REQUIRED: dict[Kind, str] = {
    "reward": (
        "a function f(prompts, completions, completion_ids, **columns) -> list of floats or None, or a class whose "
        "instances are such callables"
    ),
    "advantage_hook": (
        "a class whose instances have on_rollout(advantages_B_T, rollout), on_forward(advantages_B_T, forward) or both"
    ),
    "loss_aggregation": (
        "a class whose instances have exactly one of weights(rollout) and reduce(loss_B_T, mask_B_T, totals)"
    ),
}
# What TRL passes to every reward function: not for a selection to set.
_PASSED_BY_TRL = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
)


@dataclass(frozen=True)
class Loaded:
    """A usable plugin. `info` and `selection` are None for an object that came in already built."""

    object: Any
    info: PluginInfo | None = None
    selection: Selection | None = None


class RewardList(list[Any]):
    """Reward functions as `GRPOTrainer(reward_funcs=...)` takes them, with their weights and names.

    Attributes:
        weights: One per function, 1.0 where none was given; fits `GRPOConfig(reward_weights=...)`.
        names: What TRL calls each function in its metrics.
    """

    def __init__(self, rewards: Iterable[Any] = (), weights: Iterable[float] | None = None) -> None:
        super().__init__(rewards)
        self.weights: list[float] = [1.0] * len(self) if weights is None else list(weights)
        self.names: list[str] = [_metric_name(reward) for reward in self]


def resolve(kind: Kind, selection_or_object: Any) -> Loaded:
    """Import, build and check one plugin. An object that is already built is only checked.

    Args:
        kind: "reward", "advantage_hook" or "loss_aggregation".
        selection_or_object: What `parse_selection` reads, or an object of that kind.

    Raises:
        BrokenPluginError: Importing it failed, or its module has no such attribute. The cause is chained.
        PluginParameterError: It does not take these parameters, or refused their values.
        PluginTypeError: It is not of this kind.
        ConfigurationError, UnknownPluginError, AmbiguousPluginError, PluginBlockedError: As for `find`.
    """
    if not isinstance(selection_or_object, str | Mapping | Selection):
        _check_kind(kind, selection_or_object, "The object that was passed")
        return Loaded(selection_or_object)
    asked = parse_selection(kind, selection_or_object)
    info, not_an_entry_point_because = find_and_explain(kind, asked)
    exported = _import(info, asked, not_an_entry_point_because)
    built = _build(info, exported, asked.parameters)
    _check_kind(kind, built, f"{called(info)} from {info.source}")
    if kind == "reward" and isinstance(exported, type) and getattr(built, "__name__", None) is None:
        with contextlib.suppress(Exception):  # slots, a frozen dataclass: TRL then takes the name of the class
            built.__name__ = info.name.rpartition(".")[2]  # TRL names its metrics after this
    if "skip_zero_variance" in asked.switches:
        built = _without_zero_variance(built, info)
    if kind == "advantage_hook" and asked.switches:
        from .composition import Preserving  # here, because it imports torch

        built = Preserving(built, **dict.fromkeys(asked.switches, True))
    return Loaded(built, info, asked)


def load_rewards(selections: Any) -> RewardList:
    """Load reward functions: `GRPOTrainer(..., reward_funcs=load_rewards(["gsm8k_accuracy", "think_format"]))`.

    Args:
        selections: One selection or a list of them. Callables pass through as they are.

    Raises:
        PluginError, ConfigurationError: As for `resolve`.
    """
    loaded = [resolve("reward", item) for item in _several(selections)]
    given = [item.selection.weight if item.selection else None for item in loaded]
    if isinstance(selections, RewardList):
        given = list(selections.weights)
    rewards = RewardList((item.object for item in loaded), (1.0 if w is None else w for w in given))
    twice = sorted({name for name in rewards.names if rewards.names.count(name) > 1})
    if twice:
        warnings.warn(f"Several rewards are called {', '.join(twice)}; TRL logs them as one metric.", stacklevel=2)
    return rewards


def load_advantage_hooks(selections: Any) -> list[Any]:
    """Load advantage hooks, in the order in which they will run. Takes one selection or object, or a list of them.

    Raises:
        PluginError, ConfigurationError: As for `resolve`.
    """
    return [resolve("advantage_hook", item).object for item in _several(selections)]


def load_loss_aggregation(selection: Any) -> Any:
    """Load the loss aggregation; there is only one.

    Raises:
        PluginError, ConfigurationError: As for `resolve`.
    """
    if isinstance(selection, list | tuple):
        raise ConfigurationError(f"There is one loss aggregation, not a list: select one of {selection!r}.")
    return resolve("loss_aggregation", selection).object


def _without_zero_variance(aggregation: Any, info: PluginInfo) -> Any:
    if not implements(aggregation, "weights"):
        raise ConfigurationError(
            f"{called(info)} from {info.source} has `reduce`, and skip_zero_variance works with `weights` alone. Take "
            "skip_zero_variance out, or select another aggregation."
        )
    from .zero_variance import SkipZeroVariance  # here, because it imports torch

    return SkipZeroVariance(aggregation)


def _several(selections: Any) -> Sequence[Any]:
    return selections if isinstance(selections, list | tuple) else [selections]


def _import(info: PluginInfo, asked: Selection, not_an_entry_point_because: str | None) -> Any:
    """Import a plugin's module and take its attribute."""
    module_name, _, rest = info.target.partition(":")
    module_name, attribute = module_name.strip(), rest.partition("[")[0].strip()
    if not module_name or not attribute:
        raise BrokenPluginError(_broken(info, f"its target {info.target!r} is not of the form module:attribute"))
    try:
        found = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a plugin that exits at import must not end the run silently
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            if not_an_entry_point_because is not None:
                problem = f"there is no module {missing!r} on sys.path"
                raise UnknownPluginError(neither(info.kind, asked, not_an_entry_point_because, problem)) from error
            raise BrokenPluginError(_broken(info, _stale(info, missing))) from error
        problem = f"importing {module_name!r} raised {type(error).__name__}: {error}"
        if missing is not None:
            problem = f"{module_name!r} imports {missing!r}, which is not installed"
        raise BrokenPluginError(_broken(info, problem)) from error

    for part in attribute.split("."):
        owner = found
        try:
            found = getattr(owner, part)
        except KeyboardInterrupt:
            raise
        except AttributeError as error:
            place = f"{module_name!r} ({getattr(sys.modules.get(module_name), '__file__', None) or 'no file'})"
            hint = near(part, [name for name in dir(owner) if not name.startswith("_")])
            problem = f"the module {place} has no attribute {attribute!r}.{hint}"
            if not_an_entry_point_because is not None:
                raise UnknownPluginError(neither(info.kind, asked, not_an_entry_point_because, problem)) from error
            raise BrokenPluginError(_broken(info, problem)) from error
        except BaseException as error:  # a module may load its attributes lazily
            problem = f"reading {attribute!r} from {module_name!r} raised {type(error).__name__}: {error}"
            raise BrokenPluginError(_broken(info, problem)) from error
    return found


def _build(info: PluginInfo, exported: Any, parameters: dict[str, Any]) -> Any:
    """Make the usable object: instantiate a class, bind a function's parameters, take an instance as it is."""
    if inspect.isroutine(exported) or isinstance(exported, functools.partial):
        if info.kind != "reward" or not parameters:
            return exported  # of the wrong kind, which the check that follows says better
        _check_parameters(info, exported, parameters)
        return functools.partial(exported, **parameters)  # picklable, and TRL names it after the function
    if not isinstance(exported, type):
        if parameters:
            raise PluginParameterError(
                f"{called(info)} from {info.source} takes no parameters: {info.target} is "
                f"{_described(exported)}, already built. It was given {_shown(parameters)}."
            )
        return exported
    _check_parameters(info, exported, parameters)
    try:
        return exported(**parameters)
    except KeyboardInterrupt:
        raise
    except (TypeError, ValueError) as error:
        strings = [f"{name}={value!r}" for name, value in parameters.items() if looks_like_a_number(value)]
        hint = (
            f" YAML 1.1 reads {', '.join(strings)} as a string: write it with a point, as in 1.0e-3." if strings else ""
        )
        raise PluginParameterError(
            f"{called(info)} from {info.source} refused its parameters ({_shown(parameters) or 'none'}) "
            f"with {type(error).__name__}: {error}.{hint}"
        ) from error
    except BaseException as error:
        problem = f"building it with ({_shown(parameters)}) raised {type(error).__name__}: {error}"
        raise BrokenPluginError(_broken(info, problem)) from error


def _check_parameters(info: PluginInfo, exported: Callable[..., Any], parameters: dict[str, Any]) -> None:
    """Compare the parameters with the signature before calling, so that a typo is told from a failure inside."""
    try:
        signature = inspect.signature(exported)
    except (TypeError, ValueError):  # some built-in and extension types have none
        return
    is_class = isinstance(exported, type)
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in keyword and (is_class or name not in _PASSED_BY_TRL)
    }
    listed = f"It takes: {', '.join(map(str, takes.values()))}." if takes else "It takes no parameters."
    # A function's **kwargs are for the dataset's columns, so a name that only they would take is a typo.
    open_ended = is_class and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for name in parameters:
        if name in takes or open_ended:
            continue
        why = " (TRL passes that one)" if name in _PASSED_BY_TRL and not is_class else ""
        raise PluginParameterError(
            f"{called(info)} from {info.source} has no parameter {name!r}{why}.{near(name, takes)} {listed}"
        )
    missing = [name for name, p in takes.items() if p.default is p.empty and name not in parameters]
    if is_class and missing:  # a function's are columns of the dataset
        raise PluginParameterError(
            f"{called(info)} from {info.source} needs the parameter {missing[0]!r}; write "
            f"{{name: {info.name}, {missing[0]}: ...}}. {listed}"
        )


def _check_kind(kind: Kind, plugin: Any, subject: str) -> None:
    if kind not in KINDS:
        raise ConfigurationError(f"{kind!r} is not a kind of plugin; the kinds are {', '.join(KINDS)}.")
    if isinstance(plugin, type):
        raise PluginTypeError(
            f"{subject} is the class {plugin.__qualname__}, not {with_article(kind)}: pass an instance, "
            f"{plugin.__qualname__}(...)."
        )
    has = [method for method in _METHODS[kind] if implements(plugin, method)]
    if kind == "reward" and not callable(plugin):  # an instance may carry a `__call__` that its class lacks
        has = []
    if len(has) == 1 or (has and kind == "advantage_hook"):
        return
    what = f"{subject} is {_described(plugin)}, not {with_article(kind)}"
    if has:
        what += f": it has both {' and '.join(has)}"
    others = [
        f"It has {method}, so it looks like {with_article(other)}: offer it in {GROUPS[other]}."
        for other in KINDS
        if other != kind
        for method in _METHODS[other]
        if other != "reward" and implements(plugin, method)
    ]
    raise PluginTypeError(" ".join([f"{what}. Required: {_REQUIRED[kind]}.", *others[:1]]))


def _metric_name(reward: Any) -> str:
    """The name that TRL gives a reward function in its metrics."""
    torch = sys.modules.get("torch")  # a reward model can only be there if torch is
    if torch is not None and isinstance(reward, torch.nn.Module):
        return str(getattr(getattr(reward, "config", None), "_name_or_path", "")).rpartition("/")[2]
    while isinstance(reward, functools.partial):
        reward = reward.func
    return str(getattr(reward, "__name__", type(reward).__name__))


def _described(plugin: Any) -> str:
    if inspect.isroutine(plugin):
        return f"the function {getattr(plugin, '__qualname__', plugin)}"
    return f"an object of type {type(plugin).__qualname__}"


def _shown(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in parameters.items())


def _broken(info: PluginInfo, problem: str) -> str:
    text = f"{called(info)} from {info.source} cannot be loaded: {problem.removesuffix('.')}"
    text += "" if text.endswith("?") else "."
    if info.dotted:
        return text
    return (
        f"{text} Its entry point is "
        f"{info.name} = {info.target!r} in the group {GROUPS[info.kind]}, which must export {_REQUIRED[info.kind]}. "
        f"Repair, upgrade or uninstall {info.distribution}, or do not select this plugin."
    )


def _stale(info: PluginInfo, missing: str) -> str:
    directory = metadata_directory(info.distribution or "")
    return (
        f"there is no module {missing!r}, although the metadata in {directory or 'the environment'} declares it. "
        f"Either the installation is half removed: run `pip install --force-reinstall {info.distribution}` or remove "
        f"that directory; or the entry point names a module that the distribution does not have"
    )
