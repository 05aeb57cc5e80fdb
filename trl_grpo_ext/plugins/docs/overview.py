"""All plugins at a glance: what state each is in, and one line of its docs.

Reads metadata and source text, imports nothing.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..discovery import ENVIRONMENT_VARIABLE, PluginInfo, is_allowed
from ..selection import Kind
from .docstring import first_sentence
from .source import Found, SourceError, find_definition, split_target

READY = "ready"
STATES = {
    READY: "it can be selected by its name",
    "blocked": f"{ENVIRONMENT_VARIABLE} keeps its distribution from loading",
    "ambiguous": "another distribution offers the name too: select it as `distribution:name`",
    "twice": "its distribution declares the name twice, differently",
    "no module": "the metadata names a module that is not there",
    "no attribute": "the module is there, and its text has no such name",
    "unparsable": "the module's text is not Python that can be parsed",
}
"""What a plugin's state may be. "ready" is no promise: what only an import can find out is not known here."""


@dataclass(frozen=True)
class Entry:
    """A plugin in the list.

    Attributes:
        info: Where it comes from.
        state: One of the `STATES`.
        detail: Why it is not ready; empty where it is.
        summary: The first sentence of its docstring; empty where there is none or it cannot be read.
    """

    info: PluginInfo
    state: str
    detail: str
    summary: str


def overview(shown: Sequence[PluginInfo], installed: Sequence[PluginInfo]) -> list[Entry]:
    """Look at some of the plugins that are installed; all of them are needed to see whose names collide."""
    by_name: dict[tuple[Kind, str], list[PluginInfo]] = defaultdict(list)
    for info in installed:
        if is_allowed(info):
            for name in {info.name, *info.aliases}:
                by_name[info.kind, name].append(info)
    return [_entry(info, by_name[info.kind, info.name]) for info in shown]


def _entry(info: PluginInfo, same_name: Sequence[PluginInfo]) -> Entry:
    found = find_definition(*split_target(info.target)) if all(split_target(info.target)) else _malformed(info)
    summary = first_sentence(ast.get_docstring(found.node) or "") if isinstance(found, Found) else ""
    state, detail = _state(info, same_name, found)
    return Entry(info, state, detail, summary)


def _malformed(info: PluginInfo) -> SourceError:
    return SourceError("no attribute", f"its target {info.target!r} is not of the form module:attribute")


def _state(info: PluginInfo, same_name: Sequence[PluginInfo], found: Found | SourceError) -> tuple[str, str]:
    if not is_allowed(info):
        return "blocked", STATES["blocked"]
    others = [] if info.dotted else [other for other in same_name if other != info]
    if twice := [other for other in others if other.distribution == info.distribution]:
        return "twice", f"{info.distribution} also declares it as {', '.join(other.target for other in twice)}"
    if others:
        names = ", ".join(other.distribution or "" for other in others)
        return "ambiguous", f"{names} offers the name too: select it as {info.distribution}:{info.name}"
    if isinstance(found, SourceError) and found.state in STATES:
        return found.state, found.detail
    return READY, ""
