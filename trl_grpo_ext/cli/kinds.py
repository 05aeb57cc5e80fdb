"""The kinds of plugins, and plugins' names, as words of a command line."""

from __future__ import annotations

import difflib
import re

from ..errors import ConfigurationError
from ..plugins.selection import KINDS, LABELS, Kind

KIND_HELP = "reward, hook or aggregation."
_WORDS: dict[str, Kind] = {
    "reward": "reward",
    "hook": "advantage_hook",
    "aggregation": "loss_aggregation",
    **{kind: kind for kind in KINDS},
}
_HARMLESS = re.compile(r"[\w.+:-]+", re.ASCII)


def kind_of(word: str | None) -> Kind | None:
    """Read a kind: `reward`, `hook`, `advantage-hooks`, `loss_aggregation`, ... None stays None.

    Raises:
        ConfigurationError: There is no such kind.
    """
    if word is None:
        return None
    folded = word.strip().lower().replace("-", "_").removesuffix("s")
    if folded in _WORDS:
        return _WORDS[folded]
    close = difflib.get_close_matches(folded, _WORDS, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigurationError(f"{word!r} is not a kind of plugin; the kinds are reward, hook and aggregation.{hint}")


def complete_kind(incomplete: str) -> list[str]:
    """For the shell: the kinds that begin so."""
    return [word for word in ("reward", "hook", "aggregation") if word.startswith(incomplete)]


def complete_distribution(incomplete: str) -> list[str]:
    """For the shell: the distributions with plugins that begin so."""
    from ..plugins.discovery import available

    names = {info.distribution or "" for info in available()}
    return sorted(name for name in names if name.startswith(incomplete) and _HARMLESS.fullmatch(name))


def complete_name(incomplete: str) -> list[tuple[str, str]]:
    """For the shell: names and aliases of plugins that begin so, with their kinds.

    Shells evaluate some of what they are given here, so names with anything but letters, digits and `._+:-` are left
    out.
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
