"""Import a plugin and build the usable object."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .. import errors
from ..guard.calls import PASSED_BY_TRL, parameters_of
from ..guard.outcomes import exception_text
from .discovery import PluginInfo, explain_neither, scan, split_target, suggest_names
from .kinds import FACTS
from .selection import own_keys, yaml_hint


def import_plugin(info: PluginInfo) -> Any:
    """Import a plugin's module, get its attribute, and check its contract version."""
    module_name, attribute = split_target(info.target)
    if not module_name or not attribute:
        raise broken(info, f"its target {info.target!r} is not of the form module:attribute")

    with plugin_code(info, f"importing {module_name!r}"):
        try:
            found = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if info.dotted and error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                problem = f"there is no module {error.name!r} on sys.path"
                raise errors.UnknownPluginError(explain_neither(info, problem, scan())) from error
            raise
    with plugin_code(info, f"reading {attribute!r} from {module_name!r}"):
        for part in attribute.split("."):
            owner = found
            try:
                found = getattr(owner, part)
            except AttributeError as error:
                hint = suggest_names(part, [name for name in dir(owner) if not name.startswith("_")])
                problem = f"the module {module_name!r} has no attribute {attribute!r}.{hint}"
                if info.dotted:
                    raise errors.UnknownPluginError(explain_neither(info, problem, scan())) from error
                raise broken(info, problem) from error
    return found


@contextmanager
def plugin_code(info: PluginInfo, what: str) -> Iterator[None]:
    """Run code of a plugin: all that it raises is a `BrokenPluginError`, except Ctrl-C and errors of this package."""
    try:
        yield
    except errors.PluginContractError as error:  # of a declaration, which does not know whose it is
        raise error if str(info) in str(error) else errors.reworded(error, f"{info}: {error}") from error
    except (errors.TRLGRPOExtError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: a plugin that exits must not end the run in silence
        problem = f"{what} raised {type(error).__name__}: {exception_text(error)}"
        raise broken(info, problem) from error


def build(info: PluginInfo, exported: Any, parameters: dict[str, Any]) -> Any:
    """Make the usable object: call a class or factory, bind a function's parameters, take an instance as it is."""
    makes_reward = info.kind == "reward" and _is_factory(exported)
    if _is_function(exported) and not makes_reward:
        if info.kind != "reward" or not parameters:
            return exported  # of the wrong kind, which the check that follows says better
        check_parameters(info, exported, parameters)
        return functools.partial(exported, **parameters)  # picklable, and TRL names it after the function
    if not isinstance(exported, type) and not makes_reward:
        if parameters:
            what = f"{describe(exported)}, already built, and takes no parameters"
            raise errors.PluginParameterError(f"{info} is {what}; it was given {_shown(parameters)}.")
        return exported
    check_parameters(info, exported, parameters)
    try:
        made = exported(**parameters)
        if makes_reward and not callable(made):
            raise TypeError(f"it takes neither completions nor **columns and returned {made!r:.80}, no reward function")
        return made
    except (TypeError, ValueError) as error:
        what = f"{info} refused its parameters ({_shown(parameters) or 'none'}) with {type(error).__name__}"
        raise errors.PluginParameterError(f"{what}: {str(error).removesuffix('.')}.{yaml_hint(parameters)}") from error


def check_parameters(info: PluginInfo, exported: Callable[..., Any], parameters: dict[str, Any]) -> None:
    """Check parameters against the signature before the call, so that a typo does not look like the plugin's bug."""
    known = parameters_of(exported)
    if known is None:
        return
    is_class = isinstance(exported, type) or _is_factory(exported)
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: one for name, one in known.items() if one.kind in keyword}
    takes = {name: one for name, one in named.items() if is_class or name not in PASSED_BY_TRL}
    listed = f"It takes: {', '.join(map(str, takes.values())) or 'nothing'}."
    # A function's **kwargs are for the dataset's columns, so a name that only they would take is a typo.
    open_ended = is_class and any(one.kind is one.VAR_KEYWORD for one in known.values())
    for name in parameters:
        if name in takes or open_ended:
            continue
        near = suggest_names(name, [*takes, *own_keys(info.kind)])
        raise errors.PluginParameterError(f"{info} has no parameter {name!r}.{near} {listed}")


def _is_factory(exported: Any) -> bool:
    """Whether this is a function without a parameter for what TRL passes a reward, as `trl.rewards.get_...` are."""
    known = parameters_of(exported) if _is_function(exported) else None
    if known is None:
        return False
    open_ended = any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in known.values())
    return not open_ended and PASSED_BY_TRL.isdisjoint(known)


def _is_function(exported: Any) -> bool:
    return inspect.isroutine(exported) or isinstance(exported, functools.partial)


def describe(plugin: Any) -> str:
    if inspect.isroutine(plugin):
        return f"the function {getattr(plugin, '__qualname__', plugin)}"
    return f"an object of type {type(plugin).__qualname__}"


def broken(info: PluginInfo, problem: str) -> errors.BrokenPluginError:
    """An error that names the distribution and entry point, what it must export, and what to do."""
    facts = FACTS[info.kind]
    text = f"{info} cannot be loaded: {problem.removesuffix('.')}{'' if problem.endswith('?') else '.'}"
    if not info.dotted:
        entry = f"{info.name} = {info.target!r} in the group {facts.group}"
        text += f" Its entry point is {entry}, which must export {facts.required}."
    return errors.BrokenPluginError(text)


def _shown(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in parameters.items())
