"""Where the commands print: stdout for results, stderr for the rest, and as wide as what stands behind it can take."""

from __future__ import annotations

import os
import sys
import unicodedata

from rich.console import Console

PIPED_WIDTH = 200
"""Columns where stdout is no terminal and COLUMNS says nothing: a pipe has no edge, so lines are not folded at 80."""


def results() -> Console:
    """The console for results. Text is printed as it is: no markup of its own accord, no highlighting."""
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else PIPED_WIDTH
    return Console(width=wide, highlight=False, markup=False, emoji=False)


def messages() -> Console:
    """The console for everything that is no result: progress, warnings."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def printable(text: str) -> str:
    """Text of strangers for a terminal: control and format characters and lone surrogates escaped, newlines kept."""
    return "".join(
        character
        if character == "\n" or unicodedata.category(character) not in ("Cc", "Cf", "Cs")
        else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
