"""`trl-grpo-ext new`: a new distribution with one plugin, and the next steps."""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console
from rich.text import Text

from ..errors import ConfigurationError
from .console import kind_of, paragraph, results
from .scaffold import Made, PluginKind, Role

if TYPE_CHECKING:
    from .scaffold.distribution import GeneratedFile, NewDistribution


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("new", short_help="Make a distribution for your own plugin.")(new_command)


def new_command(
    kind: Annotated[Made, typer.Argument(help="What to make: one plugin, or one of each kind.", show_default=False)],
    name: Annotated[
        str,
        typer.Argument(help="The name by which people select the plugin, such as answer_length.", show_default=False),
    ],
    role: Annotated[
        Role | None,
        typer.Option(
            help="Of a hook: a shaper changes rewards, an estimator makes advantages of them, a transform changes "
            "advantages, a forward hook changes them at each loss forward. By default a transform.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        str | None,
        typer.Option(help="The folder to make, new or empty. Default: the distribution's name.", show_default=False),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(help="An existing distribution's folder, to add the plugin to.", show_default=False),
    ] = None,
    distribution: Annotated[
        str, typer.Option(help="The distribution's name. Default: grpo- and the plugin's name.", show_default=False)
    ] = "",
) -> None:
    """Make a small distribution with a plugin that works as it is: a module, tests, types, a licence, CI.

    With --into it adds the plugin to an existing distribution. `all` makes one of each kind in one distribution.
    """
    from .scaffold.distribution import NewDistribution, existing

    if into is not None and (directory is not None or distribution):
        raise ConfigurationError("--into says where the plugin goes; leave --directory and --distribution out.")
    kinds: tuple[PluginKind, ...] = get_args(PluginKind) if kind == "all" else (kind,)
    names = {one: f"{name}_{one}" if kind == "all" else name for one in kinds}
    for one in kinds:
        _refuse_taken(one, names[one])
    if into is not None:
        distribution = existing(Path(into))
    elif kind == "all" and not distribution:
        distribution = f"grpo-{name.replace('_', '-')}"
    made = [
        NewDistribution(
            kind=one,
            name=names[one],
            role=role if one == "hook" or kind != "all" else None,
            distribution=distribution,
            there=into is not None or place > 0,
        )
        for place, one in enumerate(kinds)
    ]
    folder = _folder(next(place for place in (into, directory, made[0].distribution) if place is not None))
    files: list[GeneratedFile] = []
    for new in made:
        files += [file for file in new.write(Path(folder)) if file.path not in {other.path for other in files}]
    _print(made, folder, files, results())


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


def _print(made: Sequence[NewDistribution], folder: str, files: Sequence[GeneratedFile], console: Console) -> None:
    """Say what was made and what to do next; paths and commands are never broken, so that they can be copied."""
    what = ", ".join(f"the {new.kind} {new.name}" for new in made)
    console.print(Text(f"{made[0].distribution}, with {what}, is in {folder}", overflow="fold"))
    console.print()
    for file in files:
        console.print(Text(f"  {file.path}"), soft_wrap=True)
        paragraph(console, Text(file.purpose, style="dim"), indent=6)
    console.print()
    console.print(Text("Next:"))
    for command in _next(made, folder):
        console.print(Text(f"  {shlex.join(command)}"), soft_wrap=True)


def _next(made: Sequence[NewDistribution], folder: str) -> list[list[str]]:
    new = made[0]
    several = len(made) > 1
    listed = ["--distribution", new.distribution]
    return [
        ["pip", "install", "--editable", folder],
        ["trl-grpo-ext", "list", *([] if several else [new.kind]), *listed],
        ["trl-grpo-ext", "check", *(listed if several else [f"{new.distribution}:{new.name}"])],
        ["python", "-m", "pytest", folder],
    ]
