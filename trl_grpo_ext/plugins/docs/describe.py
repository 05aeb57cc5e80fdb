"""Everything about one plugin: from its text, and by importing it only where the text does not suffice."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import PluginError
from ..building import PASSED_BY_TRL, import_plugin
from ..discovery import PluginInfo
from ..selection import Selection
from .docstring import Docstring, read_docstring
from .example import example
from .overview import READY, overview
from .signature import (
    Parameter,
    function_parameters,
    inspected,
    literal,
    method_of,
    parameters_of,
    signature_text,
)
from .source import Found, SourceError, ancestry, find_definition, split_target

DECLARED = {
    "reward": ("reference_column", "takes_rewards", "deterministic", "conformance"),
    "advantage_hook": ("needs", "teachers", "per_completion", "conformance"),
    "loss_aggregation": ("needs_step_totals", "conformance"),
}
"""By kind, the attributes with which a plugin says something of itself."""

BY_PARAMETERS = "depends on the parameters"
_METHODS = ("on_rollout", "on_forward", "weights", "reduce", "state_dict")


@dataclass(frozen=True)
class PluginDocs:
    """What is known of a plugin.

    Attributes:
        info: Where it comes from.
        state: One of `overview.STATES`, or "broken" where it was imported and that failed.
        detail: Why it is not ready; empty where it is.
        form: "class", "function", "instance" (already built), or "unknown".
        parameters: Those that a selection may set.
        signature: As Python would write it; None where it is not known.
        columns: The columns of the data set that a reward names in its signature.
        declares: By attribute, what the plugin says of itself: a value, or `BY_PARAMETERS`, or the expression.
        methods: Which of the methods of its kind it has.
        doc: Its docstring.
        file: Where it is defined; None where that is not known.
        line: There, counted from 1.
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
        takes = self.declares.get("takes_rewards", ())
        return example(self.info.kind, name, self.parameters, takes if isinstance(takes, list | tuple) else ())

    def plain(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            **{name: getattr(self.info, name) for name in ("kind", "name", "distribution", "version", "builtin")},
            "aliases": list(self.info.aliases),
            **{name: getattr(self, name) for name in ("state", "detail", "form", "signature")},
            "target": self.info.target,
            "parameters": [
                {
                    "name": parameter.name,
                    "type": parameter.type,
                    "required": parameter.required,
                    "default": parameter.default,
                    "doc": self.doc.parameters.get(parameter.name, ""),
                }
                for parameter in self.parameters
            ],
            "columns": list(self.columns),
            "declares": {name: _plain(value) for name, value in self.declares.items()},
            "methods": list(self.methods),
            "summary": self.doc.summary,
            "description": self.doc.description,
            "formulas": list(self.doc.formulas),
            "papers": list(self.doc.papers),
            "sections": self.doc.sections,
            "file": None if self.file is None else str(self.file),
            "line": self.line,
            "example": self.example,
            "imported": self.imported,
        }


def describe(info: PluginInfo, installed: Sequence[PluginInfo], importing: bool = True) -> PluginDocs:
    """Describe a plugin.

    Args:
        info: The plugin.
        installed: All plugins, to see whose names collide.
        importing: Whether it may be imported where its text does not say what it takes: a class made at run time, an
            unknown decorator, a base class that cannot be found, an extension module. Plugins that are blocked are
            never imported.
    """
    entry = overview([info], installed)[0]
    found = find_definition(*split_target(info.target))
    docs = PluginDocs(info, entry.state, entry.detail)
    sure = False
    if isinstance(found, Found):
        docs, sure = _from_text(docs, found)
    if importing and not sure and entry.state in (READY, "ambiguous", "twice"):
        return _from_import(docs, found)
    if isinstance(found, SourceError) and not docs.detail:
        docs = replace(docs, detail=found.detail)
    return docs


def _from_text(docs: PluginDocs, found: Found) -> tuple[PluginDocs, bool]:
    is_class = isinstance(found.node, ast.ClassDef)
    takes, sure = parameters_of(found)
    doc = ast.get_docstring(found.node)
    if doc is None and is_class:
        doc = next(filter(None, (ast.get_docstring(one.node) for one in ancestry(found)[0])), None)
    parameters, columns = _split(docs.info, takes, not is_class)
    if is_class and docs.info.kind == "reward" and (call := method_of(found, "__call__")):
        columns = _columns(function_parameters(*call)[1:])
    return (
        replace(
            docs,
            form="instance" if found.built else "class" if is_class else "function",
            parameters=parameters,
            signature=signature_text(takes) if sure else None,
            columns=columns,
            declares=_declared(docs.info, found),
            methods=tuple(name for name in _METHODS if is_class and method_of(found, name)),
            doc=read_docstring(doc or ast.get_docstring(found.module.tree) or ""),
            file=found.module.path,
            line=found.node.lineno,
        ),
        sure,
    )


def _split(
    info: PluginInfo, takes: Sequence[Parameter], is_function: bool
) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """What a selection may set, and the columns. A function's parameters without a default are columns."""
    named = [one for one in takes if one.kind in (one.kind.POSITIONAL_OR_KEYWORD, one.kind.KEYWORD_ONLY)]
    if not is_function or info.kind != "reward":
        return tuple(named), ()
    ours = [one for one in named if one.name not in PASSED_BY_TRL]
    return tuple(one for one in ours if not one.required), _columns([one for one in ours if one.required])


def _columns(takes: Sequence[Parameter]) -> tuple[str, ...]:
    kinds = inspect.Parameter
    named = [one.name for one in takes if one.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    return tuple(name for name in named if name not in PASSED_BY_TRL)


def _declared(info: PluginInfo, found: Found) -> dict[str, Any]:
    declared: dict[str, Any] = {}
    for one in ancestry(found)[0]:
        for name in DECLARED[info.kind]:
            if name not in declared and (value := _declaration(one, name)) is not None:
                declared[name] = value
    return {name: declared[name] for name in DECLARED[info.kind] if name in declared}


def _declaration(found: Found, name: str) -> Any:
    """An attribute's value as the text has it; None where the text does not set it."""
    inside = found.node.body if isinstance(found.node, ast.ClassDef) else found.module.tree.body
    owner = "self" if isinstance(found.node, ast.ClassDef) else found.node.name
    for node in inside:
        if isinstance(node, ast.FunctionDef) and isinstance(found.node, ast.ClassDef):
            if node.name == name or (node.name == "__init__" and _sets(node, owner, name)):
                return BY_PARAMETERS
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name] if isinstance(found.node, ast.ClassDef) else [f"{owner}.{name}"]
            if any(ast.unparse(target) in names for target in targets):
                value, known = literal(found.module, node.value)
                return value if known and value is not None else None if known else ast.unparse(node.value)
    return None


def _sets(function: ast.FunctionDef, owner: str, name: str) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr == name
        and ast.unparse(node.value) == owner
        for node in ast.walk(function)
    )


def _from_import(docs: PluginDocs, found: Found | SourceError) -> PluginDocs:
    info = docs.info
    try:
        with contextlib.redirect_stdout(sys.stderr):  # results go to stdout, and a plugin's chatter is none
            exported = import_plugin(info, Selection(info.name, info.distribution), None)
    except PluginError as error:
        return replace(docs, state="broken", detail=str(error), imported=True)
    is_class = isinstance(exported, type)
    callable_: Callable[..., Any] | None = exported if is_class or inspect.isroutine(exported) else None
    takes = [] if callable_ is None else inspected(callable_)
    parameters, columns = _split(info, takes or [], not is_class)
    declares = {name: getattr(exported, name, None) for name in DECLARED[info.kind]}
    declares = {
        name: value for name, value in declares.items() if value is not None and not isinstance(value, property)
    }
    declares |= {name: BY_PARAMETERS for name in docs.declares if docs.declares[name] == BY_PARAMETERS}
    file, line = docs.file, docs.line
    if isinstance(found, SourceError):
        with contextlib.suppress(TypeError, OSError):
            subject = exported if callable_ is not None else type(exported)
            file, line = Path(inspect.getfile(subject)), inspect.getsourcelines(subject)[1]
    return replace(
        docs,
        form="class" if is_class else "function" if callable_ is not None else "instance",
        parameters=parameters,
        signature=None if takes is None else signature_text(takes),
        columns=columns or docs.columns,
        declares=declares,
        methods=tuple(name for name in _METHODS if callable(getattr(exported, name, None))),
        doc=docs.doc if docs.doc.text else read_docstring(inspect.getdoc(exported) or ""),
        file=file,
        line=line,
        imported=True,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
