"""`trl-grpo-ext list`: what is installed. Reads metadata and source text; no plugin is imported."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..guard.terminal import messages, results
from ..guard.untrusted import one_line
from ..plugins.description import Entry, overview
from ..plugins.discovery import scan
from ..plugins.kinds import PLURALS, kind_of
from .console import KIND_HELP, of_distribution, paragraph


def list_command(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help=f"Only this kind: {KIND_HELP}")] = None,
    distribution: Annotated[str | None, typer.Option(metavar="NAME", help="Only this distribution's plugins.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """List the installed plugins: kind, name, distribution, version, state, and a line of their docs.

    Imports none of them.
    """
    wanted = None if kind is None else kind_of(kind)
    installed = scan()
    offered = installed.plugins if distribution is None else of_distribution(distribution, installed)
    shown = [info for info in offered if wanted in (None, info.kind)]
    entries = overview(shown, installed.plugins)
    if as_json:
        typer.echo(json.dumps([entry.plain() for entry in entries], indent=2))
    else:
        _print(entries, results())
    if not entries:
        messages().print(Text("There is no such plugin."))


def _print(entries: list[Entry], console: Console) -> None:
    for kind in dict.fromkeys(entry.info.kind for entry in entries):
        of_kind = [entry for entry in entries if entry.info.kind == kind]
        console.print(Text(f"{PLURALS[kind].capitalize()} ({len(of_kind)})", style="bold"))
        for entry in of_kind:
            info = entry.info
            ready = entry.state == "ready"
            aliases = [(f" ({one_line(alias)})", "dim") for alias in info.aliases]
            name = Text.assemble((one_line(info.name), "bold"), *aliases)
            if not (info.builtin and ready):
                name.append(f"  {one_line(info.source)}, ", style="dim")
                name.append(entry.state, style="green" if ready else "bold yellow")
            paragraph(console, name)
            for text, style in ((entry.summary, ""), (entry.detail, "yellow")):
                if text:
                    paragraph(console, Text(one_line(text), style=style), indent=2)
        console.print()
