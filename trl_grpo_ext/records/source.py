"""A hash of a plugin's Python source, read from files without importing anything.

It covers the plugin's module, its parent packages, and everything that these import, directly or indirectly, from their
own top-level package; for modules of no distribution also from modules in the same folder. Extension modules count by
their bytes. Line endings don't count.

It does not cover imports by name at run time, data files, environment variables, other distributions or imports for
type checkers only. For objects defined in the script that Python was started with, only their own text counts.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

_NEVER = {*sys.stdlib_module_names, "trl_grpo_ext"}
"""No part of a module that lies beside them."""


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
        top = module.partition(".")[0]
        folders = _folders(top)
        beside = owner is None and not any(one.name in ("site-packages", "dist-packages") for one in folders)
        files: dict[str, Path] = {}
        waiting = [*_ancestors(module)]
        try:
            while waiting:
                name = waiting.pop()
                first = name.partition(".")[0]
                if name in files or not (first == top or (beside and first not in _NEVER)):
                    continue
                if (path := _file(name, folders)) is None:
                    continue
                files[name] = path
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


def _folders(top: str) -> list[Path]:
    """The folders in which a top-level module lies."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: a module without `__spec__`, such as `__main__`
        return []
    places = [*(spec.submodule_search_locations or [])] if spec else []
    if spec and not places and spec.origin and spec.has_location:
        places = [spec.origin]
    return [Path(place).resolve().parent for place in places]


def _file(module: str, folders: list[Path]) -> Path | None:
    """The file of a module, if it exists in one of the folders."""
    bases = [folder.joinpath(*module.split(".")) for folder in folders]
    endings = ["/__init__.py", ".py", *EXTENSION_SUFFIXES]
    return next((file for base in bases for end in endings if (file := Path(f"{base}{end}")).is_file()), None)


def _ancestors(module: str) -> list[str]:
    """A module and its parent packages, which run before it."""
    parts = module.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def _imported(statements: list[ast.stmt], module: str, *, is_package: bool) -> Iterator[str]:
    """Dotted names that a module may import; `from a import b` may mean the module `a.b` or something in `a`."""
    package = module if is_package else module.rpartition(".")[0]
    waiting: list[ast.AST] = [*statements]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # relative, and beyond the top
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
