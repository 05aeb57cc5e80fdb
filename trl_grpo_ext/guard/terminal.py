"""Where the commands print: results to stdout, everything else to stderr, with a width for pipes."""

import os
import sys

from rich.console import Console

PIPED_WIDTH = 200  # without COLUMNS: a pipe has no edge, so lines are not folded at 80


def results() -> Console:
    """The console for results. Text is printed as it is, without markup or highlighting."""
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else PIPED_WIDTH
    return Console(width=wide, highlight=False, markup=False, emoji=False)


def messages() -> Console:
    """The console for progress, warnings and everything else that is no result."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)
