"""`trl-grpo-ext install`: a distribution into the running environment, by pip, and what plugins came with it."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ..errors import ConfigurationError
from ..guard.untrusted import one_line
from .console import messages

if TYPE_CHECKING:
    from ..plugins.discovery import Installed


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("install", short_help="Install a distribution and list its plugins.")(install_command)


def install_command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME... [-- OPTIONS]",
            help="What pip takes: names, folders, wheels, URLs; after -- pip's own options.",
            show_default=False,
        ),
    ],
    upgrade: Annotated[bool, typer.Option("--upgrade", "-U", help="Take the newest version that fits.")] = False,
    editable: Annotated[
        bool, typer.Option("--editable", "-e", help="NAME is a folder, whose files are used where they are.")
    ] = False,
) -> None:
    """Install distributions into the environment that this command runs in, and list the plugins that came with them.

    It runs pip, or uv where the environment has no pip. Installing may run code of what is installed, and using a
    plugin runs it: install what you trust. Listing imports nothing. Where pip fails, its exit status is this command's.
    """
    options = ["--upgrade"] * upgrade + ["--editable"] * editable
    before = _places()
    messages().print(
        Text("Installing may run code of what is installed; listing it does not."), style="dim", soft_wrap=True
    )
    done = subprocess.run([*_installer(), *options, *names], stdout=2, check=False)  # pip's words are no result
    if done.returncode != 0:
        text = f"trl-grpo-ext: {' '.join(names)}: not installed, for the reason above."
        messages().print(Text(one_line(text)), style="red", soft_wrap=True)
        raise typer.Exit(done.returncode if done.returncode > 0 else 1)
    _show(before, names)


def _installer() -> list[str]:
    """The command that installs into this environment. -P: no pip.py in the current folder is taken for pip.

    Raises:
        ConfigurationError: There is neither pip nor uv.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip", "install"]
    uv = shutil.which("uv")
    if uv is None:
        raise ConfigurationError(
            f"The environment of {sys.executable} has no pip, and there is no uv on the PATH. Install one of them: "
            f"{sys.executable} -m ensurepip"
        )
    return [uv, "pip", "install", "--python", sys.executable]


def _scan() -> Installed:
    from ..plugins.discovery import scan

    importlib.invalidate_caches()
    return scan()


def _places() -> dict[str, tuple[str, int]]:
    """By normalised name where the metadata of each distribution is and when it was put there."""
    from ..plugins.metadata import directory

    places = {name: directory(distribution) for name, distribution in _scan().distributions.items()}
    return {
        name: (place, Path(place).stat().st_mtime_ns)
        for name, place in places.items()
        if place and Path(place).exists()
    }


def _show(before: dict[str, tuple[str, int]], names: list[str]) -> None:
    """List what is new or newly installed; of what was there already, what was asked for by name."""
    from ..plugins.metadata import normalise

    after = _places()
    came = [name for name, place in after.items() if before.get(name) != place]
    asked = [
        name for name in (normalise(re.split(r"[^\w.-]", given, maxsplit=1)[0]) for given in names) if name in after
    ]
    offering = {normalise(info.distribution or "") for info in _scan().plugins}
    shown = [name for name in dict.fromkeys([*came, *asked]) if name in offering]
    if not shown:
        text = "No plugin came with it: none of its entry points is in a group of trl-grpo-ext."
        messages().print(Text(text if came else "Nothing has changed: it was installed already."), style="yellow")
        return
    for name in shown:
        # In a process of its own: what an editable install puts on the path counts from the next start of Python.
        command = [sys.executable, "-P", "-m", "trl_grpo_ext.cli.main", "list", "--distribution", name]
        subprocess.run(command, check=True)
        messages().print(Text(one_line(f"Next: trl-grpo-ext check --distribution {name}")), soft_wrap=True)
