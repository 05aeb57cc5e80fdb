"""Describe plugins: a line of each from its source text, and all about one from importing it.

`overview` reads texts and imports nothing, so a listing cannot run anybody's code.
"""

import ast
import contextlib
import inspect
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ..errors import PluginError, UnknownPluginError
from ..guard.calls import PASSED_BY_TRL, parameters_of
from ..guard.outcomes import exception_text
from ..guard.untrusted import as_json
from ..types import Declaration, role_of
from .building import import_plugin
from .discovery import Installed, PluginInfo, clash, find, is_allowed, module_spec, split_target, unknown_name
from .docstrings import Docstring, first_sentence, read_docstring
from .kinds import FACTS, Kind
from .selection import parse_selection

PLACEHOLDER = "REPLACE_ME"
_METHODS = (*(m for facts in FACTS.values() for m in facts.methods if m != "__call__"), "state_dict")


@dataclass(frozen=True)
class Entry:
    """A plugin in the list."""

    info: PluginInfo
    state: str  # "ready" (no promise: an import may fail), "blocked", "ambiguous" or "no module"
    detail: str  # why
    summary: str  # the first sentence of its docs

    def plain(self) -> dict[str, Any]:
        return {**self.info.plain(), "state": self.state, "detail": self.detail, "summary": self.summary}


def overview(shown: Sequence[PluginInfo], installed: Sequence[PluginInfo]) -> list[Entry]:
    """Inspect some of the installed plugins without importing them. All are passed in, to see whose names collide."""
    allowed = [info for info in installed if is_allowed(info)]
    return [Entry(info, *_state(info, allowed), first_sentence(_docstring(info))) for info in shown]


def _docstring(info: PluginInfo) -> str:
    module, attribute = split_target(info.target)
    found = _definitions_in(module).get(attribute)
    return (ast.get_docstring(found) if found else None) or ""


def _state(info: PluginInfo, allowed: Sequence[PluginInfo]) -> tuple[str, str]:
    same_name = [one for one in allowed if one.kind == info.kind and one.answers_to(info.name)]
    if not is_allowed(info) or (len(same_name) > 1 and not info.dotted):
        return clash(info.name, [info], same_name if is_allowed(info) else [])
    if module_spec(split_target(info.target)[0]) is None:
        return "no module", f"there is no module for its target {info.target!r}"
    return "ready", ""


def find_named(name: str, kind: Kind | None, installed: Installed) -> list[PluginInfo]:
    """The plugins that a name, an alias, `distribution:name` or a dotted path refers to, by default of any kind."""
    asked = parse_selection(kind or "reward", name)
    offered = [info for info in installed.plugins if kind in (None, info.kind) and info.answers_to(asked.name)]
    if asked.distribution is None:
        if not offered:
            raise UnknownPluginError(unknown_name(kind, asked, installed))
        return offered
    if theirs := [one for one in installed.of(asked.distribution) if one in offered]:
        return theirs
    if kind is None:
        found = _definitions_in(asked.distribution).get(asked.name)
        body = found.body if found else ()
        methods = {node.name for node in body if isinstance(node, ast.FunctionDef)} - {"__call__"}
        kind = next((kind for kind, facts in FACTS.items() if methods.intersection(facts.methods)), None)
    return [find(kind or "reward", asked)]


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_CHARACTERS = 500_000


@lru_cache(maxsize=256)
def _definitions_in(name: str) -> dict[str, Definition]:
    spec = module_spec(name)
    try:
        text = getattr(spec.loader, "get_source", lambda name: None)(spec.name) if spec else None
        if text is None or len(text) > _CHARACTERS:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {node.name: node for node in ast.parse(text).body if isinstance(node, Definition)}
    except (ImportError, OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}


@dataclass(frozen=True)
class Parameter:
    """A parameter that a selection can name; type and default as Python writes them, None where there is none."""

    name: str
    type: str | None
    default: str | None

    @property
    def required(self) -> bool:
        return self.default is None

    def __str__(self) -> str:
        equals = " = " if self.type else "="
        return self.name + (f": {self.type}" if self.type else "") + (equals + self.default if self.default else "")


@dataclass(frozen=True)
class PluginDocs:
    """All about a plugin."""

    info: PluginInfo
    state: str = "ready"  # as an `Entry`'s, or "broken", if importing it failed
    detail: str = ""
    form: str = "unknown"  # or class, function, instance
    parameters: tuple[Parameter, ...] = ()  # those that a selection may set
    columns: tuple[str, ...] = ()  # those that a reward names
    declares: dict[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    doc: Docstring = field(default_factory=Docstring)
    file: Path | None = None
    line: int | None = None

    @property
    def example(self) -> str:
        """A selection in YAML."""
        name = self.info.name
        if self.info.dotted:
            name = ":".join(split_target(self.info.target))
        elif self.state == "ambiguous":
            name = f"{self.info.distribution}:{name}"
        return example(self.info.kind, name, self.parameters)

    def plain(self) -> dict[str, Any]:
        parameters = [
            {key: getattr(one, key) for key in ("name", "type", "required", "default")}
            | {"doc": self.doc.parameters.get(one.name, "")}
            for one in self.parameters
        ]
        found = {
            **self.info.plain(),
            **{key: getattr(self, key) for key in ("state", "detail", "form")},
            "parameters": parameters,
            "file": None if self.file is None else str(self.file),
            **{key: getattr(self, key) for key in ("columns", "declares", "methods", "line", "example")},
            **{key: getattr(self.doc, key) for key in ("summary", "description", "papers", "sections")},
        }
        return {key: as_json(value) for key, value in found.items()}


def describe(info: PluginInfo, installed: Sequence[PluginInfo]) -> PluginDocs:
    """Describe a plugin by importing it; of one that is blocked there is its docstring alone."""
    state, detail = _state(info, [one for one in installed if is_allowed(one)])
    docs = PluginDocs(info, state, detail, doc=read_docstring(_docstring(info)))
    if state == "blocked":
        return docs
    try:
        with contextlib.redirect_stdout(sys.stderr):  # results go to stdout, and a plugin's chatter is none
            return _of_object(docs, import_plugin(info))
    except PluginError as error:
        return replace(docs, state="broken", detail=str(error))
    except Exception as error:  # a metaclass or a property of somebody's
        problem = f"reading {info.target} raised {type(error).__name__}: {exception_text(error)}"
        return replace(docs, state="broken", detail=problem)


def _of_object(docs: PluginDocs, exported: Any) -> PluginDocs:
    kind = docs.info.kind
    is_class = isinstance(exported, type)
    is_function = inspect.isroutine(exported) or isinstance(exported, partial)
    form = "class" if is_class else "function" if is_function else "instance"
    takes_none = is_class and (exported.__init__, exported.__new__) == (object.__init__, object.__new__)
    takes = [] if form == "instance" or takes_none else _parameters(exported)
    ours = takes
    columns: tuple[str, ...] = ()
    if kind == "reward":
        called = takes if is_function else _parameters(exported.__call__)[is_class:]
        own = [one for one in called if one.name not in PASSED_BY_TRL]
        columns = tuple(one.name for one in own if one.required or not is_function)
        if is_function:
            ours = [one for one in own if not one.required]
    subject = type(exported) if form == "instance" else exported.func if isinstance(exported, partial) else exported
    declared = getattr(exported, "declares", None)
    declares = declared.shown() if isinstance(declared, Declaration) else {}
    if kind == "advantage_hook":
        with contextlib.suppress(PluginError):  # its parameters decide
            declares |= {"role": role_of(exported)}
    file = None
    line = None
    with contextlib.suppress(TypeError, OSError):
        file = Path(inspect.getfile(subject))
        line = inspect.getsourcelines(subject)[1]
    return replace(
        docs,
        form=form,
        parameters=tuple(ours),
        columns=columns,
        declares=declares,
        methods=tuple(name for name in _METHODS if callable(getattr(exported, name, None))),
        doc=read_docstring(inspect.getdoc(subject) or inspect.getdoc(inspect.getmodule(subject)) or ""),
        file=file,
        line=line,
    )


def _parameters(called: Any) -> list[Parameter]:
    found = []
    for one in (parameters_of(called) or {}).values():
        annotation = None if one.annotation is one.empty else inspect.formatannotation(one.annotation).strip("'")
        default = None if one.default is one.empty else repr(one.default)
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            found.append(Parameter(one.name, annotation, default))
    return found


def example(kind: Kind, name: str, parameters: Sequence[Parameter]) -> str:
    """Write a selection in YAML, with a placeholder for each parameter that is required."""
    import yaml  # here, because only examples need it

    required = {one.name: PLACEHOLDER for one in parameters if one.required}
    selected: Any = {"name": name, **required} if required else name
    selected = [selected] if FACTS[kind].several else selected
    for key in reversed(FACTS[kind].setting):
        selected = {key: selected}
    text: str = yaml.safe_dump(selected, sort_keys=False, width=1_000_000)
    return text
