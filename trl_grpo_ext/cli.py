"""The command `trl-grpo-ext`. Results go to stdout, everything else to stderr.

Exit codes: 0 all is well, 1 the command found problems, 2 it could not do what was asked.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import typer
from rich.console import Console
from rich.text import Text

from .errors import TRLGRPOExtError

FAILED = 2
COMMANDS = (
    "commands.list",
    "commands.show",
    "commands.check",
    "commands.new",
    "commands.replay",
    "commands.audit",
    "doctor.command",
)
"""The modules with a command each, in the order in which the help lists them."""

app = typer.Typer(
    name="trl-grpo-ext",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Plugins for TRL's GRPOTrainer.",
)


@app.callback()
def commands() -> None:
    """Plugins for TRL's GRPOTrainer."""


for _command in COMMANDS:
    if find_spec(f"{__package__}.{_command}") is not None:
        import_module(f".{_command}", __package__).register(app)


def main() -> None:
    """Run the command; errors of this package are one line, and exit code 2."""
    try:
        app()
    except TRLGRPOExtError as error:
        Console(stderr=True).print(Text(f"trl-grpo-ext: {error}"), style="red", soft_wrap=True)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
