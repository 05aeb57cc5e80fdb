"""A selection in YAML that can be pasted: what must be given stands there to be replaced, the rest as comments."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from ..selection import Kind
from .signature import Parameter

PLACEHOLDER = "REPLACE_ME"
_KEYS: dict[Kind, str] = {
    "reward": "rewards",
    "advantage_hook": "advantage_hooks",
    "loss_aggregation": "loss_aggregation",
}


def example(kind: Kind, name: str, parameters: Sequence[Parameter], selections: Collection[str] = ()) -> str:
    """Write an example.

    Args:
        kind: The plugin's kind.
        name: What selects it.
        parameters: Those that a selection may set.
        selections: The parameters that take selections of rewards.
    """
    inside = [line for parameter in parameters for line in _lines(parameter, parameter.name in selections)]
    named = f"name: {in_yaml(name)}"
    if kind == "loss_aggregation":
        body = [f"  {named}", *(f"  {line}" for line in inside)]
        return f"{_KEYS[kind]}: {in_yaml(name)}\n" if not inside else "\n".join([f"{_KEYS[kind]}:", *body, ""])
    body = [f"  - {named}", *(f"    {line}" for line in inside)] if inside else [f"  - {in_yaml(name)}"]
    return "\n".join([f"{_KEYS[kind]}:", *body, ""])


def _lines(parameter: Parameter, is_selection: bool) -> list[str]:
    name = in_yaml(parameter.name)
    if parameter.required:
        what = "a reward, or several" if is_selection else one_line(parameter.type or "")
        return [f"{name}: {PLACEHOLDER}  # {what}" if what else f"{name}: {PLACEHOLDER}"]
    try:
        value = in_yaml(parameter.value) if parameter.known else None
    except ValueError:
        value = None
    return [f"# {name}: {value}" if value is not None else f"# {name}:  # default: {one_line(parameter.default or '')}"]


def in_yaml(value: Any) -> str:
    """A plain value on one line of YAML 1.1; characters that a terminal would act on are escaped.

    Raises:
        ValueError: It is not made of what YAML has.
    """
    import yaml  # here, because only examples need it

    looks: dict[str, Any] = {"default_flow_style": True, "width": 1_000_000, "sort_keys": False}
    try:
        for unicode in (True, False):
            text: str = yaml.dump(_lists(value), Dumper=_dumper(), allow_unicode=unicode, **looks)
            text = text.removesuffix("\n").removesuffix("...").removesuffix("\n")
            if "\n" not in text and text.replace("\t", "").isprintable():
                return text
        raise ValueError(f"{value!r} cannot be written as YAML on one line.")
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        raise ValueError(f"{value!r} cannot be written as YAML: {error}") from error


@cache
def _dumper() -> Any:
    """PyYAML's, which would give a key with a line break several lines, with such strings in double quotes."""
    import yaml

    class OneLine(yaml.SafeDumper):
        pass

    def string(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    OneLine.add_representer(str, string)
    return OneLine


def _lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_lists(inner) for inner in value]
    return {key: _lists(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def one_line(text: str) -> str:
    """Text on one line."""
    return " ".join(text.split())
