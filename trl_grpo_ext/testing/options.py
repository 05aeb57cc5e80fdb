"""What a check needs to know about a plugin: from its author's declaration, from pyproject.toml, from the caller.

A plugin declares it as an attribute `conformance`, a mapping; a distribution in its pyproject.toml under
`[tool.trl-grpo-ext.check."NAME"]`, with the same keys. What the caller gives wins over pyproject.toml, which wins over
the attribute.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..plugins.building import import_plugin
from ..plugins.discovery import find_and_explain
from ..plugins.loading import resolve
from ..plugins.selection import Kind, Selection, parse_selection

ATTRIBUTE = "conformance"
TABLE = ("tool", "trl-grpo-ext", "check")

FOR_EVERY_KIND = ("parameters", "columns", "completions", "prompts", "deterministic", "seed", "rules")
FOR_REWARDS = ("required", "unreadable", "formats", "per_completion", "seconds_per_completion")
FOR_CONTEXTS = ("tokenizer",)
"""Keys that only the caller can give, since a file holds no object."""


@dataclass(frozen=True)
class Subject:
    """A plugin that is to be checked.

    Attributes:
        plugin: The object.
        name: What reports call it.
        options: Everything that is known about it.
    """

    plugin: Any
    name: str
    options: Mapping[str, Any]


def subject(kind: Kind, plugin_or_selection: Any, given: Mapping[str, Any]) -> Subject:
    """Load a plugin, unless it is one already, and put together what is known about it.

    Args:
        kind: The kind.
        plugin_or_selection: An object, or what selects one. A selection without parameters gets those that the plugin
            declares for its checks; one with parameters is taken as it stands.
        given: The caller's options; None is not given.

    Raises:
        ConfigurationError: There is no such option.
        PluginError: As `trl_grpo_ext.plugins.loading.resolve`.
    """
    given = {key: value for key, value in given.items() if value is not None}
    _check_keys(kind, given, f"check({kind!r}, ...)", by_caller=True)
    if isinstance(plugin_or_selection, str | Mapping | Selection):
        asked = parse_selection(kind, plugin_or_selection)
        exported = import_plugin(*_found(kind, asked))
        options = {**declared(kind, exported, asked.name), **given}
        if not asked.parameters:
            asked = replace(asked, parameters=dict(options.get("parameters", {})))
        plugin = resolve(kind, asked).object
        return Subject(plugin, asked.name, {**options, **declared(kind, plugin, asked.name), **given})
    if isinstance(plugin_or_selection, type):
        plugin_or_selection = resolve(kind, plugin_or_selection).object  # which says what to pass instead
    name = str(getattr(plugin_or_selection, "__name__", type(plugin_or_selection).__name__))
    return Subject(plugin_or_selection, name, {**declared(kind, plugin_or_selection, name), **given})


def declared(kind: Kind, exported: Any, name: str) -> dict[str, Any]:
    """What a plugin, or its class, says about itself.

    Raises:
        ConfigurationError: Its `conformance` is no mapping, or has a key that means nothing.
    """
    options: dict[str, Any] = {}
    attribute = getattr(exported, ATTRIBUTE, None)
    if attribute is not None:
        if not isinstance(attribute, Mapping):
            raise ConfigurationError(f"{name}: `{ATTRIBUTE}` must be a mapping, and is {attribute!r:.200}.")
        _check_keys(kind, attribute, f"{name}.{ATTRIBUTE}")
        options |= attribute
    for key in ("deterministic", "per_completion") if kind == "reward" else ("deterministic",):
        value = getattr(exported, key, None)
        if isinstance(value, bool):
            options.setdefault(key, value)
    return options


def project_options(folder: Path) -> dict[str, dict[str, Any]]:
    """The options of each plugin in a folder's pyproject.toml, by name; empty where it has none.

    Raises:
        ConfigurationError: The file, or what it says there, cannot be read.
    """
    file = folder / "pyproject.toml"
    if not file.is_file():
        return {}
    try:
        table: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    for key in TABLE:
        table = table.get(key, {}) if isinstance(table, dict) else {}
    wrong = [name for name, value in table.items() if not isinstance(value, dict)] if isinstance(table, dict) else [""]
    if wrong:
        raise ConfigurationError(f"{file}: [{'.'.join(TABLE)}.{wrong[0]}] must be a table.")
    return dict(table)


def project_name(folder: Path) -> str | None:
    """The name of the distribution whose pyproject.toml is in a folder; None where there is none.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    file = folder / "pyproject.toml"
    if not file.is_file():
        return None
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    name = project.get("name") if isinstance(project, dict) else None
    return name if isinstance(name, str) else None


def as_columns(columns: Any) -> dict[str, list[Any]]:
    """Columns as lists of values: a list is one already, anything else is one value for every row.

    Raises:
        ConfigurationError: It is no mapping, or a list is empty.
    """
    if columns is None:
        return {}
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns):
        raise ConfigurationError(f"columns must map names to values, as in {{answer: [18, 7]}}, got {columns!r:.200}.")
    lists = {name: list(value) if isinstance(value, list | tuple) else [value] for name, value in columns.items()}
    empty = [name for name, values in lists.items() if not values]
    if empty:
        raise ConfigurationError(f"the column {empty[0]!r} has no values; give one, or leave it out.")
    return lists


def as_texts(what: str, texts: Any) -> tuple[Any, ...] | None:
    """Prompts or completions; a single string is one of them.

    Raises:
        ConfigurationError: There are none, or they are no list.
    """
    if texts is None:
        return None
    if isinstance(texts, str):
        return (texts,)
    if not isinstance(texts, Sequence) or not texts:
        raise ConfigurationError(f"{what} must be a list with at least one entry, got {texts!r:.200}.")
    return tuple(texts)


def _found(kind: Kind, asked: Selection) -> tuple[Any, Selection, str | None]:
    info, why_not = find_and_explain(kind, asked)
    return info, asked, why_not


def _check_keys(kind: Kind, options: Mapping[str, Any], place: str, by_caller: bool = False) -> None:
    known = [*FOR_EVERY_KIND, *(FOR_REWARDS if kind == "reward" else FOR_CONTEXTS if by_caller else ())]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ConfigurationError(f"{place} has no option {unknown[0]!r}; there are {', '.join(known)}.")
