"""What the commands share: paragraphs, kinds and names."""

from rich.console import Console
from rich.text import Text

from ..errors import ConfigurationError
from ..plugins.discovery import Installed, PluginInfo, normalise, suggest_names
from ..plugins.kinds import KINDS, WORDS, Kind, kind_words

KIND_HELP = f"{kind_words()}."
_SINGULAR: dict[str, Kind] = {**WORDS, **{kind: kind for kind in KINDS}}
_WORDS: dict[str, Kind] = {
    f"{word.replace('-', '_')}{ending}": kind for word, kind in _SINGULAR.items() for ending in ("", "s", "es")
}


def paragraph(console: Console, text: Text, indent: int = 0) -> None:
    """Print text filled to the width, indented, with long words folded and no trailing blanks."""
    for line in text.wrap(console, max(console.width - indent, 10), overflow="fold"):
        line.rstrip()
        line.pad_left(indent)
        console.print(line, soft_wrap=True)


def kind_of(word: str | None) -> Kind | None:
    """Read a kind: `reward`, `hook`, `advantage-hooks`, `loss_aggregation`, ... None stays None."""
    if word is None:
        return None
    folded = word.strip().lower().replace("-", "_")
    if folded in _WORDS:
        return _WORDS[folded]
    raise ConfigurationError(f"{word!r} is not a kind of plugin; the kinds are {kind_words('and')}.")


def of_distribution(name: str, installed: Installed) -> list[PluginInfo]:
    """The plugins of a distribution; an error with a hint if there is none of this name."""
    if normalise(name) not in installed.distributions:
        names = {info.distribution or "" for info in installed.plugins}
        raise ConfigurationError(f"No distribution {name!r} is installed.{suggest_names(name, names)}")
    return installed.of(name)
