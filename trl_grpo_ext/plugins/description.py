"""Describe plugins: a line of each from its source text, and all about one from importing it.

`overview` imports nothing: it finds a module's file as the import system would and reads its text, so a listing cannot
run anybody's code. What an import makes at run time it does not see; then it says nothing rather than something wrong.
`describe` imports the plugin.
"""

from __future__ import annotations

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
from ..guard.calls import PASSED_BY_TRL
from ..guard.outcomes import exception_text
from ..guard.untrusted import as_json
from ..types import HOOK_METHODS, ROLES, Declaration
from .building import import_plugin
from .discovery import Installed, PluginInfo, clash, find, is_allowed, split_target, unknown_name
from .docstrings import Docstring, first_sentence, read_docstring
from .kinds import FACTS, Kind
from .metadata import module_spec, normalise
from .selection import parse_selection

BY_PARAMETERS = "depends on the parameters"
PLACEHOLDER = "REPLACE_ME"
_METHODS = (*(m for facts in FACTS.values() for m in facts.methods if m != "__call__"), "state_dict")


@dataclass(frozen=True)
class Entry:
    """A plugin in the list: its state, why, the first sentence of its docs, and an advantage hook's role.

    The state is "ready", "blocked", "ambiguous", "twice" or "no module"; "ready" is no promise: an import may still
    fail. The role is empty if unknown, and several joined by " or " if the parameters decide.
    """

    info: PluginInfo
    state: str
    detail: str
    summary: str
    role: str = ""


def overview(shown: Sequence[PluginInfo], installed: Sequence[PluginInfo]) -> list[Entry]:
    """Inspect some of the installed plugins without importing them. All are passed in, to see whose names collide."""
    allowed = [info for info in installed if is_allowed(info)]
    return [_look(info, allowed)[0] for info in shown]


def _look(info: PluginInfo, allowed: Sequence[PluginInfo]) -> tuple[Entry, list[Definition]]:
    """The entry; and the plugin's class with its bases, or its function, as far as the text shows them."""
    module, attribute = split_target(info.target)
    found = _definitions(module, attribute)
    summary = first_sentence(ast.get_docstring(found[0]) or "") if found else ""
    role = _role(found) if info.kind == "advantage_hook" else ""
    return Entry(info, *_state(info, allowed), summary, role), found


def _state(info: PluginInfo, allowed: Sequence[PluginInfo]) -> tuple[str, str]:
    same_name = [one for one in allowed if one.kind == info.kind and one.answers_to(info.name)]
    if not is_allowed(info) or (len(same_name) > 1 and not info.dotted):
        return clash(info.name, [info], same_name if is_allowed(info) else [])
    if module_spec(split_target(info.target)[0]) is None:
        return "no module", f"there is no module for its target {info.target!r}"
    return "ready", ""


def _role(classes: Sequence[Definition]) -> str:
    """The role of a hook: the declared one, several that its parameters decide between, or the only one that fits."""
    for one in classes:
        if given := _declaration_in(one).get("role"):
            places = one if isinstance(given, ast.Name) else given  # a variable's values are somewhere in the class
            texts = {node.value for node in ast.walk(places) if isinstance(node, ast.Constant)}
            return " or ".join(role for role in ROLES if role in texts)
    has = {node.name for one in classes for node in one.body if isinstance(node, ast.FunctionDef)} & set(HOOK_METHODS)
    only = [role for role, method in ROLES.items() if has == {method}]
    return only[0] if len(only) == 1 else ""


def _declaration_in(one: Definition) -> dict[str, ast.expr]:
    """The keywords of the first `...Declaration(...)` in a definition's text."""
    for node in ast.walk(one):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Declaration"):
            return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    return {}


def find_named(name: str, kind: Kind | None, installed: Installed) -> list[PluginInfo]:
    """The plugins that a name, an alias, `distribution:name` or a dotted path refers to, by default of any kind."""
    asked = parse_selection(kind or "reward", name)
    offered = [info for info in installed.plugins if kind in (None, info.kind) and info.answers_to(asked.name)]
    if asked.distribution is None:
        if not offered:
            raise UnknownPluginError(unknown_name(kind, asked, installed))
        return offered
    if found := [one for one in offered if normalise(one.distribution or "") == normalise(asked.distribution)]:
        return found
    if kind is None:
        bodies = [node for one in _definitions(asked.distribution, asked.name) for node in one.body]
        methods = {node.name for node in bodies if isinstance(node, ast.FunctionDef)} - {"__call__"}
        kind = next((kind for kind, facts in FACTS.items() if methods.intersection(facts.methods)), None)
    return [find(kind or "reward", asked)]


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_CHARACTERS = 500_000


@lru_cache(maxsize=256)
def _definitions_in(name: str) -> dict[str, Definition]:
    """The classes and functions of a module's text; empty if there is no such module or its text cannot be read."""
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


def _definitions(module: str, attribute: str) -> list[Definition]:
    """The function, or the class and its bases in the same module, nearest first; empty if the text has none."""
    known, found, names = _definitions_in(module), list[Definition](), [attribute]
    for name in names:
        if name in known and known[name] not in found:
            found.append(known[name])
            names += [base.id for base in getattr(known[name], "bases", ()) if isinstance(base, ast.Name)]
    return found


@dataclass(frozen=True)
class Parameter:
    """One parameter; type and default as Python writes them, None where there is none."""

    name: str
    type: str | None
    default: str | None
    kind: inspect._ParameterKind

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is None

    @property
    def selectable(self) -> bool:
        """Whether a selection can name it: neither positional only nor starred."""
        return self.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

    def __str__(self) -> str:
        equals = " = " if self.type else "="
        return self.name + (f": {self.type}" if self.type else "") + (equals + self.default if self.default else "")


@dataclass(frozen=True)
class PluginDocs:
    """All about a plugin. `form` is class, function, instance or unknown; `columns` are those a reward names.

    `parameters` are those that a selection may set; `state` may also be "broken", if importing it failed.
    """

    info: PluginInfo
    state: str = "ready"
    detail: str = ""
    form: str = "unknown"
    parameters: tuple[Parameter, ...] = ()
    columns: tuple[str, ...] = ()
    declares: dict[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    doc: Docstring = field(default_factory=Docstring)
    file: Path | None = None
    line: int | None = None

    @property
    def example(self) -> str:
        """A selection in YAML."""
        name = self.info.name
        if self.info.dotted or self.state == "twice":
            name = ":".join(split_target(self.info.target))
        elif self.state == "ambiguous":
            name = f"{self.info.distribution}:{name}"
        return example(self.info.kind, name, self.parameters)

    def plain(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        of_info = ("kind", "name", "distribution", "version", "builtin", "aliases", "target")
        parameters = [
            {key: getattr(one, key) for key in ("name", "type", "required", "default")}
            | {"doc": self.doc.parameters.get(one.name, "")}
            for one in self.parameters
        ]
        found = {
            **{key: getattr(self.info, key) for key in of_info},
            **{key: getattr(self, key) for key in ("state", "detail", "form")},
            "parameters": parameters,
            "file": None if self.file is None else str(self.file),
            **{key: getattr(self, key) for key in ("columns", "declares", "methods", "line", "example")},
            **{key: getattr(self.doc, key) for key in ("summary", "description", "papers", "sections")},
        }
        return {key: as_json(value) for key, value in found.items()}


def describe(info: PluginInfo, installed: Sequence[PluginInfo]) -> PluginDocs:
    """Describe a plugin by importing it; of one that is blocked there is its docstring alone."""
    entry, found = _look(info, [one for one in installed if is_allowed(one)])
    docs = PluginDocs(info, entry.state, entry.detail)
    if found:
        docs = replace(docs, doc=read_docstring(ast.get_docstring(found[0]) or ""))
    if entry.state == "blocked":
        return docs
    try:
        with contextlib.redirect_stdout(sys.stderr):  # results go to stdout, and a plugin's chatter is none
            exported = import_plugin(info)
            return _of_object(docs, exported, found, entry.role)
    except PluginError as error:
        return replace(docs, state="broken", detail=str(error))
    except Exception as error:  # a metaclass or a property of somebody's
        problem = f"reading {info.target} raised {type(error).__name__}: {exception_text(error)}"
        return replace(docs, state="broken", detail=problem)


def _of_object(docs: PluginDocs, exported: Any, found: Sequence[Definition], role: str) -> PluginDocs:
    kind = docs.info.kind
    is_class = isinstance(exported, type)
    is_function = inspect.isroutine(exported) or isinstance(exported, partial)
    form = "class" if is_class else "function" if is_function else "instance"
    takes_none = is_class and (exported.__init__, exported.__new__) == (object.__init__, object.__new__)
    takes = [] if form == "instance" or takes_none else _parameters(exported)
    ours = [one for one in takes or () if one.selectable]
    called = takes if is_function else _parameters(exported.__call__)[is_class:] if kind == "reward" else None  # type: ignore[index]
    columns: tuple[str, ...] = ()
    if kind == "reward":
        columns = tuple(
            one.name
            for one in called or ()
            if one.selectable and one.name not in PASSED_BY_TRL and (one.required or not is_function)
        )
    if is_function and kind == "reward":
        ours = [one for one in ours if not one.required and one.name not in PASSED_BY_TRL]
    subject = type(exported) if form == "instance" else exported.func if isinstance(exported, partial) else exported
    declares = _declared(exported, found) | ({"role": role} if role else {})
    file, line = None, None
    with contextlib.suppress(TypeError, OSError):
        file, line = Path(inspect.getfile(subject)), inspect.getsourcelines(subject)[1]
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


def _declared(exported: Any, found: Sequence[Definition]) -> dict[str, Any]:
    """What the plugin declares; where `__init__` or a property does so, what its text shows, as `BY_PARAMETERS`."""
    declared = getattr(exported, "declares", None)
    if isinstance(declared, Declaration):
        return declared.shown()
    shown: dict[str, Any] = {}
    for name, value in next(filter(None, map(_declaration_in, found)), {}).items():
        try:
            shown[name] = ast.literal_eval(value)
        except ValueError:
            shown[name] = BY_PARAMETERS
    return shown


def _parameters(called: Any) -> list[Parameter] | None:
    """The parameters of a callable; None if Python knows none."""
    try:
        found = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        Parameter(
            one.name,
            None if one.annotation is one.empty else inspect.formatannotation(one.annotation).strip("'"),
            None if one.default is one.empty else repr(one.default),
            one.kind,
        )
        for one in found
    ]


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
