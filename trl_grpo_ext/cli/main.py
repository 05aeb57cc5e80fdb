"""The command `trl-grpo-ext`. Results go to stdout, everything else to stderr.

Exit codes: 0 for success, 1 if the command found problems, 2 if it could not do its work.
"""

from __future__ import annotations

import io
import sys
from importlib import import_module
from typing import Annotated

import typer
from rich.text import Text

from .. import __version__
from ..errors import TRLGRPOExtError
from ..guard.untrusted import printable
from .console import messages

FAILED = 2
COMMANDS = (
    "trl_grpo_ext.cli.list",
    "trl_grpo_ext.cli.show",
    "trl_grpo_ext.cli.check",
    "trl_grpo_ext.cli.new",
    "trl_grpo_ext.cli.replay",
    "trl_grpo_ext.cli.gradients",
    "trl_grpo_ext.cli.report",
    "trl_grpo_ext.cli.audit",
    "trl_grpo_ext.launch.doctor.command",
)
"""Modules with one command each, in the order of the help."""

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


for _command in COMMANDS:
    import_module(_command).register(app)


def main() -> None:
    """Run the command; errors of this package become one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an encoding that lacks a character gets an escape
    try:
        app()
    except TRLGRPOExtError as error:
        messages().print(Text(printable(f"trl-grpo-ext: {error}")), style="red", soft_wrap=True)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
