"""What the commands share: consoles and their widths, text made safe for a terminal, kinds and names."""

from __future__ import annotations

import difflib
import os
import re
import sys

from rich.console import Console
from rich.text import Text

from ..errors import ConfigurationError
from ..plugins.kinds import KINDS, LABELS, WORDS, Kind, kind_words

PIPED_WIDTH = 200
"""Width if stdout is no terminal and COLUMNS is not set: a pipe has no edge, so lines are not folded at 80."""

KIND_HELP = f"{kind_words()}."
_WORDS: dict[str, Kind] = {
    **WORDS,
    **{kind: kind for kind in KINDS},
}
_HARMLESS = re.compile(r"[\w.+:-]+", re.ASCII)


def results() -> Console:
    """The console for results. Text is printed as it is, without markup or highlighting."""
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else PIPED_WIDTH
    return Console(width=wide, highlight=False, markup=False, emoji=False)


def messages() -> Console:
    """The console for progress, warnings and everything else that is no result."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def paragraph(console: Console, text: Text, indent: int = 0) -> None:
    """Print text filled to the width, indented, with long words folded and no trailing blanks."""
    for line in text.wrap(console, max(console.width - indent, 10), overflow="fold"):
        line.rstrip()
        line.pad_left(indent)
        console.print(line, soft_wrap=True)


# ---------------------------------------------------------------------------------------------- kinds and names


def kind_of(word: str | None) -> Kind | None:
    """Read a kind: `reward`, `hook`, `advantage-hooks`, `loss_aggregation`, ... None stays None."""
    if word is None:
        return None
    folded = word.strip().lower().replace("-", "_").removesuffix("s")
    if folded in _WORDS:
        return _WORDS[folded]
    close = difflib.get_close_matches(folded, _WORDS, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigurationError(f"{word!r} is not a kind of plugin; the kinds are {kind_words('and')}.{hint}")


def complete_kind(incomplete: str) -> list[str]:
    """Shell completion: kinds with this prefix."""
    return [word for word in WORDS if word.startswith(incomplete)]


def complete_distribution(incomplete: str) -> list[str]:
    """Shell completion: distributions with plugins that have this prefix."""
    from ..plugins.discovery import available

    names = {info.distribution or "" for info in available()}
    return sorted(name for name in names if name.startswith(incomplete) and _HARMLESS.fullmatch(name))


def complete_name(incomplete: str) -> list[tuple[str, str]]:
    """Shell completion: plugin names and aliases with this prefix, and their kinds.

    Shells may evaluate what they get here, so only names of letters, digits and `._+:-` are offered.
    """
    from ..plugins.discovery import available

    meant: dict[str, list[str]] = {}
    for info in available():
        for name in (info.name, *info.aliases):
            for way in (name, f"{info.distribution}:{name}") if ":" in incomplete else (name,):
                if way.startswith(incomplete) and _HARMLESS.fullmatch(way):
                    label = LABELS[info.kind] + (f" {info.name}" if name != info.name else "")
                    meant.setdefault(way, []).append(label if _HARMLESS.fullmatch(info.name) else LABELS[info.kind])
    return [(way, ", ".join(dict.fromkeys(labels))) for way, labels in sorted(meant.items())]
