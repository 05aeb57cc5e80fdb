"""A hash of a plugin's Python source, read from files without importing anything.

It covers the plugin's module, its parent packages, and everything that these import, directly or indirectly, from their
own top-level package and from other top-level modules of their distribution. For modules of no distribution it also
covers imported modules in the same folder. Extension modules count by their bytes. Line endings don't count.

It does not cover imports by name at run time, data files, environment variables, other distributions or imports for
type checkers only. For objects defined in the script that Python was started with, only their own text counts.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

_MOST_MODULES = 1000
_OURS = "trl_grpo_ext"


@dataclass(frozen=True)
class Source:
    """SHA-256 of a plugin's source, or None; and, in words, what it covers or why there is none."""

    hash: str | None
    covers: str


@dataclass
class SourceReader:
    """Hashes sources, and caches files, since plugins share modules."""

    _files: dict[Path, tuple[bytes, list[ast.stmt]]] = field(default_factory=dict)

    def of_module(self, module: str, owner: str | None) -> Source:
        """The source of a module that can be imported; `owner` is its distribution, None for the user's own module."""
        finder = _Finder(module.partition(".")[0], owner)
        files: dict[str, Path] = {}
        waiting = [*_ancestors(module)]
        try:
            while waiting:
                name = waiting.pop()
                if name in files or (path := finder.file(name)) is None:
                    continue
                files[name] = path
                if len(files) > _MOST_MODULES:
                    return Source(None, f"not hashed: {module} imports more than {_MOST_MODULES:,} modules of its own")
                for imported in _imported(self._read(path)[1], name, is_package=path.stem == "__init__"):
                    waiting += _ancestors(imported)
            if module not in files:
                return Source(None, f"not hashed: {module} has no source file")
            digest = hashlib.sha256()
            for name in sorted(files):
                for part in (name.encode(), self._read(files[name])[0]):
                    digest.update(len(part).to_bytes(8, "big") + part)
        except OSError as error:
            return Source(None, f"not hashed: {module} cannot be read ({type(error).__name__})")
        others = f" and {len(files) - 1} that it needs" if len(files) > 1 else ""
        return Source(digest.hexdigest(), f"the module {module}{others}")

    def _read(self, path: Path) -> tuple[bytes, list[ast.stmt]]:
        """A file's bytes, with normalised line endings, and its statements; no statements if it is not Python."""
        if path not in self._files:
            content, statements = path.read_bytes(), []
            if path.suffix == ".py":
                content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
                try:
                    statements = ast.parse(content).body
                except (SyntaxError, ValueError, RecursionError):  # it is hashed all the same
                    statements = []
            self._files[path] = (content, statements)
        return self._files[path]


def of_text(thing: Any) -> Source:
    """The source of a function or class by its own text, for objects defined in a script or a notebook."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    try:
        text = inspect.getsource(thing)
    except (OSError, TypeError, SyntaxError):  # no file, not a function or class, half a statement
        return Source(None, f"not hashed: {name} was typed in or made by code, so there is no file with its source")
    content = "\n".join(text.splitlines()).encode(errors="surrogatepass")
    return Source(hashlib.sha256(content).hexdigest(), f"the text of {name} alone, in the script that was run")


class _Finder:
    """Finds the files of modules that belong to the same distribution or folder as a top-level module."""

    def __init__(self, top: str, owner: str | None) -> None:
        self._top = top
        self._bases: dict[str, list[Path]] = {}
        self._roots = {base.parent for base in self._base(top)}
        record = _files_of(owner) if owner is not None else None
        if record is not None:
            firsts = {line.partition(",")[0].partition("/")[0] for line in record.splitlines()}
            self._declared: set[str] | None = {first.partition(".")[0] for first in firsts}
        else:
            in_site_packages = any(root.name in ("site-packages", "dist-packages") for root in self._roots)
            self._declared = set() if in_site_packages else None

    def file(self, module: str) -> Path | None:
        """The file of a module, if it belongs and exists."""
        top, *rest = module.split(".")
        if not self._belongs(top):
            return None
        endings = ["/__init__.py", ".py", *EXTENSION_SUFFIXES]
        bases = [base.joinpath(*rest) for base in self._base(top)]
        return next((file for base in bases for end in endings if (file := Path(f"{base}{end}")).is_file()), None)

    def _belongs(self, top: str) -> bool:
        if top == self._top:
            return True
        if top == _OURS or top in sys.stdlib_module_names:
            return False
        if self._declared is not None and top not in self._declared:
            return False
        return any(base.parent in self._roots for base in self._base(top))

    def _base(self, top: str) -> list[Path]:
        """The path of a top-level module: its folder, or its file without the suffix."""
        if top not in self._bases:
            spec = _spec(top)
            found = [*(spec.submodule_search_locations or [])] if spec else []
            if spec and not found and spec.origin and spec.has_location:
                found = [str(Path(spec.origin).with_name(top))]
            self._bases[top] = [Path(base).resolve() for base in found]
        return self._bases[top]


def _spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: a module without `__spec__`, such as `__main__`
        return None


def _files_of(owner: str) -> str | None:
    """A distribution's list of files; None if its modules are elsewhere, as in an editable installation."""
    try:
        found = distribution(owner)
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        editable = isinstance(origin, dict) and bool((origin.get("dir_info") or {}).get("editable"))
        return None if editable else found.read_text("RECORD")
    except (PackageNotFoundError, OSError, ValueError, AttributeError):  # metadata may hold anything
        return None


def _ancestors(module: str) -> list[str]:
    """A module and its parent packages, which run before it."""
    parts = module.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def _imported(statements: list[ast.stmt], module: str, *, is_package: bool) -> Iterator[str]:
    """Dotted names that a module may import; `from a import b` may mean the module `a.b` or something in `a`."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    waiting: list[ast.AST] = [*statements]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            if base and node.level <= len(package):
                yield ".".join(base)
                yield from (".".join([*base, alias.name]) for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
