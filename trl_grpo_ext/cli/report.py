"""`trl-grpo-ext report`: the command line of the report. Heavy imports happen when the command runs."""

import time
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigurationError
from ..guard.untrusted import escape
from .console import messages, results

_PAGE = "report.html"
_RELOAD_SECONDS = 10.0
"""Seconds between reloads of a watched page; more if it is written less often."""


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
        typer.Option(min=0.1, max=86400, help="Rewrite the page every so many seconds; stop with Ctrl-C."),
    ] = None,
) -> None:
    """Show one or more trainings on one page.

    Curves, settings, plugins, and completions token by token.
    """
    page = out or runs[0] / _PAGE
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            messages().print(escape(text), soft_wrap=True)

    def write(reload_seconds: float | None = None) -> None:
        """Write the page; say on stdout that it was written, on stderr what is missing, each once."""
        from ..history.report import load_runs
        from ..history.report.page import write_page

        written = write_page(load_runs(runs), page, limit=limit, reload_seconds=reload_seconds)
        results().print(escape(f"{page} ({written.bytes / 2**20:.1f} MB)"), soft_wrap=True)
        for note in written.notes:
            say(note)

    def show() -> None:
        if not webbrowser.open(page.resolve().as_uri()):
            say(f"No browser started; open {page} yourself.")

    if watch is None:
        write()
        if open_:
            show()
        return
    opened = not open_
    with suppress(KeyboardInterrupt):
        while True:
            try:
                write(max(watch, _RELOAD_SECONDS))
            except (ConfigurationError, OSError) as error:  # there is no run yet, say
                say(f"not written this time, will try again: {error}")
            else:
                if not opened:
                    show()
                opened = True
            time.sleep(watch)
    if page.exists():  # once more, without loading itself again
        write()
