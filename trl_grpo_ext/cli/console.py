"""What the commands share: paragraphs, kinds and names."""

from rich.console import Console
from rich.text import Text

from ..errors import ConfigurationError
from ..plugins.discovery import Installed, PluginInfo, normalise, suggest_names
from ..plugins.kinds import WORDS

*_FIRST, _LAST = WORDS
KIND_HELP = f"{', '.join(_FIRST)} or {_LAST}."


def paragraph(console: Console, text: Text, indent: int = 0) -> None:
    """Print text filled to the width, indented, with long words folded and no trailing blanks."""
    for line in text.wrap(console, max(console.width - indent, 10), overflow="fold"):
        line.rstrip()
        line.pad_left(indent)
        console.print(line, soft_wrap=True)


def of_distribution(name: str, installed: Installed) -> list[PluginInfo]:
    """The plugins of a distribution; an error with a hint if there is none of this name."""
    if normalise(name) not in installed.distributions:
        names = {info.distribution or "" for info in installed.plugins}
        raise ConfigurationError(f"No distribution {name!r} is installed.{suggest_names(name, names)}")
    return installed.of(name)
