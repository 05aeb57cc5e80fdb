"""`trl-grpo-ext list`: what is installed. Reads metadata and source text; no plugin is imported."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError
from ..guard.untrusted import escape, one_line
from ..plugins.kinds import LABELS
from .console import KIND_HELP, complete_distribution, complete_kind, kind_of, messages, paragraph, results

if TYPE_CHECKING:
    from rich.console import Console

    from ..plugins.description import Entry
    from ..plugins.discovery import Installed, PluginInfo

_NARROW = 90
"""On a narrower console a table would break names, so each plugin gets lines of its own."""


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("list", short_help="Installed plugins and their state.")(list_command)


def list_command(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", help=f"Only this kind: {KIND_HELP}", autocompletion=complete_kind)
    ] = None,
    distribution: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only plugins of this distribution.", autocompletion=complete_distribution),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """List the installed plugins: kind, name, distribution, version, state, a hook's role, and a line of their docs.

    Imports none of them.
    """
    from ..plugins.description import overview
    from ..plugins.discovery import scan

    wanted = kind_of(kind)
    installed = scan()
    shown = [info for info in installed.plugins if wanted in (None, info.kind)]
    if distribution is not None:
        shown = _of_distribution(shown, distribution, installed)
    entries = overview(shown, installed.plugins)
    if as_json:
        typer.echo(json.dumps([_plain(entry) for entry in entries], indent=2))
    elif sys.stdout.isatty():
        _print(entries, results())
    else:
        _print_lines(entries)
    for text in installed.unreadable:
        messages().print(
            Text(one_line(f"The metadata of an installed distribution cannot be read: {text}")),
            style="yellow",
            soft_wrap=True,
        )
    if not entries:
        messages().print(Text("There is no such plugin."))


def _of_distribution(shown: list[PluginInfo], distribution: str, installed: Installed) -> list[PluginInfo]:
    from ..plugins.discovery import suggest_names
    from ..plugins.metadata import normalise

    if normalise(distribution) not in installed.distributions:
        names = {info.distribution or "" for info in installed.plugins}
        raise ConfigurationError(f"No distribution {distribution!r} is installed.{suggest_names(distribution, names)}")
    return [info for info in shown if normalise(info.distribution or "") == normalise(distribution)]


def _plain(entry: Entry) -> dict[str, Any]:
    info = entry.info
    return {
        "kind": info.kind,
        "name": info.name,
        "aliases": list(info.aliases),
        "distribution": info.distribution,
        "version": info.version,
        "builtin": info.builtin,
        "target": info.target,
        "state": entry.state,
        "detail": entry.detail,
        "summary": entry.summary,
        "role": entry.role or None,
    }


def _print(entries: list[Entry], console: Console) -> None:
    for kind in dict.fromkeys(entry.info.kind for entry in entries):
        of_kind = [entry for entry in entries if entry.info.kind == kind]
        title = Text(f"{LABELS[kind].capitalize()}s ({len(of_kind)})", style="bold")
        console.print(title)
        if console.width < _NARROW:
            _print_stacked(of_kind, console)
        else:
            _print_table(of_kind, console)
        console.print()


def _print_table(entries: list[Entry], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    longest = max(cell_len(name) for entry in entries for name in (entry.info.name, *map(_also, entry.info.aliases)))
    roles = any(entry.role for entry in entries)
    table.add_column("name", overflow="fold", min_width=min(longest, 32), max_width=32)
    if roles:
        table.add_column("role", overflow="fold", max_width=12)
    table.add_column("distribution", overflow="fold", max_width=24)
    table.add_column("state", overflow="fold", max_width=11)
    table.add_column("what it does", overflow="fold", ratio=1)
    for entry in entries:
        name = Text(one_line(entry.info.name), style="bold")
        for alias in entry.info.aliases:
            name.append(f"\n{_also(alias)}", style="not bold dim")
        role = [Text(_role(entry))] if roles else []
        table.add_row(name, *role, Text(_source(entry)), _state(entry), Text("\n").join(_words(entry)))
    console.print(table)


def _print_stacked(entries: list[Entry], console: Console) -> None:
    for entry in entries:
        name = Text(one_line(entry.info.name), style="bold")
        for alias in entry.info.aliases:
            name.append(f" {_also(alias)}", style="not bold dim")
        paragraph(console, name)
        role = f"{_role(entry)}, " if entry.role else ""
        source = Text(f"{role}{_source(entry)}, ").append_text(_state(entry))
        for text in (source, *_words(entry)):
            paragraph(console, text, indent=2)


def _also(alias: str) -> str:
    return f"({one_line(alias)})"


def _words(entry: Entry) -> list[Text]:
    summary, detail = Text(one_line(entry.summary)), Text(one_line(entry.detail), style="yellow")
    return [text for text in (summary, detail) if text]


def _print_lines(entries: list[Entry]) -> None:
    """Print one line per plugin, however long, for `grep`."""
    rows: list[tuple[str, ...]] = (
        [("KIND", "NAME", "ALIASES", "DISTRIBUTION", "VERSION", "STATE", "ROLE", "SUMMARY")] if entries else []
    )
    for entry in entries:
        info = entry.info
        aliases = ",".join(info.aliases) or "-"
        provenance = (info.distribution or "-", info.version or "-", entry.state, entry.role or "-")
        rows.append(tuple(escape(cell) for cell in (info.kind, info.name, aliases, *provenance, entry.summary)))
    widths = [min(40, max(cell_len(cell) for cell in column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


def _source(entry: Entry) -> str:
    return one_line(f"{entry.info.distribution} {entry.info.version or '(version unknown)'}")


def _role(entry: Entry) -> str:
    return one_line(entry.role)


def _state(entry: Entry) -> Text:
    return Text(entry.state, style="green" if entry.state == "ready" else "bold yellow")
