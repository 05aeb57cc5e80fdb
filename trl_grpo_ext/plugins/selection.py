"""Read one entry of a selection, spelled alike in Python, in YAML and on the command line.

`think_format`, `some-dist:think_format`, `pkg.mod:attr`, or a mapping `{name: ..., weight: 0.2, <parameter>: ...}`. A
string that starts with `{` is such a mapping in YAML's flow style, for parameters on a command line.

Some keys are not the plugin's own parameters: a reward's `weight` and `guard`, and a loss aggregation's
`skip_zero_variance`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ..errors import ConfigurationError
from ..guard.outcomes import shown
from ..guard.untrusted import EXPONENT_WITHOUT_POINT, parse_yaml
from .kinds import FACTS, LABELS, Kind, check_kind, with_article

GUARD_PARAMETERS = ("timeout", "retries", "on_error", "outcomes", "workers", "batch_size", "memory_mb")
"""The keys of a reward's `guard`: the parameters of `trl_grpo_ext.guard.guarded.guarded` except `name`."""


@dataclass(frozen=True)
class Selection:
    """One selected plugin.

    Attributes:
        name: The plugin's name, or the attribute of a dotted path.
        distribution: The part before the colon: a distribution, or a dotted path's module. None for a bare name.
        parameters: Keyword parameters to build the plugin with.
        weight: A reward's weight; None if not given.
        switches: Which of the `switches` of its kind are on.
        guard: A reward's guard, with some of the `GUARD_PARAMETERS`; None without a guard.
    """

    name: str
    distribution: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    weight: float | None = None
    switches: frozenset[str] = frozenset()
    guard: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self.name if self.distribution is None else f"{self.distribution}:{self.name}"

    def plain(self) -> str | dict[str, Any]:
        """The string or mapping that parses to this selection, to save with a run's settings.

        Selections inside the parameters become plain too.
        """
        ours = _settings(self)
        parameters = {name: _plain(value) for name, value in self.parameters.items()}
        return {"name": str(self), **ours, **parameters} if ours or parameters else str(self)


def _settings(selection: Selection) -> dict[str, Any]:
    """The keys of its mapping that are neither the name nor parameters of the plugin."""
    ours: dict[str, Any] = {} if selection.weight is None else {"weight": selection.weight}
    ours |= dict.fromkeys(sorted(selection.switches), True)
    return ours if selection.guard is None else {**ours, "guard": dict(selection.guard)}


def own_keys(kind: Kind) -> tuple[str, ...]:
    """The keys beside `name` that are not the plugin's own parameters."""
    return ("weight", "guard") if kind == "reward" else FACTS[kind].switches


def parse_selection(kind: Kind, value: str | Mapping[str, Any] | Selection) -> Selection:
    """Read one entry of a selection. Only parses: the plugin need not exist.

    Args:
        kind: One of `KINDS`. Only a reward may have a weight.
        value: `name`, `dist:name`, `pkg.mod:attr`, a mapping with a `name`, or such a mapping as a YAML flow string.

    Raises:
        ConfigurationError: The value is none of these; the message shows it.
    """
    check_kind(kind)
    if isinstance(value, Selection):
        reserved = {"name", "weight", *own_keys(kind)}
        if fields := reserved & value.parameters.keys():
            raise ConfigurationError(f"`{min(fields)}` is a field of a Selection, not a parameter: {value!r}.")
        mapping: Mapping[Any, Any] = {**value.parameters, "name": str(value), **_settings(value)}
    elif isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            mapping = parse_yaml(value, shown(value), exponents=True)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} {_how(kind)}") from error
        if not isinstance(mapping, dict):
            raise ConfigurationError(f"{value!r} starts like a YAML mapping but is not one. {_how(kind)}")
    elif isinstance(value, str):
        mapping = {"name": value}
    elif isinstance(value, Mapping):
        mapping = value
    else:
        raise ConfigurationError(f"{value!r} does not select {with_article(kind)}. {_how(kind)}")

    odd = [key for key in mapping if not isinstance(key, str)]
    if odd:
        raise ConfigurationError(
            f"The parameter name {odd[0]!r} in {value!r} is not a string. YAML reads on, off, yes, no and "
            f"numbers as something else: put such a name in quotes."
        )
    parameters = dict(mapping)
    if "name" not in parameters:
        raise ConfigurationError(f"{value!r} does not say which {LABELS[kind]} it selects: no `name`. {_how(kind)}")
    distribution, name = _split(kind, parameters.pop("name"), value)
    weight = None
    if "weight" in parameters:
        if kind != "reward":
            raise ConfigurationError(
                f"Only rewards have a weight, {with_article(kind)} has none: take `weight` out of {value!r}."
            )
        weight = _weight(parameters.pop("weight"), name)
    on = set()
    for switch in FACTS[kind].switches:
        value_of = parameters.pop(switch, False)
        if not isinstance(value_of, bool):
            raise ConfigurationError(f"{switch} of {name!r} is {value_of!r}; it must be true or false.")
        on |= {switch} if value_of else set()
    guard = _guard(parameters.pop("guard"), name) if kind == "reward" and "guard" in parameters else None
    return Selection(name, distribution, parameters, weight, frozenset(on), guard)


def _split(kind: Kind, text: object, value: object) -> tuple[str | None, str]:
    """Split `x:y` at its colon; a bare name has no `x`."""
    if not isinstance(text, str):
        raise ConfigurationError(f"The name in {value!r} is {text!r}, not a string. {_how(kind)}")
    parts = [part.strip() for part in text.split(":")]
    if len(parts) > 2 or not all(parts):
        raise ConfigurationError(f"{text!r} does not select {with_article(kind)}. {_how(kind)}")
    return (None, parts[0]) if len(parts) == 1 else (parts[0], parts[1])


def yaml_hint(parameters: Mapping[Any, Any]) -> str:
    """A hint, with a leading space, at parameters that were meant as numbers; empty if there are none."""
    texts = {name: value for name, value in parameters.items() if isinstance(value, str)}
    listed = ", ".join(f"{n}={text!r}" for n, text in texts.items() if EXPONENT_WITHOUT_POINT.fullmatch(text))
    return f" YAML 1.1 reads {listed} as a string: write it with a point, as in 1.0e-3." if listed else ""


def _weight(weight: object, name: str) -> float:
    if isinstance(weight, bool) or not isinstance(weight, Real):
        hint = yaml_hint({"weight": weight})
        raise ConfigurationError(f"The weight of the reward {name!r} is {weight!r}; it must be a number.{hint}")
    try:
        number = float(weight)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigurationError(f"The weight of the reward {name!r} is {weight!r}; it must be finite.")
    return number


def _guard(guard: object, name: str) -> dict[str, Any]:
    what = f"The guard of the reward {name!r}"
    if not isinstance(guard, Mapping):
        raise ConfigurationError(
            f"{what} is {guard!r}; it must be a mapping that says what to guard against, such as {{timeout: 5, "
            f"on_error: null}}. It may hold: {', '.join(GUARD_PARAMETERS)}."
        )
    for key in guard:
        if key not in GUARD_PARAMETERS:
            close = difflib.get_close_matches(str(key), GUARD_PARAMETERS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            known = ", ".join(GUARD_PARAMETERS)
            raise ConfigurationError(f"{what} has no parameter {key!r}.{hint} It may hold: {known}.")
    if hint := yaml_hint(guard):
        raise ConfigurationError(f"{what} holds a text for a number.{hint}")
    return dict(guard)


def _plain(value: Any) -> Any:
    """A parameter with its inner selections made plain."""
    if isinstance(value, Selection):
        return value.plain()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if type(value) in (list, tuple) else value


def _how(kind: Kind) -> str:
    weight = ", weight: 0.2" if kind == "reward" else ""
    return (
        f"Write a name, `distribution:name`, a dotted path `package.module:attribute`, or a mapping such as "
        f"{{name: some_name{weight}, some_parameter: 1}}."
    )
