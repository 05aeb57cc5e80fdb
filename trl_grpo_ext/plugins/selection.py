"""Read one entry of a selection, spelled alike in Python, in YAML and on the command line.

`think_format`, `some-dist:think_format`, `pkg.mod:attr`, or a mapping `{name: ..., weight: 0.2, <parameter>: ...}`. A
string that starts with `{` is such a mapping in YAML's flow style, for a command line. Keys beside the parameters are a
reward's `weight` and `guard`, and a loss aggregation's `skip_zero_variance`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigurationError
from ..guard.outcomes import shown
from ..guard.parameters import checked_flag, checked_number
from ..guard.untrusted import EXPONENT_WITHOUT_POINT, parse_yaml
from .kinds import FACTS, Kind, kind_of, with_article


@dataclass(frozen=True)
class Selection:
    """One selected plugin."""

    name: str  # the plugin's, or the attribute of a dotted path
    distribution: str | None = None  # what is before the colon, or a dotted path's module; None for a bare name
    parameters: dict[str, Any] = field(default_factory=dict)  # to build the plugin with
    weight: float | None = None  # a reward's, if given
    switches: frozenset[str] = frozenset()  # those of its kind's that are on
    guard: dict[str, Any] | None = None  # a reward's, as parameters of `trl_grpo_ext.guard.guarded.guarded`

    def __str__(self) -> str:
        return self.name if self.distribution is None else f"{self.distribution}:{self.name}"

    def plain(self) -> str | dict[str, Any]:
        """The string or mapping that parses to this selection, in which inner selections are plain too."""
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

    It is `name`, `dist:name`, `pkg.mod:attr`, a mapping with a `name`, or such a mapping as a YAML flow string.

    Raises:
        ConfigurationError: The value is none of these; the message shows it.
    """
    kind = kind_of(kind)
    mapping: Any = value
    if isinstance(value, Selection):
        mapping = {**value.parameters, "name": str(value), **_settings(value)}
    elif isinstance(value, str) and value.lstrip().startswith("{"):
        mapping = parse_yaml(value, shown(value), exponents=True)
    elif isinstance(value, str):
        mapping = {"name": value}
    text = mapping.get("name") if isinstance(mapping, Mapping) else None
    parts = [part.strip() for part in text.split(":")] if isinstance(text, str) else []
    if len(parts) not in (1, 2) or not all(parts):
        example = f"{{name: some_name{', weight: 0.2' if kind == 'reward' else ''}, some_parameter: 1}}"
        forms = f"a name, `distribution:name`, a dotted path `module:attribute`, or a mapping such as {example}"
        raise ConfigurationError(f"{value!r} does not select {with_article(kind)}. Write {forms}.")
    for key in mapping:
        if not isinstance(key, str):
            what = f"The parameter name {key!r} in {value!r} is not a string"
            raise ConfigurationError(f"{what}. YAML reads on, off, yes, no and numbers so: put it in quotes.")
    parameters = {key: of for key, of in mapping.items() if key != "name"}
    *before_colon, name = parts
    if kind != "reward" and "weight" in parameters:
        raise ConfigurationError(f"Only rewards have a weight: take `weight` out of {value!r}.")
    weight = None
    if "weight" in parameters:
        label = f"The weight of the reward {name!r}"
        weight = checked_number(label, parameters.pop("weight"), "a finite number (in YAML 1.0e-3, not 1e-3)")
    guard: Any = None
    if kind == "reward" and "guard" in parameters:
        guard = parameters.pop("guard")
        if not isinstance(guard, Mapping):
            wanted = "a mapping such as {timeout: 5, on_error: null}"
            raise ConfigurationError(f"The guard of the reward {name!r} is {guard!r}; it must be {wanted}.")
    on = {one for one in FACTS[kind].switches if checked_flag(f"{name}: {one}", parameters.pop(one, False))}
    distribution = before_colon[0] if before_colon else None
    return Selection(name, distribution, parameters, weight, frozenset(on), None if guard is None else dict(guard))


def yaml_hint(parameters: Mapping[Any, Any]) -> str:
    """A hint, with a leading space, at parameters that were meant as numbers; empty if there are none."""
    texts = {name: value for name, value in parameters.items() if isinstance(value, str)}
    listed = ", ".join(f"{n}={text!r}" for n, text in texts.items() if EXPONENT_WITHOUT_POINT.fullmatch(text))
    return f" YAML 1.1 reads {listed} as a string: write it with a point, as in 1.0e-3." if listed else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Selection):
        return value.plain()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if type(value) in (list, tuple) else value
