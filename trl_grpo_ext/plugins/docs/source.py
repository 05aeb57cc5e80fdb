"""From `module:attribute` to the text that defines it, without importing anything.

A module's file is found as the import system would find it, but for what a package's `__init__` does when it runs: a
changed `__path__`, names made at run time. What cannot be found here may therefore still exist.
"""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path

HOPS = 6
"""How many re-exports, aliases or base classes are followed on the way to a definition."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_AT_RUN_TIME = frozenset({"__getattr__", "globals", "locals", "vars", "exec", "eval", "setattr", "sys"})
"""Names in a module's text that say that its attributes may be made when it runs."""


@dataclass(frozen=True)
class SourceError:
    """Why there is no text to read.

    Attributes:
        state: "no module", "unparsable", or "unreadable" where there is a module but no text: an extension, say.
        detail: The same in words.
    """

    state: str
    detail: str


@dataclass(frozen=True, eq=False)
class Module:
    """A module's text.

    Attributes:
        name: Dotted.
        path: Its file; inside an archive that is no file of its own.
        package: What its relative imports start from.
        tree: Its syntax tree.
        names: By name, the statements that bind it at the top level, in their order.
        stars: The modules that it imports everything from.
    """

    name: str
    path: Path | None
    package: str
    tree: ast.Module
    names: dict[str, list[ast.stmt]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Found:
    """A definition.

    Attributes:
        module: Where it is.
        node: The class or function.
        built: Whether the attribute is an instance of that class, made in the module.
        bound: The keywords that a `functools.partial` has given already.
    """

    module: Module
    node: Definition
    built: bool = False
    bound: dict[str, ast.expr] = field(default_factory=dict)


def split_target(target: str) -> tuple[str, str]:
    """Module and attribute of an entry point's value, without its extras; empty where one is missing."""
    module, _, rest = target.partition(":")
    return module.strip(), rest.partition("[")[0].strip()


def module_spec(name: str) -> ModuleSpec | None:
    """Find a module as the import system would, without importing its parents. None where there is none."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)  # imports nothing, since there is no parent
    except (ImportError, ValueError, AttributeError):  # ValueError: `__main__`
        return None
    dotted = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        dotted = f"{dotted}.{part}"
        spec = _inside(dotted, list(spec.submodule_search_locations))
    return spec


def _inside(dotted: str, places: Sequence[str]) -> ModuleSpec | None:
    portions: list[str] = []  # of a namespace package
    for place in places:
        finder = pkgutil.get_importer(place)
        spec = None if finder is None else finder.find_spec(dotted)
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec and spec.submodule_search_locations) or []
    if not portions:
        return None
    namespace = ModuleSpec(dotted, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


@lru_cache(maxsize=1024)
def read_module(name: str) -> Module | SourceError:
    """Read and parse a module. Broken text is an answer and no error."""
    spec = module_spec(name)
    if spec is None:
        return SourceError("no module", f"there is no module {name!r} on sys.path")
    get_source = getattr(spec.loader, "get_source", None)
    try:
        text = None if get_source is None else get_source(name)
    except (ImportError, OSError) as error:
        return SourceError("unreadable", f"{spec.origin} cannot be read: {error}")
    except (SyntaxError, ValueError) as error:  # its encoding
        return SourceError("unparsable", f"{spec.origin} cannot be decoded: {error}")
    if text is None:
        return SourceError("unreadable", f"the module {name!r} has no source text ({spec.origin or 'a folder'})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # strange escapes in somebody's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return SourceError("unparsable", f"{spec.origin} cannot be parsed: {type(error).__name__}: {error}")
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    module = Module(name, Path(spec.origin) if spec.origin else None, package, tree)
    for statement in _top_level(tree.body):
        for bound in _binds(statement):
            module.names.setdefault(bound, []).append(statement)
        if isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names):
            module.stars.append(_imported_from(module, statement))
    return module


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import, those inside `if`, `try`, `with` and loops too."""
    for statement in body:
        yield statement
        if not isinstance(statement, Definition):
            for name in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(statement, name, []))
            for handler in getattr(statement, "handlers", []):
                yield from _top_level(handler.body)


def _binds(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, Definition):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _imported_from(module: Module, statement: ast.ImportFrom) -> str:
    """The module that a `from ... import` names, absolute; empty where the dots lead out of the package."""
    if not statement.level:
        return statement.module or ""
    parents = module.package.split(".")
    if statement.level > len(parents) or not module.package:
        return ""
    base = parents[: len(parents) - statement.level + 1]
    return ".".join([*base, statement.module] if statement.module else base)


def imported_name(module: Module, name: str) -> tuple[str, str] | None:
    """Where a name is imported from by `from ... import`, module and name there; None where it is not."""
    statements = [one for one in module.names.get(name, []) if isinstance(one, ast.ImportFrom)]
    if not statements:
        return None
    statement = statements[-1]
    alias = next(alias for alias in reversed(statement.names) if name == (alias.asname or alias.name))
    return _imported_from(module, statement), alias.name


def find_definition(module_name: str, attribute: str, hops: int = HOPS) -> Found | SourceError:
    """Find what `module:attribute` defines, through re-exports, aliases, `functools.partial` and instances.

    Returns:
        The definition; or an error, with the state "no attribute" where the text shows that there is none, and
        "unreadable" where it does not show what there is.
    """
    module = read_module(module_name)
    if isinstance(module, SourceError):
        return module
    first, *inner = attribute.split(".")
    found = _find_name(module, first, hops)
    for part in inner:
        if not isinstance(found, Found):
            break
        nested = [node for node in found.node.body if isinstance(node, Definition) and node.name == part]
        found = Found(found.module, nested[-1]) if nested else _unclear(module, attribute)
    return found


def _unclear(module: Module, attribute: str) -> SourceError:
    return SourceError("unreadable", f"the text of {module.name!r} does not show what {attribute!r} is")


def _find_name(module: Module, name: str, hops: int) -> Found | SourceError:
    if hops < 0:
        return _unclear(module, name)
    statements = module.names.get(name, [])
    # A definition tells most: `try: from fast import X`, `except ImportError: def X`; or `X = jit(X)` behind it.
    for statement in reversed(statements):
        if isinstance(statement, Definition):
            return Found(module, statement)
    if imported := imported_name(module, name):
        return _elsewhere(*imported, hops)
    for statement in reversed(statements):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            return find_expression(module, statement.value, hops - 1)
    for star in () if statements else reversed(module.stars):
        found = _elsewhere(star, name, hops)
        if isinstance(found, Found):
            return found
    if not statements and not module.stars and _surely_lacks(module, name):
        return SourceError("no attribute", f"{module.path or module.name} defines no {name!r}")
    return _unclear(module, name)


def _elsewhere(module_name: str, name: str, hops: int) -> Found | SourceError:
    module = read_module(module_name) if hops > 0 and module_name else None
    if isinstance(module, Module):
        return _find_name(module, name, hops - 1)
    detail = module.detail if isinstance(module, SourceError) else "too many modules import it from each other"
    return SourceError("unreadable", f"{name!r} is imported from {module_name!r}: {detail}")


def _surely_lacks(module: Module, name: str) -> bool:
    """Whether nothing in the text can make that attribute: its name stands nowhere, and no run-time trick does."""
    if module_spec(f"{module.name}.{name}") is not None:
        return False  # a submodule
    for node in ast.walk(module.tree):
        words = {getattr(node, "id", None), getattr(node, "name", None), getattr(node, "attr", None)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
        if name in words or words & _AT_RUN_TIME:
            return False
    return True


def find_expression(module: Module, value: ast.expr, hops: int = HOPS) -> Found | SourceError:
    """Find the definition behind an expression: a name, a dotted name, a call of a class, a `functools.partial`."""
    if isinstance(value, ast.Name):
        return _find_name(module, value.id, hops)
    if isinstance(value, ast.Attribute):
        return _find_dotted(module, ast.unparse(value), hops)
    if isinstance(value, ast.Call):
        if ast.unparse(value.func) in ("functools.partial", "partial") and value.args:
            found = find_expression(module, value.args[0], hops - 1)
            bound = {word.arg: word.value for word in value.keywords if word.arg}
            return Found(found.module, found.node, found.built, bound) if isinstance(found, Found) else found
        found = find_expression(module, value.func, hops - 1)
        if isinstance(found, Found) and isinstance(found.node, ast.ClassDef):
            return Found(found.module, found.node, built=True)
    return _unclear(module, ast.unparse(value)[:80])


def _find_dotted(module: Module, dotted: str, hops: int) -> Found | SourceError:
    """`a.b.Name`, where `a` or `a.b` was imported."""
    first, *middle, last = dotted.split(".")
    for statement in reversed(module.names.get(first, [])):
        for alias in statement.names if isinstance(statement, ast.Import | ast.ImportFrom) else ():
            if first not in (alias.asname, alias.name.partition(".")[0]):
                continue
            home = alias.name if alias.asname else first
            if isinstance(statement, ast.ImportFrom):
                home = f"{_imported_from(module, statement)}.{alias.name}"
            return _elsewhere(".".join([home, *middle]), last, hops)
    return _unclear(module, dotted)


def ancestry(found: Found) -> tuple[list[Found], bool]:
    """A class and the bases that its text leads to, nearest first; and whether none is missing.

    The order is that of a depth-first walk, which is Python's but for diamonds.
    """
    if not isinstance(found.node, ast.ClassDef):
        return [found], True
    classes, complete = [found], True
    for base in found.node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        if ast.unparse(plain).rpartition(".")[2] in ("object", "ABC", "Generic", "Protocol"):
            continue
        above = find_expression(found.module, plain) if len(classes) <= HOPS else None
        if not isinstance(above, Found) or not isinstance(above.node, ast.ClassDef) or above.node is found.node:
            complete = False
            continue
        further, known = ancestry(above)
        classes += [one for one in further if all(one.node is not other.node for other in classes)]
        complete = complete and known
    return classes, complete
