"""What is checked of a plugin's form when it is loaded: its declaration and its methods' signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import PluginContractError
from ..guard.calls import is_model
from ..types import implements, role_of
from .kinds import FACTS, Kind

OPTIONAL: Mapping[Kind, Mapping[str, tuple[str, ...]]] = {
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


def check_contract(kind: Kind, plugin: Any, subject: str) -> None:
    """Refuse a plugin, an object with the methods of its kind, by a `PluginContractError` that begins with `subject`.

    Its declaration, role and signatures must be those of the contract.
    """
    if is_model(plugin):
        return
    try:
        FACTS[kind].declaration.of(plugin)
    except PluginContractError as error:
        raise PluginContractError(f"{subject}: {error}") from error
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
