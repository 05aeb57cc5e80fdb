"""Names that strangers wrote, for one line of a terminal or a log."""

from __future__ import annotations

LONGEST = 40


def printable_name(name: object) -> str:
    """The name on one line: whatever cannot be seen or steers a terminal is escaped, and it is cut at 40 characters.

    That goes for characters that turn the direction of writing too: with them a line reads as another one than it is.
    """
    characters = str(name)[: LONGEST + 1]
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in characters)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}~"
