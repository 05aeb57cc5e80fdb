"""`trl-grpo-ext new`: a new distribution with one plugin, and the next steps."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ..errors import ConfigurationError
from ..guard.terminal import results
from ..guard.untrusted import printable
from ..plugins.discovery import available
from ..plugins.kinds import kind_of
from .console import paragraph
from .scaffold.distribution import NewDistribution, PluginKind

_NAME = "The name by which people select the plugin, such as answer_length."
_DISTRIBUTION = "The distribution's name. Default: grpo- and the plugin's name."


def new_command(
    kind: Annotated[PluginKind, typer.Argument(help="What to make.", show_default=False)],
    name: Annotated[str, typer.Argument(help=_NAME, show_default=False)],
    distribution: Annotated[str, typer.Option(help=_DISTRIBUTION, show_default=False)] = "",
) -> None:
    """Make a small distribution with a plugin that works as it is: a module, tests, types, a licence, CI.

    It is in a new folder with the distribution's name.
    """
    for info in available(kind_of(kind)):
        if info.answers_to(name):
            raise ConfigurationError(f"The name {name!r} is taken, by {info.name!r} from {info.source}.")
    new = NewDistribution(kind, name, distribution)
    folder = f"./{new.distribution}"  # which pip does not take for a package's name
    files = new.write(Path(folder))
    console = results()
    paragraph(console, Text(printable(f"{new.distribution}, with the {new.kind} {new.name}, is in {folder}")))
    commands = (
        ["pip", "install", "--editable", folder],
        ["trl-grpo-ext", "list", new.kind, "--distribution", new.distribution],
        ["trl-grpo-ext", "check", f"{new.distribution}:{new.name}"],
        ["python", "-m", "pytest", folder],
    )
    for line in ("", *(f"  {file}" for file in files), "", "Next:", *(f"  {shlex.join(words)}" for words in commands)):
        console.print(line, soft_wrap=True)  # never broken, so that it can be copied
