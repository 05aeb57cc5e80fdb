"""`trl-grpo-ext new`: a new distribution with one plugin, and the next steps."""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..errors import ConfigurationError
from .console import kind_of, paragraph, results
from .scaffold import PluginKind

if TYPE_CHECKING:
    from .scaffold.distribution import GeneratedFile, NewDistribution


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("new", short_help="Make a distribution for your own plugin.")(new_command)


def new_command(
    kind: Annotated[PluginKind, typer.Argument(help="What to make.", show_default=False)],
    name: Annotated[
        str,
        typer.Argument(help="The name by which people select the plugin, such as answer_length.", show_default=False),
    ],
    directory: Annotated[
        str | None,
        typer.Option(help="The folder to make, new or empty. Default: the distribution's name.", show_default=False),
    ] = None,
    distribution: Annotated[
        str, typer.Option(help="The distribution's name. Default: grpo- and the plugin's name.", show_default=False)
    ] = "",
) -> None:
    """Make a small distribution with a plugin that works as it is: a module, tests, types, a licence, CI."""
    from .scaffold.distribution import NewDistribution

    _refuse_taken(kind, name)
    new = NewDistribution(kind=kind, name=name, distribution=distribution)
    folder = _folder(new.distribution if directory is None else directory)
    _print(new, folder, new.write(Path(folder)), results())


def _refuse_taken(kind: str, name: str) -> None:
    """Refuse a name that an installed plugin of this kind has."""
    from ..plugins.discovery import available
    from ..plugins.kinds import with_article

    for info in available(kind_of(kind)):
        if info.answers_to(name):
            which = f" ({name!r} is another name of it)" if info.name != name else ""
            taken = f"There is {with_article(info.kind)} {info.name!r} already, from {info.source}{which}."
            raise ConfigurationError(f"{taken} Choose another name.")


def _folder(directory: str) -> str:
    """The folder in a form that pip and a shell take for neither an option nor a package name."""
    if not directory.strip():
        raise ConfigurationError("--directory is blank; give a folder, or leave it out.")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in directory):
        raise ConfigurationError(f"--directory holds a control character: {directory!r}. Choose another folder.")
    plain = str(Path(directory))
    return plain if plain.startswith(("/", "./", "../")) or plain in (".", "..") else f"./{plain}"


def _print(new: NewDistribution, folder: str, files: Sequence[GeneratedFile], console: Console) -> None:
    """Say what was made and what to do next; paths and commands are never broken, so that they can be copied."""
    console.print(Text(f"{new.distribution}, with the {new.kind} {new.name}, is in {folder}", overflow="fold"))
    console.print()
    for file in files:
        console.print(Text(f"  {file.path}"), soft_wrap=True)
        paragraph(console, Text(file.purpose, style="dim"), indent=6)
    console.print()
    console.print(Text("Next:"))
    for command in (
        ["pip", "install", "--editable", folder],
        ["trl-grpo-ext", "list", new.kind, "--distribution", new.distribution],
        ["trl-grpo-ext", "check", f"{new.distribution}:{new.name}"],
        ["python", "-m", "pytest", folder],
    ):
        console.print(Text(f"  {shlex.join(command)}"), soft_wrap=True)
