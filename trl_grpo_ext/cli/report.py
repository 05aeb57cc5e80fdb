"""`trl-grpo-ext report`: the command line of the report. Heavy imports happen when the command runs."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ..guard.terminal import messages, results
from ..guard.untrusted import escape

_PAGE = "report.html"
_RUNS = "The output_dir of a training, finished or not. Several are overlaid."
_LIMIT = "Most completions on the page, in whole groups; 0 shows the curves alone."


def report_command(
    runs: Annotated[list[Path], typer.Argument(help=_RUNS)],
    out: Annotated[Path | None, typer.Option(help=f"The page. Default: {_PAGE} in the first output_dir.")] = None,
    limit: Annotated[int, typer.Option(min=0, help=_LIMIT)] = 1000,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show one or more trainings on one page.

    Curves, settings, plugins, and completions token by token.
    """
    from ..history.report import load_runs
    from ..history.report.page import write_page

    page = out or runs[0] / _PAGE
    notes = write_page(load_runs(runs), page, limit=limit)
    results().print(escape(f"{page} ({page.stat().st_size / 2**20:.1f} MB)"), soft_wrap=True)
    if open_ and not webbrowser.open(page.resolve().as_uri()):
        notes.append(f"No browser started; open {page} yourself.")
    for note in notes:
        messages().print(escape(note), soft_wrap=True)
