"""The command `trl-grpo-ext`. Results go to stdout, everything else to stderr.

Exit codes: 0 for success, 1 if the command found problems, 2 if it could not do its work.
"""

import io
import logging
import sys
from importlib import import_module
from typing import Annotated

import typer
from rich.text import Text

from .. import __version__
from ..errors import TRLGRPOExtError
from ..guard.terminal import messages
from ..guard.untrusted import printable
from .audit import audit_command
from .check import check_command
from .compare import compare_command
from .list import list_command
from .new import new_command
from .report import report_command
from .show import show_command

app = typer.Typer(
    name="trl-grpo-ext",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut long options with an ellipsis; plain help folds
    help="Plugins for TRL's GRPOTrainer.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"trl-grpo-ext {__version__}")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plugins for TRL's GRPOTrainer."""


app.command("list", short_help="Installed plugins and their state.")(list_command)
app.command("show", short_help="All about one plugin, with a selection.")(show_command)
app.command("check", short_help="Does a plugin keep the rules of its kind?")(check_command)
app.command("new", short_help="Make a distribution for your own plugin.")(new_command)
app.command("compare", short_help="Compare selections on the same completions, without training.")(compare_command)
app.command("report")(report_command)
app.command("audit", short_help="Can a reward read a data set's references?")(audit_command)
_doctor = import_module("trl_grpo_ext.launch.doctor.command")  # which lives with what it examines
app.command("doctor", short_help="Say what will fail before anything loads.", context_settings=_doctor.CONTEXT)(
    _doctor.doctor_command
)


def main() -> None:
    """Run the command; errors of this package become one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an encoding that lacks a character gets an escape
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # asks for a kernel when it is imported
    try:
        app()
    except TRLGRPOExtError as error:
        messages().print(Text(printable(f"trl-grpo-ext: {error}")), style="red", soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
