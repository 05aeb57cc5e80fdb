"""Where the commands print: stdout for results, stderr for the rest, and as wide as what stands behind it can take."""

from __future__ import annotations

import os
import sys
import unicodedata

from rich.console import Console
from rich.text import Text

PIPED_WIDTH = 200
"""Columns where stdout is no terminal and COLUMNS says nothing: a pipe has no edge, so lines are not folded at 80."""

_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def results() -> Console:
    """The console for results. Text is printed as it is: no markup of its own accord, no highlighting."""
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else PIPED_WIDTH
    return Console(width=wide, highlight=False, markup=False, emoji=False)


def messages() -> Console:
    """The console for everything that is no result: progress, warnings."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def printable(text: str) -> str:
    """Text of strangers for a terminal: control and format characters and lone surrogates escaped, newlines kept.

    Format characters turn the direction of writing, so that a line reads as another one than it is.
    """
    return "".join(
        character if character == "\n" or unicodedata.category(character) not in _ESCAPED else _escaped(character)
        for character in text
    )


def one_line(text: str) -> str:
    """Text of strangers for one line: as `printable`, and line breaks escaped too."""
    return printable(text).replace("\n", "\\n")


def paragraph(console: Console, text: Text, indent: int = 0) -> None:
    """Print text filled to the width: every line indented, none with blanks behind it, long words folded."""
    for line in text.wrap(console, max(console.width - indent, 10), overflow="fold"):
        line.rstrip()
        line.pad_left(indent)
        console.print(line, soft_wrap=True)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
