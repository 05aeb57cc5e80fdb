"""What is checked of a plugin's form when it is loaded: its declaration, its methods' signatures, and slips in names.

Nobody reads a misspelt declaration or method, so it would pass in silence. Authors' own attributes are left alone.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..errors import PluginContractError
from ..guard.calls import is_model, parameters_of
from ..types import Declaration, implements, role_of
from .kinds import FACTS, Kind

_STATE: Mapping[str, tuple[str, ...]] = {"state_dict": (), "load_state_dict": ("state",)}
OPTIONAL: Mapping[Kind, Mapping[str, tuple[str, ...]]] = {
    "reward": {"start_scoring": ("completions",), "start_workers": ()},
    "advantage_hook": _STATE,
    "prompt_sampler": {"start": ("pool",), "observe": ("outcomes",), "metrics": (), **_STATE},
    "token_loss": {"on_rollout": ("rollout",), "measures": ("terms",)},
}
"""The methods that a plugin of a kind may have beside those of its protocol, with their positional parameters."""


def check_contract(kind: Kind, plugin: Any, subject: str) -> None:
    """Refuse an object whose declaration, role or signatures are not its kind's; the error begins with `subject`."""
    if is_model(plugin):
        return
    try:
        FACTS[kind].declaration.of(plugin)
    except PluginContractError as error:
        raise PluginContractError(f"{subject}: {error}") from error
    for method, parameters in _methods(kind).items():
        if implements(plugin, method):
            _check_signature(method, getattr(plugin, method), parameters, subject)
    states = [method for method in _STATE if implements(plugin, method)]
    if len(states) == 1 and states[0] in _methods(kind):
        raise PluginContractError(f"{subject} has {states[0]} alone. A state needs state_dict and load_state_dict.")
    for name, instead in _slips(kind, plugin):
        raise PluginContractError(f"{subject} has {name!r}, which nobody reads: {instead}.")
    if kind == "advantage_hook":
        role_of(plugin, subject)


def _slips(kind: Kind, plugin: Any) -> Iterator[tuple[str, str]]:
    """Attributes that look like a declaration or a method and are none, each with what to write instead."""
    declaration = FACTS[kind].declaration
    fields = [*inspect.signature(declaration).parameters]
    needs = [f"{verb}_{need}" for need in declaration.KNOWN["needs"] for verb in ("needs", "reads")]
    methods = {**_methods(kind), **OPTIONAL.get(kind, {})}
    own = parameters_of(type(plugin)) or {}  # attributes of these names are the author's
    for name in dir(plugin):
        value = inspect.getattr_static(plugin, name)
        if name.startswith("_") or name == "declares" or name in methods or name in own:
            continue
        if isinstance(value, Declaration) and getattr(plugin, "declares", None) is None:
            yield name, "name it `declares`"
        elif name in fields and _is_taken(declaration, name, value):
            yield name, f"write declares = {declaration.__name__}({name}=...)"
        elif isinstance(value, bool) and name not in fields and (meant := _meant(name, [*fields, *needs])):
            yield name, f"declare {meant} by declares = {declaration.__name__}(...)"
        elif callable(value) and (meant := _meant(name, methods)):
            yield name, f"did you mean the method {meant!r}"


def _is_taken(declaration: type[Declaration], name: str, value: Any) -> bool:
    """Whether the declaration would take this value under that name, and it would change anything."""
    try:
        return bool(declaration(**{name: value}).shown())
    except PluginContractError:
        return False


def _meant(name: str, known: Iterable[str]) -> str | None:
    """The name that differs by a letter or so; short names have too many neighbours."""
    long = {one.replace("_", "").casefold(): one for one in known if len(one) > 8}
    found = difflib.get_close_matches(name.replace("_", "").casefold(), long, 1, cutoff=0.905)
    return long[found[0]] if found else None


def _methods(kind: Kind) -> dict[str, tuple[str, ...]]:
    """The methods by name with the parameters that are passed by position; a reward's are all passed by keyword."""
    if kind == "reward":
        return {}
    protocol = FACTS[kind].protocol
    taken = {name: tuple(inspect.signature(getattr(protocol, name)).parameters)[1:] for name in FACTS[kind].methods}
    return {**taken, **OPTIONAL.get(kind, {})}


def _check_signature(method: str, function: Callable[..., Any], parameters: tuple[str, ...], subject: str) -> None:
    called = f"{method}({', '.join(parameters)})"
    if inspect.iscoroutinefunction(function):
        raise PluginContractError(f"{subject}: {method} is async, and called as {called}: make it a plain method.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some extension types have none
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise PluginContractError(f"{subject}: {method}{signature} is called as {called}: {error}.") from error
