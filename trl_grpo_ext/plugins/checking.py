"""What is checked of a plugin's form when it is loaded: its declaration, its methods' signatures, and slips in names.

A misspelt declaration would pass in silence, for an attribute that nobody reads is no error in Python. So an attribute
is refused if its name is that of a declaration or of an optional method, or one letter away from it, and its value is
one that this could have. Authors' own attributes are left alone: constructor's parameters, names that are short, values
that a declaration would not take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import PluginContractError
from ..guard.calls import is_model
from ..types import Declaration, implements, role_of
from .kinds import FACTS, Kind

OPTIONAL: Mapping[Kind, Mapping[str, tuple[str, ...]]] = {
    "reward": {"start_scoring": ("completions",), "start_workers": ()},
    "advantage_hook": {"state_dict": (), "load_state_dict": ("state",)},
    "prompt_sampler": {
        "start": ("pool",),
        "observe": ("outcomes",),
        "state_dict": (),
        "load_state_dict": ("state",),
        "metrics": (),
    },
    "token_loss": {"on_rollout": ("rollout",), "measures": ("terms",)},
}
"""The methods that a plugin of a kind may have beside those of its protocol, with their positional parameters."""

_DISTINCTIVE = 9
"""Letters from which a name is so long that another one, one letter away, is hardly meant for something else."""


def check_contract(kind: Kind, plugin: Any, subject: str) -> None:
    """Refuse a plugin whose declaration, role, signatures or names are not those of the contract.

    Args:
        kind: One of `KINDS`.
        plugin: An object with the methods of its kind.
        subject: What begins the sentence about it.

    Raises:
        PluginContractError: Says what to write instead.
    """
    if is_model(plugin):
        return
    try:
        FACTS[kind].declaration.of(plugin)
    except PluginContractError as error:
        raise PluginContractError(f"{subject}: {error}") from error
    for name, instead in _slips(kind, plugin):
        raise PluginContractError(f"{subject} has {name!r}, which nobody reads: {instead}.")
    for method, parameters in _methods(kind).items():
        if implements(plugin, method):
            _check_signature(method, getattr(plugin, method), parameters, subject)
    if kind == "advantage_hook":
        role_of(plugin, subject)


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
        raise PluginContractError(
            f"{subject}: {method} is async, and it is called as {called}: make it a plain method."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some extension types have none
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise PluginContractError(
            f"{subject}: {method}{signature} cannot be called as {called}: {error}. Give it these parameters."
        ) from error


def _slips(kind: Kind, plugin: Any) -> Iterator[tuple[str, str]]:
    """Attributes that look like a declaration or a method and are none, each with what to write instead."""
    declaration = FACTS[kind].declaration
    targets, own = list(_targets(declaration)), _parameters(plugin)
    methods = [*_methods(kind), *OPTIONAL.get(kind, {})]
    declares = getattr(plugin, "declares", None) is not None
    for name in dir(plugin):
        if name.startswith("_") or name == "declares" or name in methods or name in own:
            continue
        if not declares and isinstance(inspect.getattr_static(plugin, name, None), Declaration):
            yield name, "name it `declares`"
        for target, instead in targets:
            if _is_meant(name, target) and _fits(declaration, target, _value(plugin, name)):
                yield name, instead
        for method in methods:
            if _is_meant(name, method) and callable(_value(plugin, name)):
                yield name, f"did you mean the method {method!r}"


def _targets(declaration: type[Declaration]) -> Iterator[tuple[str, str]]:
    """The names that an author may write for a declaration, with what to write."""
    for name in inspect.signature(declaration).parameters:
        yield name, f"write declares = {declaration.__name__}({name}=...)"
    for need in declaration.KNOWN["needs"]:
        for verb in ("needs", "reads"):
            yield f"{verb}_{need}", f"write declares = {declaration.__name__}(needs=({need!r},))"


def _is_meant(name: str, target: str) -> bool:
    """Whether a name is another one, or one letter away if that one is long."""
    one, other = (text.replace("_", "").casefold() for text in (name, target))
    if len(other) < _DISTINCTIVE:
        return name == target
    same = next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    mine, theirs = one[same:], other[same:]
    swapped = mine[:2] == theirs[:2][::-1] and mine[2:] == theirs[2:]
    return mine == theirs or mine[1:] == theirs or mine == theirs[1:] or mine[1:] == theirs[1:] or swapped


def _fits(declaration: type[Declaration], target: str, value: Any) -> bool:
    """Whether a declaration would take this value under that name, and it would change anything."""
    if target not in inspect.signature(declaration).parameters:
        return value is True
    try:
        return bool(declaration(**{target: value}).shown())
    except PluginContractError:
        return False


def _value(plugin: Any, name: str) -> Any:
    try:
        return getattr(plugin, name)
    except Exception:  # a property of the author's
        return None


def _parameters(plugin: Any) -> Mapping[str, Any]:
    """The parameters of a plugin's constructor, which are the author's own names."""
    try:
        return inspect.signature(type(plugin)).parameters
    except (TypeError, ValueError):
        return {}
