"""Which plugins a name means when nobody says of which kind: all of them."""

from __future__ import annotations

import ast

from ...errors import ConfigurationError, UnknownPluginError
from ..discovery import Installed, PluginInfo, find, near
from ..metadata import normal
from ..selection import LABELS, Kind
from .signature import method_of
from .source import Found, SourceError, find_definition

_METHODS: dict[Kind, tuple[str, ...]] = {
    "advantage_hook": ("on_rollout", "on_forward"),
    "loss_aggregation": ("weights", "reduce"),
}


def named(name: str, kind: Kind | None, installed: Installed) -> list[PluginInfo]:
    """The plugins that a name, an alias, `distribution:name` or a dotted path means.

    Raises:
        UnknownPluginError: There is none; the message has near names.
        ConfigurationError: The name cannot be one.
    """
    first, colon, rest = (part.strip() for part in name.partition(":"))
    wanted = rest if colon else first
    if not wanted or (colon and not first) or ":" in rest:
        raise ConfigurationError(
            f"{name!r} names no plugin: write a name, `distribution:name` or `package.module:attribute`."
        )
    found = [
        info
        for info in installed.plugins
        if info.answers_to(wanted)
        and kind in (None, info.kind)
        and (not colon or normal(info.distribution or "") == normal(first))
    ]
    if found:
        return found
    if colon:
        path = find_definition(first, rest)
        if not isinstance(path, SourceError) or path.state not in ("no module", "no attribute"):
            return [find(kind or _guessed_kind(path), name)]
        if normal(first) not in installed.distributions:
            raise UnknownPluginError(
                f"{name!r} names no {LABELS[kind] if kind else 'plugin'}: no installed distribution is called "
                f"{first!r}, and {path.detail}."
            )
    raise UnknownPluginError(_unknown(name, wanted, kind, first if colon else None, installed))


def _guessed_kind(found: Found | SourceError) -> Kind:
    """The kind of what a dotted path names, by its methods; a reward where there are none of the other kinds'."""
    if isinstance(found, Found) and isinstance(found.node, ast.ClassDef):
        for kind, methods in _METHODS.items():
            if any(method_of(found, method) for method in methods):
                return kind
    return "reward"


def _unknown(name: str, wanted: str, kind: Kind | None, distribution: str | None, installed: Installed) -> str:
    what = LABELS[kind] if kind else "plugin"
    offered = [info for info in installed.plugins if kind in (None, info.kind)]
    if distribution is not None:
        offered = [info for info in offered if normal(info.distribution or "") == normal(distribution)]
        text = f"The distribution {distribution!r} offers no {what} {wanted!r}."
    else:
        text = f"No installed distribution offers a {what} called {wanted!r}."
    names = [each for info in offered for each in (info.name, *info.aliases)]
    text += near(wanted, names)
    text += f" `trl-grpo-ext list{f' --distribution {distribution}' if distribution else ''}` shows what there is."
    if installed.unreadable:
        text += f" Distributions whose metadata cannot be read: {'; '.join(installed.unreadable)}."
    return text
