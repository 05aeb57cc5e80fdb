"""`trl-grpo-ext show`: everything about one plugin, which is imported for it."""

import json
import re
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..guard.terminal import messages, results
from ..guard.untrusted import as_json, escape, one_line, printable
from ..plugins.description import PluginDocs, describe, find_named
from ..plugins.discovery import scan
from ..plugins.kinds import LABELS, kind_of
from .console import KIND_HELP, paragraph

_BROKEN = re.compile(r"(?<=\S)\n {0,3}(?![\s|>+$]|```|[-*]\s|\d+[.)]\s|\w+: )")
"""Where a docstring's paragraph goes on in its next line, which is no item, table, code or formula."""
_SECTIONS = ("Source", "Departures", "Returns", "Raises", "Note", "Example", "Attributes", "Yields")

_NAME = "A name, an alias, distribution:name, or a dotted path package.module:attribute."


def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help=_NAME)],
    kind: Annotated[str | None, typer.Option(metavar="KIND", help=f"Only this kind: {KIND_HELP}")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Show a plugin's documentation and parameters, and how to select it.

    All plugins of that name are imported and shown. Exits with 1 if that failed for one.
    """
    installed = scan()
    wanted = None if kind is None else kind_of(kind)
    found = [describe(info, installed.plugins) for info in find_named(name, wanted, installed)]
    if json_:
        typer.echo(json.dumps([docs.plain() for docs in found], indent=2))
    else:
        console = results()
        for place, docs in enumerate(found):
            if place:
                console.rule(style="dim")
            _print(docs, console)
    if len(found) > 1:
        several = f"{len(found)} plugins are called {one_line(name)!r}; --kind or distribution:name picks one."
        messages().print(Text(several))
    if any(docs.state == "broken" for docs in found):
        raise typer.Exit(1)


def _print(docs: PluginDocs, console: Console) -> None:
    info = docs.info
    aliases = [(f" ({one_line(alias)})", "dim") for alias in info.aliases]
    paragraph(console, Text.assemble((one_line(info.name), "bold"), *aliases))
    facts = {
        "kind": LABELS[info.kind],
        "from": info.source,
        "state": f"{docs.state}: {docs.detail}" if docs.detail else docs.state,
        "target": info.target,
        "file": f"{docs.file}:{docs.line}" if docs.file else "",
        "form": docs.form,
        "columns": ", ".join(docs.columns),
        "methods": ", ".join(docs.methods),
    }
    for name, value in docs.declares.items():
        facts[name] = value if isinstance(value, str) else json.dumps(as_json(value))
    for label, value in facts.items():
        if value:
            paragraph(console, Text.assemble((f"{label}: ", "dim"), one_line(value)), indent=2)
    if docs.doc.description:
        console.print()
        _filled(console, docs.doc.description)
    if docs.parameters:
        console.print(Text("\nParameters", style="bold"))
        for parameter in docs.parameters:
            title = Text(one_line(str(parameter)), style="bold")
            title.append(", required" if parameter.required else "", style="not bold yellow")
            paragraph(console, title, indent=2)
            if text := docs.doc.parameters.get(parameter.name):
                paragraph(console, Text(one_line(text)), indent=6)
    for section in (title for title in _SECTIONS if title in docs.doc.sections):
        console.print(Text(f"\n{section}", style="bold"))
        _filled(console, docs.doc.sections[section], indent=2)
    console.print(Text("\nExample", style="bold"))
    for line in docs.example.rstrip("\n").split("\n"):
        console.print(Text(escape(line)), soft_wrap=True)  # whole lines: it is there to be copied


def _filled(console: Console, text: str, indent: int = 0) -> None:
    """Print a docstring's text: paragraphs are filled to the width; lists, tables and code keep their lines."""
    for line in _BROKEN.sub(" ", printable(text)).split("\n"):
        plain = line.lstrip(" ")
        paragraph(console, Text(plain), indent=indent + min(len(line) - len(plain), 20))
