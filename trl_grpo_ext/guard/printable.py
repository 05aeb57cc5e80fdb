"""Untrusted text made safe for one line of a terminal, a log, a table or a figure."""

from __future__ import annotations

LONGEST = 40


def escape(text: str) -> str:
    """Escape invisible characters, line breaks, terminal control codes and changes of text direction."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_name(name: object) -> str:
    """A name on one line, escaped, and cut at 40 characters."""
    text = escape(str(name)[: LONGEST + 1])
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}~"
