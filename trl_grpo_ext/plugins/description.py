"""Describe a plugin: its state, its parameters, its docstring, and a selection to paste.

Griffe reads all of this from source text and executes nothing. A module's file is found as the import system would find
it, except for what a package's `__init__` does at run time: a changed `__path__`, dynamic names. So something not found
here may still exist. `describe` imports the plugin only if the text does not suffice.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import re
import sys
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import griffe

from ..errors import ConfigurationError, PluginError, UnknownPluginError
from ..types import HOOK_METHODS, ROLES
from .building import PASSED_BY_TRL, import_plugin
from .discovery import ENVIRONMENT_VARIABLE, Installed, PluginInfo, find, is_allowed, suggest_names
from .kinds import FACTS, LABELS, Kind, kind_of_methods
from .metadata import normalise
from .selection import Selection

READY = "ready"
STATES = {
    READY: "it can be selected by its name",
    "blocked": f"{ENVIRONMENT_VARIABLE} keeps its distribution from loading",
    "ambiguous": "another distribution offers the name too: select it as `distribution:name`",
    "twice": "its distribution declares the name twice, differently",
    "no module": "the metadata names a module that is not there",
    "no attribute": "the module is there, and its text has no such name",
    "unparsable": "the module's text is not Python that can be parsed",
}
"""A plugin's possible states. "ready" is no promise: an import may still fail."""

BY_PARAMETERS = "depends on the parameters"
PLACEHOLDER = "REPLACE_ME"
_METHODS = (*(m for facts in FACTS.values() for m in facts.methods if m != "__call__"), "state_dict")


@dataclass(frozen=True)
class Entry:
    """A plugin in the list.

    Attributes:
        info: Its origin.
        state: One of the `STATES`.
        detail: Why it is not ready; empty if it is.
        summary: The first sentence of its docstring; empty if there is none or it cannot be read.
        role: An advantage hook's role, as in `Definition.role`; empty if its text does not say.
    """

    info: PluginInfo
    state: str
    detail: str
    summary: str
    role: str = ""


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: Its name.
        type: The annotation as written; None if there is none.
        default: The default as written; None if there is none.
        value: The default's value if it is a literal or a constant, `...` if unknown.
        kind: As in `inspect.Parameter`.
    """

    name: str
    type: str | None = None
    default: str | None = None
    value: Any = ...
    kind: inspect._ParameterKind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is None

    @property
    def selectable(self) -> bool:
        """Whether a selection can name it: neither positional only nor starred."""
        return self.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

    def __str__(self) -> str:
        return signature_text([self])[1:-1].removeprefix("*, ").removesuffix(", /")


def signature_text(parameters: Sequence[Parameter]) -> str:
    """`(a: int, *, b: float = 1.0)`."""
    texts = ({"annotation": one.type, "default": one.default} for one in parameters)
    given = ({key: _Verbatim(text) for key, text in each.items() if text is not None} for each in texts)
    ours = [inspect.Parameter(one.name, one.kind, **each) for one, each in zip(parameters, given, strict=True)]
    return str(inspect.Signature(ours, __validate_parameters__=False))


class _Verbatim(str):
    """A value whose `repr` is a given text, for signatures."""

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True)
class Docstring:
    """A docstring in its parts.

    Attributes:
        text: All of it, without the indentation.
        summary: The first sentence, on one line.
        description: The text outside the sections, including the summary.
        parameters: The text in `Args`, by name.
        sections: The text by title ("Source", "Departures", "Raises", "Returns", ...), without `Args`.
        formulas: Code that reads as a formula, in the order of the text, outside the sections.
        papers: All arXiv numbers in the text.
    """

    text: str = ""
    summary: str = ""
    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)
    formulas: tuple[str, ...] = ()
    papers: tuple[str, ...] = ()


@dataclass(frozen=True)
class PluginDocs:
    """A plugin's description.

    Attributes:
        info: Its origin.
        state: One of `STATES`, or "broken" if importing it failed.
        detail: Why it is not ready; empty if it is.
        form: "class", "function", "instance" (already built), or "unknown".
        parameters: The parameters that a selection may set.
        signature: As Python would write it; None if unknown.
        columns: The columns of the data set that a reward names in its signature.
        declares: The attributes that the plugin declares: a value, `BY_PARAMETERS`, or the expression.
        methods: The methods of its kind that it has.
        doc: Its docstring.
        file: The file that defines it; None if unknown.
        line: The line in that file, counted from 1.
        imported: Whether it was imported to find out.
    """

    info: PluginInfo
    state: str = READY
    detail: str = ""
    form: str = "unknown"
    parameters: tuple[Parameter, ...] = ()
    signature: str | None = None
    columns: tuple[str, ...] = ()
    declares: dict[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    doc: Docstring = field(default_factory=Docstring)
    file: Path | None = None
    line: int | None = None
    imported: bool = False

    @property
    def example(self) -> str:
        """A selection in YAML."""
        name = self.info.name
        if self.info.dotted or self.state == "twice":
            name = ":".join(split_target(self.info.target))
        elif self.state == "ambiguous":
            name = f"{self.info.distribution}:{name}"
        takes = self.declares.get(FACTS[self.info.kind].takes, ())
        return example(self.info.kind, name, self.parameters, takes if isinstance(takes, list | tuple) else ())

    def plain(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        of_parameter, of_doc = ("name", "type", "required", "default"), self.doc.parameters
        found = {
            **{key: getattr(self.info, key) for key in ("kind", "name", "distribution", "version", "builtin")},
            **{key: getattr(self.info, key) for key in ("aliases", "target")},
            **{key: getattr(self, key) for key in ("state", "detail", "form", "signature")},
            "parameters": [
                {**{key: getattr(one, key) for key in of_parameter}, "doc": of_doc.get(one.name, "")}
                for one in self.parameters
            ],
            **{key: getattr(self, key) for key in ("columns", "declares", "methods")},
            **{key: getattr(self.doc, key) for key in ("summary", "description", "formulas", "papers", "sections")},
            "file": None if self.file is None else str(self.file),
            **{key: getattr(self, key) for key in ("line", "example", "imported")},
        }
        return {key: _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


# ------------------------------------------------------------------------------------------------ finding, describing


def find_named(name: str, kind: Kind | None, installed: Installed) -> list[PluginInfo]:
    """The plugins that a name, an alias, `distribution:name` or a dotted path refers to, by default of any kind.

    Raises:
        UnknownPluginError: There is none; the message suggests similar names.
        ConfigurationError: The name is malformed.
    """
    first, colon, rest = (part.strip() for part in name.partition(":"))
    wanted = rest if colon else first
    if not wanted or (colon and not first) or ":" in rest:
        raise ConfigurationError(
            f"{name!r} names no plugin: write a name, `distribution:name` or `package.module:attribute`."
        )
    offered = [info for info in installed.plugins if kind in (None, info.kind)]
    if colon:
        offered = [info for info in offered if normalise(info.distribution or "") == normalise(first)]
    if found := [info for info in offered if info.answers_to(wanted)]:
        return found
    what = LABELS[kind] if kind else "plugin"
    text = f"No installed distribution offers a {what} called {wanted!r}."
    if colon:
        path = find_definition(first, rest)
        if not isinstance(path, SourceError) or path.state not in ("no module", "no attribute"):
            return [find(kind or kind_of_methods(path.methods if isinstance(path, Definition) else ()), name)]
        if normalise(first) not in installed.distributions:
            raise UnknownPluginError(
                f"{name!r} names no {what}: no installed distribution is called {first!r}, and {path.detail}."
            )
        text = f"The distribution {first!r} offers no {what} {wanted!r}."
    text += suggest_names(wanted, [each for info in offered for each in (info.name, *info.aliases)])
    text += f" `trl-grpo-ext list{f' --distribution {first}' if colon else ''}` shows what there is."
    if installed.unreadable:
        text += f" Distributions whose metadata cannot be read: {'; '.join(installed.unreadable)}."
    raise UnknownPluginError(text)


def overview(shown: Sequence[PluginInfo], installed: Sequence[PluginInfo]) -> list[Entry]:
    """Inspect some of the installed plugins without importing them. All are passed in, to see whose names collide."""
    by_name: dict[tuple[Kind, str], list[PluginInfo]] = defaultdict(list)
    for info in installed:
        if is_allowed(info):
            for name in {info.name, *info.aliases}:
                by_name[info.kind, name].append(info)
    return [_look(info, by_name[info.kind, info.name])[0] for info in shown]


def _look(info: PluginInfo, same_name: Sequence[PluginInfo]) -> tuple[Entry, Definition | SourceError]:
    module, attribute = split_target(info.target)
    malformed = SourceError("no attribute", f"its target {info.target!r} is not of the form module:attribute")
    found = find_definition(module, attribute) if module and attribute else malformed
    summary = first_sentence(_docstring(found.node)) if isinstance(found, Definition) else ""
    role = found.role if isinstance(found, Definition) and info.kind == "advantage_hook" else ""
    return Entry(info, *_state(info, same_name, found), summary, role), found


def _state(info: PluginInfo, same_name: Sequence[PluginInfo], found: Definition | SourceError) -> tuple[str, str]:
    if not is_allowed(info):
        return "blocked", STATES["blocked"]
    others = [] if info.dotted else [other for other in same_name if other != info]
    if twice := [other for other in others if other.distribution == info.distribution]:
        return "twice", f"{info.distribution} also declares it as {', '.join(other.target for other in twice)}"
    if others:
        names = ", ".join(other.distribution or "" for other in others)
        return "ambiguous", f"{names} offers the name too: select it as {info.distribution}:{info.name}"
    if isinstance(found, SourceError) and found.state in STATES:
        return found.state, found.detail
    return READY, ""


def describe(info: PluginInfo, installed: Sequence[PluginInfo], importing: bool = True) -> PluginDocs:
    """Describe a plugin.

    Args:
        info: The plugin.
        installed: All plugins, to see whose names collide.
        importing: Whether to import it if its text does not show its parameters: a class made at run time, an unknown
            decorator, a missing base class, an extension module. Blocked plugins are never imported.
    """
    same_name = [one for one in installed if is_allowed(one) and one.kind == info.kind and one.answers_to(info.name)]
    entry, found = _look(info, same_name)
    docs = PluginDocs(info, entry.state, entry.detail)
    sure = False
    if isinstance(found, Definition):
        docs, sure = _from_text(docs, found)
    if importing and not sure and entry.state in (READY, "ambiguous", "twice"):
        return _from_import(docs)
    if isinstance(found, SourceError) and not docs.detail:
        docs = replace(docs, detail=found.detail)
    return docs


def _from_text(docs: PluginDocs, found: Definition) -> tuple[PluginDocs, bool]:
    is_class = isinstance(found.node, griffe.Class)
    try:
        takes, sure = found.parameters()
        parameters, columns = _split(docs.info, takes, not is_class)
        if docs.info.kind == "reward" and (call := found.method("__call__")):
            columns = _columns(_parameters(call)[1:])
        declares = {name: found.declaration(name) for name in FACTS[docs.info.kind].declares}
        if "role" in declares:
            declares["role"] = found.role or declares["role"]
    except RecursionError:  # somebody's expressions
        return docs, False
    texts = [*map(_docstring, found.classes), _docstring(found.node), _docstring(found.node.module)]
    file = found.node.filepath
    docs = replace(
        docs,
        form="instance" if found.built else "class" if is_class else "function",
        parameters=parameters,
        signature=signature_text(takes) if sure else None,
        columns=columns,
        declares={name: value for name, value in declares.items() if value is not None},
        methods=found.methods,
        doc=read_docstring(next(filter(None, texts), "")),
        file=file if isinstance(file, Path) else None,
        line=found.node.lineno,
    )
    return docs, sure


def _split(
    info: PluginInfo, takes: Sequence[Parameter], is_function: bool
) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """The parameters that a selection may set, and the columns: a function's parameters without a default."""
    ours = [one for one in takes if one.selectable]
    if not is_function or info.kind != "reward":
        return tuple(ours), ()
    set_by_us = tuple(one for one in ours if not one.required and one.name not in PASSED_BY_TRL)
    return set_by_us, _columns(one for one in ours if one.required)


def _columns(takes: Iterable[Parameter]) -> tuple[str, ...]:
    return tuple(one.name for one in takes if one.selectable and one.name not in PASSED_BY_TRL)


def _from_import(docs: PluginDocs) -> PluginDocs:
    info = docs.info
    try:
        with contextlib.redirect_stdout(sys.stderr):  # results go to stdout, and a plugin's chatter is none
            exported = import_plugin(info, Selection(info.name, info.distribution), None)
    except PluginError as error:
        return replace(docs, state="broken", detail=str(error), imported=True)
    is_class = isinstance(exported, type)
    is_function = inspect.isroutine(exported) or isinstance(exported, partial)
    form = "class" if is_class else "function" if is_function else "instance"
    takes = [] if form == "instance" else _imported_parameters(exported)
    parameters, columns = _split(info, takes or [], not is_class)
    declares = {name: getattr(exported, name, None) for name in FACTS[info.kind].declares}
    declares = {name: one for name, one in declares.items() if one is not None and not isinstance(one, property)}
    file, line = docs.file, docs.line
    if file is None:
        with contextlib.suppress(TypeError, OSError):
            subject = type(exported) if form == "instance" else exported
            file, line = Path(inspect.getfile(subject)), inspect.getsourcelines(subject)[1]
    return replace(
        docs,
        form=form,
        parameters=parameters,
        signature=None if takes is None else signature_text(takes),
        columns=columns or docs.columns,
        declares=declares | {name: one for name, one in docs.declares.items() if one == BY_PARAMETERS},
        methods=tuple(name for name in _METHODS if callable(getattr(exported, name, None))),
        doc=docs.doc if docs.doc.text else read_docstring(inspect.getdoc(exported) or ""),
        file=file,
        line=line,
        imported=True,
    )


def _imported_parameters(exported: Callable[..., Any]) -> list[Parameter] | None:
    """The parameters of an imported object; None if Python knows none."""
    try:
        found = inspect.signature(exported).parameters.values()
    except (TypeError, ValueError):
        return None
    takes = []
    for one in found:
        type_ = None if one.annotation is one.empty else inspect.formatannotation(one.annotation)
        default = None if one.default is one.empty else repr(one.default)
        known = isinstance(one.default, str | int | float | bool | None | list | tuple | dict)
        takes.append(Parameter(one.name, type_, default, one.default if known else ..., one.kind))
    return takes


# -------------------------------------------------------------------------- from `module:attribute` to a definition

_HOPS = 6  # re-exports and aliases that are followed on the way to a definition
_LOOK_UPS = 500  # of one plugin: classes can name each other as bases in more ways than anybody waits for
_STARS = 20  # modules that are searched because one of them imports all from another
_LINES = 6_000  # griffe takes the square of a block's statements, for these some seconds
_CHARACTERS = 500_000
_AT_RUN_TIME = "__getattr__|globals|locals|vars|exec|eval|setattr|sys"
"""Words in a module's text that suggest attributes made at run time."""

_OF_NO_CONSEQUENCE = ("object", "abc.ABC", "typing.Generic", "typing.Protocol", "typing_extensions.Protocol")
_TRANSPARENT = (
    "span_reward",
    "final",
    "runtime_checkable",
    "total_ordering",
    "cache",
    "lru_cache",
    "override",
    "no_grad",
)
"""Base classes and decorators that do not change the parameters; with others the text alone is not reliable."""

_EMPTY = {"list()": "[]", "dict()": "{}", "tuple()": "()"}  # a dataclass's default factories
_KINDS = {one.value: getattr(inspect.Parameter, name.upper()) for name, one in griffe.ParameterKind.__members__.items()}


@dataclass(frozen=True)
class SourceError:
    """Why there is no text to read.

    Attributes:
        state: "no module", "no attribute", "unparsable", or "unreadable" if something exists that the text does not
            show: an extension, say.
        detail: The same in words.
    """

    state: str
    detail: str


def split_target(target: str) -> tuple[str, str]:
    """Module and attribute of an entry point's value, without its extras; empty if missing."""
    module, _, rest = target.partition(":")
    return module.strip(), rest.partition("[")[0].strip()


@lru_cache(maxsize=4096)
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


@lru_cache(maxsize=1024)
def read_module(name: str) -> griffe.Module | SourceError:
    """Read and parse a module. Broken text is returned as a `SourceError`, not raised."""
    spec = module_spec(name)
    if spec is None:
        return SourceError("no module", f"there is no module {name!r} on sys.path")
    get_source = getattr(spec.loader, "get_source", None)
    try:
        text = None if get_source is None else get_source(spec.name)
    except (ImportError, OSError) as error:
        return SourceError("unreadable", f"{spec.origin} cannot be read: {error}")
    except (SyntaxError, ValueError) as error:  # its encoding
        return SourceError("unparsable", f"{spec.origin} cannot be decoded: {error}")
    if text is None:
        return SourceError("unreadable", f"the module {name!r} has no source text ({spec.origin or 'a folder'})")
    if len(text) > _CHARACTERS or text.count("\n") + text.count(";") > _LINES:
        return SourceError("unreadable", f"{spec.origin} is too long to be read for a description")
    file, lines = Path(spec.origin or name), griffe.LinesCollection()
    lines[file] = text.splitlines()
    package, _, own = name.rpartition(".")
    given: Any = {"parent": _package(package), "lines_collection": lines, "modules_collection": _MODULES}
    try:
        with _quietly():
            return griffe.visit(own, file, text, extensions=griffe.Extensions(), **given)
    except (RecursionError, MemoryError) as error:
        return SourceError("unreadable", f"{spec.origin} is nested too deeply to be read: {error}")
    except (SyntaxError, ValueError) as error:
        return SourceError("unparsable", f"{spec.origin} cannot be parsed: {type(error).__name__}: {error}")


@cache
def _package(name: str) -> griffe.Module | None:
    """An empty stand-in for a module's package, from which relative imports start."""
    if not name:
        return None
    spec = module_spec(name)
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    file = Path(spec.origin) if spec and spec.origin else places
    package, _, own = name.rpartition(".")
    return griffe.Module(own, filepath=file, parent=_package(package), modules_collection=_MODULES)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence griffe's log and Python's warnings about the text being read."""
    with warnings.catch_warnings(), griffe.logger.disable():
        warnings.simplefilter("ignore")
        yield


class _Modules(griffe.ModulesCollection):
    """Modules that are read when griffe looks up a dotted path, such as an import or a base class."""

    look_ups = 0

    def get_member(self, key: str | Sequence[str]) -> Any:
        self.look_ups += 1
        path = key if isinstance(key, str) else ".".join(key)
        found = None if self.look_ups > _LOOK_UPS or path in _OF_NO_CONSEQUENCE else _at(path)
        if found is None or isinstance(found, SourceError):
            raise KeyError(path)
        return found

    __getitem__ = get_member


_MODULES = _Modules()


def find_definition(module_name: str, attribute: str) -> Definition | SourceError:
    """Find what `module:attribute` defines, through re-exports, aliases and instances.

    Returns:
        The definition; or an error, with the state "no attribute" if the text shows that there is none, or "unreadable"
        if the text does not show it.
    """
    _MODULES.look_ups = 0
    module = read_module(module_name)
    if isinstance(module, SourceError):
        return module
    first, *inner = attribute.split(".")
    try:
        found = _definition(_member(module, first), _HOPS)
    except RecursionError:
        found = _unclear(attribute)
    for part in inner:
        if isinstance(found, Definition):
            found = _definition(found.node.members.get(part) or _unclear(attribute), 0)
    return found


def _definition(member: griffe.Object | griffe.Alias | SourceError, hops: int) -> Definition | SourceError:
    if isinstance(member, SourceError):
        return member
    if isinstance(member, griffe.Class | griffe.Function):
        return Definition(member)
    if hops > 0 and isinstance(member, griffe.Alias):
        return _definition(_at(member.target_path), hops - 1)
    value = member.value if hops > 0 and isinstance(member, griffe.Attribute) else None
    if isinstance(value, griffe.ExprName | griffe.ExprAttribute):
        return _definition(_at(value.canonical_path), hops - 1)
    if isinstance(value, griffe.ExprCall):
        is_partial = value.canonical_path == "functools.partial"
        target = (*value.arguments, None)[0] if is_partial else value.function
        found = None if target is None else _definition(_at(_path(target)), hops - 1)
        if isinstance(found, Definition) and is_partial:
            words = {one.name: one.value for one in value.arguments if isinstance(one, griffe.ExprKeyword)}
            return replace(found, bound=words)
        if isinstance(found, Definition) and isinstance(found.node, griffe.Class):
            return replace(found, built=True)
    return _unclear(member.path)


def _at(path: str) -> griffe.Object | griffe.Alias | SourceError:
    """What a dotted path names: an attribute of the deepest module on the path, or else a module."""
    parts = path.split(".")
    depths = range(len(parts) - 1, 0, -1)
    depth = next((depth for depth in depths if module_spec(".".join(parts[:depth]))), 1)
    module = read_module(".".join(parts[:depth]))
    if isinstance(module, SourceError):
        return SourceError("unreadable", f"{path!r} is imported, and {module.detail}")
    if depth == len(parts):
        return module
    found = _member(module, parts[depth])
    if isinstance(found, SourceError) and depth == len(parts) - 1 and module_spec(path):
        return read_module(path)
    for part in parts[depth + 1 :]:
        found = (isinstance(found, griffe.Class) and found.members.get(part)) or _unclear(path)
    return found


def _member(module: griffe.Module, name: str) -> griffe.Object | griffe.Alias | SourceError:
    """What a module's text binds to a name. "no attribute" only if nothing in it can bind the name at run time."""
    waiting, seen = [module], {module.path}
    for one in waiting:
        if (found := one.members.get(name)) is not None:
            return found
        imports = [each.wildcard for each in one.members.values() if isinstance(each, griffe.Alias) and each.wildcard]
        for star in reversed(imports):
            if star not in seen and len(seen) < _STARS:
                seen.add(star)
                other = read_module(star)
                waiting += [other] if isinstance(other, griffe.Module) else []
    text = "\n".join(module.lines_collection[module.filepath])  # type: ignore[index]
    made = re.search(rf"\b({re.escape(name)}|{_AT_RUN_TIME})\b", text)
    if made or len(seen) > 1 or module_spec(f"{module.path}.{name}"):
        return _unclear(f"{module.path}:{name}")
    return SourceError("no attribute", f"{module.filepath} defines no {name!r}")


def _unclear(what: str) -> SourceError:
    return SourceError("unreadable", f"the text does not show what {what!r} is")


def _path(value: str | griffe.Expr) -> str:
    return value if isinstance(value, str) else value.canonical_path


@dataclass(frozen=True, eq=False)
class Definition:
    """A definition.

    Attributes:
        node: The class or function.
        built: Whether the attribute is an instance of that class.
        bound: Keywords already set by a `functools.partial`.
    """

    node: griffe.Class | griffe.Function
    built: bool = False
    bound: dict[str, str | griffe.Expr] = field(default_factory=dict)

    @cached_property
    def classes(self) -> list[griffe.Class]:
        """The class and its bases, as far as its text shows, nearest first; empty for a function."""
        if isinstance(self.node, griffe.Function):
            return []
        try:
            return [self.node, *self.node.mro()]
        except (ValueError, griffe.GriffeError):  # bases in a circle, or in no order
            return [self.node]

    def parameters(self) -> tuple[list[Parameter], bool]:
        """The parameters to build or call it with, and whether the text is reliable."""
        if self.built:
            return [], True
        if isinstance(self.node, griffe.Function):
            return self._bind(_parameters(self.node)), _transparent(self.node)
        shell = griffe.Module("dataclasses")
        shell.members |= {one.path: one for one in self.classes}
        griffe.DataclassesExtension().on_package(pkg=shell)  # gives them the __init__ that they will have
        sure = all(map(_transparent, self.classes)) and not self.node.keywords
        for one in self.classes:
            if isinstance(maker := one.members.get("__init__"), griffe.Function):
                return self._bind(_parameters(maker)[1:]), sure and (one is self.node or self._complete())
        return [], sure and self._complete()

    def _bind(self, parameters: list[Parameter]) -> list[Parameter]:
        return [_with_default(one, self.bound.get(one.name)) for one in parameters]

    def _complete(self) -> bool:
        """Whether all bases and their order are known."""
        if len(self.classes) == 1 and self.node.resolved_bases:  # type: ignore[union-attr]
            return False
        for one in self.classes:
            wanted = sum(_path(base) not in _OF_NO_CONSEQUENCE for base in one.bases)
            if sum(base.is_class for base in one.resolved_bases) != wanted:
                return False
        return True

    def method(self, name: str) -> griffe.Function | None:
        """A method of the class or of its bases."""
        members = (one.members.get(name) for one in self.classes)
        return next((one for one in members if isinstance(one, griffe.Function)), None)

    @property
    def methods(self) -> tuple[str, ...]:
        """The plugin methods that it has."""
        return tuple(name for name in _METHODS if self.method(name))

    @property
    def role(self) -> str:
        """An advantage hook's role, or several joined by " or " if its parameters decide; empty if unknown."""
        said = self.declaration("role")
        if said is None:
            has = [method for method in HOOK_METHODS if self.method(method)]
            only = [role for role, method in ROLES.items() if has == [method]]
            return only[0] if len(only) == 1 else ""
        if said != BY_PARAMETERS:
            return str(said)
        makers = (one.members.get("__init__") for one in self.classes)
        source = next((maker.source for maker in makers if isinstance(maker, griffe.Function)), "")
        lines = "\n".join(line for line in source.split("\n") if "self.role" in line)
        return " or ".join(role for role in ROLES if re.search(rf"""(["']){role}\1""", lines))

    def declaration(self, name: str) -> Any:
        """An attribute's value according to the text, `BY_PARAMETERS`, or the expression; None if nothing sets it."""
        if isinstance(self.node, griffe.Function):  # `function.attribute = value`, which griffe leaves out
            lines = "\n".join(self.node.module.lines_collection[self.node.filepath])  # type: ignore[index]
            found = re.search(rf"(?m)^{self.node.name}\.{name}\s*=\s*(.*?)\s*(?:#.*)?$", lines)
            return None if found is None else _literal(found[1], found[1])
        for one in self.classes:
            maker, member = one.members.get("__init__"), one.members.get(name)
            sets = rf"(?m)^[^=#(\n]*\bself\.{name}\b[^=(\n]*=(?!=)"
            made = isinstance(maker, griffe.Function) and maker.lineno and re.search(sets, maker.source)
            if made or isinstance(member, griffe.Function) or (member is not None and "property" in member.labels):
                return BY_PARAMETERS
            if isinstance(member, griffe.Attribute) and member.value not in (None, "None"):
                return _literal(member.value, str(member.value))
        return None


def _transparent(node: griffe.Class | griffe.Function) -> bool:
    paths = [one.callable_path for one in node.decorators]
    return all(path == "dataclasses.dataclass" or path.rpartition(".")[2] in _TRANSPARENT for path in paths)


def _parameters(node: griffe.Function) -> list[Parameter]:
    found = []
    for one in node.parameters:
        kind = _KINDS[one.kind.value if one.kind else "positional or keyword"]
        starred = kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameter = Parameter(one.name, None if one.annotation is None else str(one.annotation), kind=kind)
        found.append(_with_default(parameter, None if starred else one.default))
    return found


def _with_default(parameter: Parameter, default: str | griffe.Expr | None) -> Parameter:
    return parameter if default is None else replace(parameter, default=str(default), value=_literal(default))


def _literal(value: str | griffe.Expr | None, otherwise: Any = ...) -> Any:
    """The value of an expression, if it is a literal or a constant of any module."""
    for _ in range(_HOPS):
        if not isinstance(value, griffe.ExprName | griffe.ExprAttribute):
            break
        try:
            constant = _MODULES.get_member(value.canonical_path)
            constant = constant.final_target if constant.is_alias else constant
        except (KeyError, griffe.GriffeError):
            return otherwise
        value = constant.value if isinstance(constant, griffe.Attribute) else None
    try:
        return ast.literal_eval(_EMPTY.get(str(value), str(value)) if value is not None else "")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return otherwise


def _docstring(node: griffe.Object) -> str:
    return "" if node.docstring is None else node.docstring.value


# -------------------------------------------------------------------------------------------------------- docstrings

_TITLES = {
    **dict.fromkeys(("source", "sources", "reference", "references", "paper", "papers"), "Source"),
    **dict.fromkeys(("departures", "departure"), "Departures"),
    **dict.fromkeys(("example", "examples", "usage"), "Example"),
    **dict.fromkeys(("note", "notes", "warning", "warns"), "Note"),
    **{name.lower(): name for name in ("Returns", "Yields", "Raises", "Attributes")},
}
_OWN = re.compile(
    r"^(?P<title>Sources?|References?|Papers?|Departures?)(?P<more> [^:\n]{1,80})?:[ \t]+(?P<text>\S.*(?:\n.*\S.*)*)",
    re.MULTILINE,
)
"""This package's own sections; if one begins on the line of its title, it is one paragraph."""

_CODE = re.compile(r"``(.+?)``|:math:`([^`]+)`|`([^`]+)`|\$([^$\n]+)\$", re.DOTALL)
_ARXIV = re.compile(r"(?<![\d.])\d{2}(?:0[1-9]|1[0-2])\.\d{4,5}(?![\d.]*\d)")
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z(`]|$)")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|al|etc|eq|Dr|Eq|No|Sec|Fig)|\b[A-Z])\.$")
_LONGEST = 50_000  # characters of a docstring that are looked at


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line; without a full stop, the whole first paragraph."""
    paragraph = " ".join(text[:_LONGEST].strip().split("\n\n")[0].split())
    for match in _SENTENCE_END.finditer(paragraph):
        if not _ABBREVIATION.search(paragraph, max(0, match.start() - 10), match.start() + 1):
            return paragraph[: match.start() + 1]
    return paragraph


def read_docstring(whole: str) -> Docstring:
    """Parse a docstring in Google's style, dedented as by `inspect.getdoc`.

    Besides `Args:`, `Raises:` and the like it knows `Source: ...` and `Departures: ...` (or `Departures from the
    paper: ...`).
    """
    outside: list[str] = []
    sections: dict[str, list[str]] = defaultdict(list)
    parameters: dict[str, str] = {}
    text = whole[:_LONGEST]
    for match in _OWN.finditer(text):  # "Departures from the paper: none." keeps what they are from
        more = f"{match['more'].strip()}: " if match["more"] else ""
        sections[_TITLES[match["title"].lower()]].append(more + inspect.cleandoc(match["text"]))
    for section in _sections(_OWN.sub("", text)):
        kind = section.kind.value
        if kind in ("parameters", "other parameters"):
            for item in section.value:
                names = (name.strip().lstrip("*") for name in item.name.split(","))
                parameters |= dict.fromkeys(names, " ".join(item.description.split()))
        elif kind == "text":
            outside.append(section.value)
        else:
            kind = section.value.kind if kind == "admonition" else kind
            if kind in _TITLES:
                sections[_TITLES[kind]].append(_section_text(section))
            else:
                title = section.title or kind.capitalize()
                outside.append(f"{title}:\n" + "\n".join(f"    {line}" for line in _section_text(section).split("\n")))
    description = re.sub(r"\n{3,}", "\n\n", "\n\n".join(outside)).strip("\n")
    return Docstring(
        whole,
        first_sentence(whole),
        description,
        parameters,
        {name: "\n\n".join(texts) for name, texts in sections.items()},
        tuple(dict.fromkeys(_formulas(description))),
        tuple(dict.fromkeys(_ARXIV.findall(text))),
    )


def _sections(text: str) -> Sequence[Any]:
    """griffe's sections; one text section if griffe cannot read the docstring."""
    try:
        with _quietly():
            options = {"returns_multiple_items": False, "receives_multiple_items": False, "warnings": False}
            return griffe.parse_google(griffe.Docstring(text), **options)
    except (ValueError, LookupError, RecursionError, MemoryError):
        return [griffe.DocstringSectionText(text)]


def _section_text(section: Any) -> str:
    if section.kind.value == "admonition":
        return str(section.value.description)
    if section.kind.value == "examples":
        return "\n\n".join(text for _, text in section.value)
    lines = []
    for item in section.value:
        name, type_ = getattr(item, "name", ""), str(item.annotation or "")
        if section.kind.value == "attributes":  # where griffe gives an attribute the type of the one before
            type_ = ""
        head = f"{name} ({type_})" if name and type_ else name or type_
        lines.append((f"{head}: " if head else "") + item.description.replace("\n", "\n    " if head else "\n"))
    return "\n".join(lines)


def _formulas(description: str) -> list[str]:
    """Formulas: code that contains a sum or a relation between spaces, and indented lines that look like it."""
    found = []
    for paragraph in description.split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.startswith("    ") for line in lines) and _reads_as_formula(paragraph):
            found.append(textwrap.dedent(paragraph))
        else:
            code = (next(filter(None, match.groups())) for match in _CODE.finditer(paragraph))
            found += [" ".join(text.split()) for text in code if _reads_as_formula(text)]
    return found


def _reads_as_formula(text: str) -> bool:
    related = any(f" {relation} " in text for relation in ("=", "←", "∝", ":=", "≈", "\\sum"))
    return (related or any(sign in text for sign in "Σ∑·")) and "\n\n" not in text and len(text) <= 300


# ------------------------------------------------------------------------------------------------ a selection in YAML


def example(kind: Kind, name: str, parameters: Sequence[Parameter], selections: Collection[str] = ()) -> str:
    """Write an example selection.

    Args:
        kind: The plugin's kind.
        name: The name that selects it.
        parameters: The parameters that a selection may set.
        selections: The parameters that take selections of plugins of the same kind.
    """
    inside = [line for parameter in parameters for line in _lines(parameter, parameter.name in selections)]
    facts, lines = FACTS[kind], [f"name: {to_yaml(name)}", *inside]
    *outer, key = facts.setting
    if facts.several:
        first, *rest = lines if inside else [to_yaml(name)]
        body = [f"{key}:", f"  - {first}", *(f"    {line}" for line in rest)]
    else:
        body = [f"{key}:", *(f"  {line}" for line in lines)] if inside else [f"{key}: {to_yaml(name)}"]
    for key in reversed(outer):
        body = [f"{key}:", *(f"  {line}" for line in body)]
    return "\n".join([*body, ""])


def _lines(parameter: Parameter, is_selection: bool) -> list[str]:
    name = to_yaml(parameter.name)
    if parameter.required:
        what = "a selection, or several" if is_selection else _one_line(parameter.type or "")
        return [f"{name}: {PLACEHOLDER}  # {what}" if what else f"{name}: {PLACEHOLDER}"]
    with contextlib.suppress(ValueError):
        if parameter.value is not ...:
            return [f"# {name}: {to_yaml(parameter.value)}"]
    return [f"# {name}:  # default: {_one_line(parameter.default or '')}"]


def to_yaml(value: Any) -> str:
    """Write a plain value as one line of YAML 1.1, escaping terminal control characters.

    Raises:
        ValueError: YAML cannot represent it.
    """
    import yaml  # here, because only examples need it

    try:
        for unicode in (True, False):
            looks: dict[str, Any] = {"default_flow_style": True, "width": 1_000_000, "allow_unicode": unicode}
            text: str = yaml.dump(value, Dumper=_dumper(), sort_keys=False, **looks)
            text = text.removesuffix("\n").removesuffix("...").removesuffix("\n")
            if "\n" not in text and text.replace("\t", "").isprintable():
                return text
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        raise ValueError(f"{value!r} cannot be written as YAML: {error}") from error
    raise ValueError(f"{value!r} cannot be written as YAML on one line.")


@cache
def _dumper() -> Any:
    """PyYAML's dumper, but with strings that contain line breaks in double quotes, so that keys stay on one line."""
    import yaml

    class OneLine(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def string(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    OneLine.add_representer(str, string)
    return OneLine


def _one_line(text: str) -> str:
    return " ".join(text.split())
