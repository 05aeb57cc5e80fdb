"""`trl-grpo-ext report`: the command line of the report. Heavy imports happen when the command runs."""

import time
import webbrowser
from collections.abc import Callable, Sequence
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
_WATCHED = ("*.json", "*.jsonl", "checkpoint-*/trainer_state.json", "token_records/*.parquet", "completions/*.parquet")
"""What a training writes and a report shows. The report itself, written into the same folder, is not among them."""


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
        typer.Option(
            min=0.1, max=86400, help="Check for changes every so many seconds and rewrite the page; stop with Ctrl-C."
        ),
    ] = None,
) -> None:
    """Show one or more trainings on one page.

    Curves, settings, plugins, and completions token by token.
    """
    page = out or runs[0] / _PAGE
    said: set[str] = set()
    to_open = open_

    def write(reload_seconds: float | None = None) -> None:
        """Write the page; say on stdout that it was written, on stderr what is missing, each once."""
        nonlocal to_open
        from ..history.report import load_runs
        from ..history.report.page import write_page

        written = write_page(load_runs(runs), page, limit=limit, reload_seconds=reload_seconds)
        results().print(escape(f"{page} ({written.bytes / 2**20:.1f} MB)"), soft_wrap=True)
        for note in written.notes:
            if note not in said:
                said.add(note)
                _say(note)
        if to_open and not webbrowser.open(page.resolve().as_uri()):
            _say(f"No browser started; open {page} yourself.")
        to_open = False

    if watch is None:
        write()
        return
    rewrite(runs, lambda: write(max(watch, _RELOAD_SECONDS)), watch)
    if page.exists():  # once more, without loading itself again
        write()


def rewrite(
    folders: Sequence[Path], write: Callable[[], None], every: float, wait: Callable[[float], None] = time.sleep
) -> None:
    """Write a report, and again whenever the runs' files have changed since, until Ctrl-C.

    What a training is writing at that moment may be half there; `write` leaves it out, and the next change brings it.
    Where there is no run yet, or the report cannot be written this time, one line says so, and it is tried again.
    """
    shown, complaint = None, ""
    with suppress(KeyboardInterrupt):
        while True:
            # Taken before reading: what changes while the report is written makes another one.
            if (now := _signature(folders)) != shown:
                try:
                    write()
                    complaint, shown = "", now
                except (ConfigurationError, OSError) as error:
                    if str(error) != complaint:
                        complaint = str(error)
                        _say(f"not written this time, will try again: {complaint}")
            wait(every)


def _signature(folders: Sequence[Path]) -> dict[str, tuple[int, int]]:
    """When each of the runs' files changed last, and its size; a file that goes away meanwhile is left out."""
    found = {}
    for file in (file for folder in folders for pattern in _WATCHED for file in Path(folder).glob(pattern)):
        with suppress(OSError):  # a checkpoint that is being replaced, say
            found[str(file)] = (file.stat().st_mtime_ns, file.stat().st_size)
    return found


def _say(text: str) -> None:
    messages().print(escape(text), soft_wrap=True)
