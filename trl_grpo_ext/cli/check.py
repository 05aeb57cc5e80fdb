"""`trl-grpo-ext check`: the conformance kit on the command line. Heavy imports happen inside, when it runs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ..errors import ConfigurationError, PluginError
from .console import (
    KIND_HELP,
    complete_distribution,
    complete_kind,
    complete_name,
    kind_of,
    messages,
    one_line,
    paragraph,
    printable,
    results,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..plugins.discovery import Installed, PluginInfo
    from ..plugins.kinds import Kind
    from ..testing import Report

BROKEN, FAILED = 1, 2


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
            autocompletion=complete_name,
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help=f"Only this kind: {KIND_HELP}", autocompletion=complete_kind)
    ] = None,
    distribution: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Check all that this offers.", autocompletion=complete_distribution),
    ] = None,
    columns: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML or JSON: for each column a value, or a list with one per completion."),
    ] = None,
    completions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Completions to score: a YAML or JSON list, .jsonl, or a line each in .txt."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the batches that the kit makes.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of reports.")] = False,
    list_rules: Annotated[bool, typer.Option("--list-rules", help="Print the rules, of one kind or all.")] = False,
) -> None:
    """Check that a plugin keeps the rules that training relies on.

    Exits with 1 where one is broken, with 2 where a plugin cannot be loaded.
    """
    wanted = kind_of(kind)
    if list_rules:
        _print_rules(wanted, as_json)
        return
    if (selection is None) == (distribution is None):
        raise ConfigurationError("Say what to check: a selection, or --distribution NAME; and not both.")
    from ..plugins.discovery import scan

    installed = scan()
    for broken in installed.unreadable:
        messages().print(Text(one_line(f"The metadata of an installed distribution cannot be read: {broken}")))
    if installed.unreadable:  # torch looks through all entry points for devices when it is imported, and would fail
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    if selection is not None:
        subjects = _selected(selection, wanted, installed)
    else:
        subjects = _offered(distribution or "", wanted, installed)
    given: dict[str, Any] = {"seed": seed}
    given |= {} if columns is None else {"columns": _read_columns(columns)}
    given |= {} if completions is None else {"completions": _read_completions(completions)}
    found = []
    for place, (info, asked) in enumerate(subjects, 1):
        messages().print(Text(one_line(f"Checking {info.name}, {place} of {len(subjects)}")), style="dim")
        found.append(_checked(info, asked, {**_of_this_project(info), **given}))
    _finish(found, as_json)


def _selected(selection: str, kind: Kind | None, installed: Installed) -> list[tuple[PluginInfo, Any]]:
    """The plugins that a selection means, each with the selection that means it alone."""
    from ..plugins.description import named
    from ..plugins.selection import parse_selection

    asked = parse_selection(kind or "reward", selection)
    plain = asked.plain()
    given: dict[str, Any] = plain if isinstance(plain, dict) else {}
    found = named(str(asked), kind, installed)
    return [(info, {**given, "name": _unique_name(info, asked.name)}) for info in found]


def _offered(distribution: str, kind: Kind | None, installed: Installed) -> list[tuple[PluginInfo, Any]]:
    from ..plugins.discovery import near
    from ..plugins.metadata import normal

    offered = [info for info in installed.plugins if normal(info.distribution or "") == normal(distribution)]
    found = [(info, {"name": _unique_name(info, info.name)}) for info in offered if kind in (None, info.kind)]
    if not found:
        names = {info.distribution or "" for info in installed.plugins}
        raise ConfigurationError(
            f"No distribution {distribution!r} with such plugins is installed.{near(distribution, names)}"
        )
    return found


def _unique_name(info: PluginInfo, name: str) -> str:
    return info.target if info.dotted else f"{info.distribution}:{name}"


def _of_this_project(info: PluginInfo) -> dict[str, Any]:
    """What the pyproject.toml of the current folder says for the check of a plugin, if the plugin is that project's."""
    from ..plugins.metadata import normal
    from ..testing.kit import project_name, project_options

    here = Path.cwd()
    name = project_name(here)
    if name is None or normal(name) != normal(info.distribution or ""):
        return {}
    return project_options(here).get(info.name, {})


def _checked(info: PluginInfo, asked: Mapping[str, Any], options: Mapping[str, Any]) -> Report | _Unloaded:
    from ..testing import check  # imports torch

    try:
        with contextlib.redirect_stdout(sys.stderr):  # results go to stdout, and a plugin's chatter is none
            return check(info.kind, asked, **options)
    except (PluginError, ConfigurationError) as error:
        return _Unloaded(info.kind, info.name, str(error))


def _finish(found: list[Report | _Unloaded], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([one.plain() for one in found], indent=2))
    console = results()
    for one in found:
        if isinstance(one, _Unloaded):
            messages().print(Text(printable(f"{one.subject}: {one.error}")), style="red", soft_wrap=True)
        elif not as_json:
            _print(one, console)
    if any(isinstance(one, _Unloaded) for one in found):
        raise typer.Exit(FAILED)
    if not all(one.ok for one in found if not isinstance(one, _Unloaded)):
        raise typer.Exit(BROKEN)


def _print(report: Report, console: Console) -> None:
    from ..plugins.kinds import LABELS

    counts = f"{len(report.passed)} rules kept, {len(report.violations)} broken, {len(report.skipped)} not checked"
    style = "bold green" if report.ok else "bold red"
    paragraph(
        console, Text.assemble((one_line(f"{LABELS[report.kind]} {report.subject}"), "bold"), ": ", (counts, style))
    )
    for violation in report.violations:
        paragraph(console, Text.assemble(("broken ", "red"), (violation.rule.name, "bold red")), indent=2)
        parts = (
            ("rule", violation.rule.summary),
            ("found", violation.message),
            ("smallest example", violation.example),
            ("why", violation.rule.why),
        )
        for label, text in parts:
            for place, line in enumerate(printable(text).split("\n") if text else ()):
                paragraph(console, Text.assemble((f"{label}: " if not place else "", "dim"), line), indent=4)
    for rule, reason in report.skipped:
        paragraph(console, Text.assemble(("not checked ", "yellow"), rule.name, f": {one_line(reason)}"), indent=2)
    if report.passed:
        kept = ", ".join(rule.name for rule in report.passed)
        paragraph(console, Text.assemble(("kept ", "green"), kept), indent=2)
    for name, value in report.measured.items():
        text = f"{value:.3g}" if isinstance(value, float) else one_line(str(value))
        paragraph(console, Text.assemble(("measured ", "dim"), f"{name}: {text}"), indent=2)


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


def _read_columns(file: Path) -> dict[str, Any]:
    value = _read(file)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigurationError(f"{file} must hold a mapping from columns to values, such as `answer: '18'`.")
    return value


def _read_completions(file: Path) -> list[Any]:
    value = _read(file)
    if not isinstance(value, list) or not value or not all(isinstance(one, str | list) for one in value):
        raise ConfigurationError(f"{file} must hold a list of completions, each a string or a list of messages.")
    return value


def _read(file: Path) -> Any:
    import yaml  # JSON is YAML, but for what the one calls a number

    try:
        text = file.read_text(encoding="utf-8")
        match file.suffix:
            case ".txt":
                return text.splitlines()
            case ".jsonl":
                return [json.loads(line) for line in text.splitlines() if line.strip()]
            case ".json":
                return json.loads(text)
            case _:
                return yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
