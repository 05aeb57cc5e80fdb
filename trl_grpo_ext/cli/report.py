"""`trl-grpo-ext report`: the command line of the report. Heavy imports happen when the command runs."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..guard.untrusted import escape
from .console import messages, results

_PAGE = "report.html"
_RELOAD_SECONDS = 10.0
"""Seconds between reloads of a watched page; more if it is written less often."""


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("report")(report_command)


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(help="The output_dir of a training, finished or not. Several are overlaid.")
    ],
    out: Annotated[
        Path | None, typer.Option(help=f"The page to write. Default: {_PAGE} in the first output_dir.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Most completions on the page, in whole groups; 0 shows the curves alone.")
    ] = 1000,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, help="Check for changes every so many seconds and rewrite the page; stop with Ctrl-C."),
    ] = None,
) -> None:
    """Show one or more trainings on one page.

    Curves, settings, plugins, and completions token by token.
    """
    page = out or runs[0] / _PAGE
    said: set[str] = set()
    to_open = open_
    reload_seconds = None if watch is None else max(watch, _RELOAD_SECONDS)

    def write() -> None:
        nonlocal to_open
        _write(runs, page, limit, said, reload_seconds)
        if to_open and not webbrowser.open(page.resolve().as_uri()):
            _say(f"No browser started; open {page} yourself.")
        to_open = False

    if watch is None:
        write()
        return
    from ..history.report.watch import watch as rewrite

    rewrite(runs, write, every=watch, say=_say)
    if page.exists():  # once more, without loading itself again
        _write(runs, page, limit, said, None)


def _write(folders: Sequence[Path], page: Path, limit: int, said: set[str], reload_seconds: float | None) -> None:
    """Write the page; say on stdout that it was written, on stderr what is missing, each once."""
    from ..history.report import load_runs
    from ..history.report.page import write_page

    written = write_page(load_runs(folders), page, limit=limit, reload_seconds=reload_seconds)
    results().print(escape(f"{page} ({written.bytes / 2**20:.1f} MB)"), soft_wrap=True)
    for note in written.notes:
        if note not in said:
            said.add(note)
            _say(note)


def _say(text: str) -> None:
    messages().print(escape(text), soft_wrap=True)
