"""`trl-grpo-ext check`: the conformance kit on the command line. Heavy imports happen when the command runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ..errors import ConfigurationError, PluginError
from ..guard.untrusted import one_line, printable
from .console import (
    KIND_HELP,
    kind_of,
    messages,
    paragraph,
    results,
)

if TYPE_CHECKING:
    from ..plugins.discovery import Installed, PluginInfo
    from ..plugins.kinds import Kind
    from ..testing import Report

BROKEN, FAILED, NO_EFFECT = 1, 2, 3


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("check", short_help="Does a plugin keep the rules of its kind?")(check_command)


@dataclass(frozen=True)
class _Unloaded:
    """A plugin that could not be checked."""

    kind: Kind
    subject: str
    error: str

    def plain(self) -> dict[str, Any]:
        return {"subject": self.subject, "kind": self.kind, "ok": False, "error": self.error}


def check_command(
    selection: Annotated[
        str | None,
        typer.Argument(
            metavar="SELECTION",
            help="A name, distribution:name, a dotted path, or a mapping such as '{name: length_target, target: 100}'.",
        ),
    ] = None,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help=f"Only this kind: {KIND_HELP}")] = None,
    distribution: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Check every plugin of this distribution."),
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for each rule, 10 by default.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 if nothing shows that a plugin does anything.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of reports.")] = False,
    list_rules: Annotated[bool, typer.Option("--list-rules", help="Print the rules of one kind, or all.")] = False,
) -> None:
    """Check that a plugin keeps the rules that training relies on.

    Exits with 1 if a rule is broken and with 2 if a plugin cannot be loaded. With --strict, exits with 3 if all rules
    are kept but nothing shows that a plugin does anything.
    """
    wanted = kind_of(kind)
    if list_rules:
        _print_rules(wanted, as_json)
        return
    if (selection is None) == (distribution is None):
        raise ConfigurationError("Say what to check: either a selection or --distribution NAME.")
    from ..plugins.discovery import scan

    installed = scan()
    for broken in installed.unreadable:
        messages().print(Text(one_line(f"The metadata of an installed distribution cannot be read: {broken}")))
    if installed.unreadable:  # on import torch searches all entry points for devices, and would fail
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    if selection is not None:
        subjects = _select(selection, wanted, installed)
    else:
        subjects = _offered(distribution or "", wanted, installed)
    given = {} if timeout is None else {"timeout": timeout}
    found = []
    for place, (info, asked) in enumerate(subjects, 1):
        messages().print(Text(one_line(f"Checking {info.name}, {place} of {len(subjects)}")), style="dim")
        found.append(_check(info, asked, {**_project_settings(info), **given}))
    _finish(found, as_json, strict)


def _select(selection: str, kind: Kind | None, installed: Installed) -> list[tuple[PluginInfo, Any]]:
    """The plugins that a selection matches, each with a selection that matches it alone."""
    from ..plugins.description import find_named
    from ..plugins.selection import parse_selection

    asked = parse_selection(kind or "reward", selection)
    plain = asked.plain()
    given: dict[str, Any] = plain if isinstance(plain, dict) else {}
    found = find_named(str(asked), kind, installed)
    return [(info, {**given, "name": info.selection}) for info in found]


def _offered(distribution: str, kind: Kind | None, installed: Installed) -> list[tuple[PluginInfo, Any]]:
    from ..plugins.discovery import suggest_names

    found = [(info, {"name": info.selection}) for info in installed.of(distribution) if kind in (None, info.kind)]
    if not found:
        names = {info.distribution or "" for info in installed.plugins}
        raise ConfigurationError(
            f"No distribution {distribution!r} with such plugins is installed.{suggest_names(distribution, names)}"
        )
    return found


def _project_settings(info: PluginInfo) -> dict[str, Any]:
    """A plugin's check settings from pyproject.toml in the current folder, if the plugin belongs to that project."""
    from ..plugins.metadata import normalise
    from ..testing.kit import project

    name, options = project(Path.cwd())
    same = name is not None and normalise(name) == normalise(info.distribution or "")
    return options.get(info.name, {}) if same else {}


def _check(info: PluginInfo, asked: Mapping[str, Any], options: Mapping[str, Any]) -> Report | _Unloaded:
    from ..testing import check

    try:
        return check(info.kind, asked, **options)
    except (PluginError, ConfigurationError) as error:
        return _Unloaded(info.kind, info.name, str(error))


def _finish(found: list[Report | _Unloaded], as_json: bool, strict: bool) -> None:
    if as_json:
        typer.echo(json.dumps([one.plain() for one in found], indent=2))
    console = results()
    for place, one in enumerate(found):
        if place and not as_json:
            console.print()
        if isinstance(one, _Unloaded):
            messages().print(Text(printable(f"{one.subject}: {one.error}")), style="red", soft_wrap=True)
        elif not as_json:
            for indent, parts in one.lines():
                paragraph(console, Text.assemble(*parts), indent=indent)
    reports = [one for one in found if not isinstance(one, _Unloaded)]
    if len(reports) < len(found):
        raise typer.Exit(FAILED)
    if not all(one.ok for one in reports):
        raise typer.Exit(BROKEN)
    if strict and any(one.no_effect for one in reports):
        raise typer.Exit(NO_EFFECT)


def _print_rules(kind: Kind | None, as_json: bool) -> None:
    from ..testing import RULES

    rules = [rule for rule in RULES if kind in (None, rule.kind)]
    if as_json:
        fields = ("name", "kind", "summary", "why")
        typer.echo(json.dumps([{name: getattr(rule, name) for name in fields} for rule in rules], indent=2))
        return
    console = results()
    for rule in rules:
        paragraph(console, Text(rule.name, style="bold"))
        paragraph(console, Text(rule.summary), indent=2)
        paragraph(console, Text(rule.why, style="dim"), indent=2)
