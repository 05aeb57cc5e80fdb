"""`trl-grpo-ext check`: the conformance kit on the command line."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ..errors import ConfigurationError, PluginError
from ..guard.terminal import messages, results
from ..guard.untrusted import one_line, printable
from ..plugins.description import find_named
from ..plugins.discovery import PluginInfo, scan
from ..plugins.kinds import kind_of
from ..plugins.selection import parse_selection
from ..testing import Report, check
from .console import KIND_HELP, of_distribution, paragraph

_MOST_ROWS = 8
_SELECTION = "A name, distribution:name, a dotted path, or a mapping such as '{name: length_target, target: 100}'."
_DISTRIBUTION = "Check every plugin of this distribution."
_COLUMNS = 'The data\'s columns: a JSON Lines file, or JSON such as \'{"target": "18"}\'.'
_STRICT = "Exit with 3 if nothing shows that a plugin does anything."


def check_command(
    selection: Annotated[str | None, typer.Argument(metavar="SELECTION", help=_SELECTION)] = None,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help=f"Only this kind: {KIND_HELP}")] = None,
    distribution: Annotated[str | None, typer.Option(metavar="NAME", help=_DISTRIBUTION)] = None,
    columns: Annotated[str | None, typer.Option(metavar="ROWS", help=_COLUMNS)] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for each rule, 60 by default.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help=_STRICT)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of reports.")] = False,
) -> None:
    """Check that a plugin keeps the rules that training relies on.

    Exits with 1 if a rule is broken and with 2 if a plugin cannot be loaded. With --strict, exits with 3 if all rules
    are kept but nothing shows that a plugin does anything.
    """
    wanted = None if kind is None else kind_of(kind)
    if (selection is None) == (distribution is None):
        raise ConfigurationError("Say what to check: either a selection or --distribution NAME.")
    given = {} if columns is None else _columns(columns)
    installed = scan()
    asked: dict[str, Any] = {}
    if selection is not None:
        parsed = parse_selection(wanted or "reward", selection)
        plain = parsed.plain()
        asked = plain if isinstance(plain, dict) else {}
        subjects = find_named(str(parsed), wanted, installed)
    else:
        subjects = [info for info in of_distribution(distribution or "", installed) if wanted in (None, info.kind)]
    found: list[tuple[PluginInfo, Report | str]] = []
    for place, info in enumerate(subjects, 1):
        messages().print(Text(one_line(f"Checking {info.name}, {place} of {len(subjects)}")), style="dim")
        try:
            chosen = {**asked, "name": info.selection}
            found.append((info, check(info.kind, chosen, timeout=timeout, **given)))
        except (PluginError, ConfigurationError) as error:
            found.append((info, str(error)))
    if not found:
        raise ConfigurationError("It offers no such plugin.")
    _finish(found, as_json, strict)


def _columns(given: str) -> dict[str, Any]:
    """Options of the kit for columns on the command line; a row's prompt and completion are what is scored."""
    if given.lstrip().startswith("{"):
        try:
            return {"columns": json.loads(given)}
        except ValueError as error:
            raise ConfigurationError(f"--columns is no JSON: {one_line(error, 200)}") from error
    from ..history.run_files import read_columns  # slow to import

    values = {name: column[:_MOST_ROWS] for name, column in read_columns(Path(given)).items()}
    texts = {f"{name}s": values.pop(name) for name in ("prompt", "completion") if name in values}
    return {"columns": values, **texts}


def _finish(found: list[tuple[PluginInfo, Report | str]], as_json: bool, strict: bool) -> None:
    plain = []
    reports = []
    for info, one in found:
        if isinstance(one, str):
            plain.append({"subject": info.name, "kind": info.kind, "ok": False, "error": one})
            messages().print(Text(printable(f"{info.name}: {one}")), style="red", soft_wrap=True)
            continue
        plain.append(one.plain())
        reports.append(one)
        for indent, parts in () if as_json else one.lines():
            paragraph(results(), Text.assemble(*parts), indent=indent)
    if as_json:
        typer.echo(json.dumps(plain, indent=2))
    if len(reports) < len(found):
        raise typer.Exit(2)
    if not all(one.ok for one in reports):
        raise typer.Exit(1)
    if strict and any(one.no_effect for one in reports):
        raise typer.Exit(3)
