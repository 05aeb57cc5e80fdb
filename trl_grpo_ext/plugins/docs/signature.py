"""What a plugin is built with: its parameters.

They are read from the text of `__init__`, of a dataclass's fields, or of a function.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .source import Found, Module, ancestry, imported_name, read_module

TRANSPARENT = frozenset(
    {
        "span_reward",
        "final",
        "runtime_checkable",
        "total_ordering",
        "cache",
        "lru_cache",
        "override",
        "dataclass",
        "no_grad",
    }
)
"""Decorators that leave the parameters as they are; with others the text does not say what they become."""


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: Its name.
        type: The annotation as it is written; None where there is none.
        required: Whether it has no default.
        default: The default as it is written; None where there is none.
        value: The default itself, where `known`.
        known: Whether `value` is the default: a literal, or a constant of the module.
        kind: As in `inspect.Parameter`.
    """

    name: str
    type: str | None = None
    required: bool = True
    default: str | None = None
    value: Any = None
    known: bool = False
    kind: inspect._ParameterKind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def __str__(self) -> str:
        kinds = inspect.Parameter
        star = "*" if self.kind is kinds.VAR_POSITIONAL else "**" if self.kind is kinds.VAR_KEYWORD else ""
        text = f"{star}{self.name}" + (f": {self.type}" if self.type else "")
        return text if self.required else f"{text}{' = ' if self.type else '='}{self.default}"


def signature_text(parameters: list[Parameter]) -> str:
    """`(a: int, *, b: float = 1.0)`."""
    parts: list[str] = []
    starred = False
    for index, parameter in enumerate(parameters):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            starred = True
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            parts, starred = [*parts, "*"], True
        parts.append(str(parameter))
        last_positional = parameter.kind is inspect.Parameter.POSITIONAL_ONLY and (
            index + 1 == len(parameters) or parameters[index + 1].kind is not inspect.Parameter.POSITIONAL_ONLY
        )
        parts += ["/"] if last_positional else []
    return f"({', '.join(parts)})"


def parameters_of(found: Found) -> tuple[list[Parameter], bool]:
    """The parameters to build or call it with, and whether the text is sure of them."""
    if found.built:
        return [], True
    if not isinstance(found.node, ast.ClassDef):
        parameters = _bind(function_parameters(found.module, found.node), found)
        return parameters, _transparent(found.node)
    classes, complete = ancestry(found)
    sure = all(_transparent(one.node) for one in classes) and not found.node.keywords
    for place, one in enumerate(classes):
        if _dataclass_options(one.node) is not None:
            return _bind(_fields(classes[place:]), found), sure and complete
        makers = [node for node in one.node.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if makers:
            return _bind(function_parameters(one.module, makers[-1])[1:], found), sure
    return [], sure and complete


def method_of(found: Found, name: str) -> tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef] | None:
    """A method of a class or of its bases."""
    for one in ancestry(found)[0]:
        for node in reversed(one.node.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return one.module, node
    return None


def function_parameters(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Parameter]:
    """The parameters of a function's definition."""
    given, kinds = node.args, inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    found = [
        _parameter(
            module,
            argument,
            default,
            kinds.POSITIONAL_ONLY if argument in given.posonlyargs else kinds.POSITIONAL_OR_KEYWORD,
        )
        for argument, default in zip(positional, defaults, strict=True)
    ]
    if given.vararg:
        found.append(_parameter(module, given.vararg, None, kinds.VAR_POSITIONAL))
    found += [
        _parameter(module, argument, default, kinds.KEYWORD_ONLY)
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        found.append(_parameter(module, given.kwarg, None, kinds.VAR_KEYWORD))
    return found


def inspected(exported: Callable[..., Any]) -> list[Parameter] | None:
    """The parameters of an object that was imported; None where Python knows none."""
    try:
        signature = inspect.signature(exported)
    except (TypeError, ValueError):
        return None
    return [
        Parameter(
            name,
            None if parameter.annotation is parameter.empty else inspect.formatannotation(parameter.annotation),
            parameter.default is parameter.empty,
            None if parameter.default is parameter.empty else repr(parameter.default),
            None if parameter.default is parameter.empty else parameter.default,
            isinstance(parameter.default, str | int | float | bool | None | list | tuple | dict),
            parameter.kind,
        )
        for name, parameter in signature.parameters.items()
    ]


def literal(module: Module, value: ast.expr, hops: int = 3) -> tuple[Any, bool]:
    """The value of an expression, and whether it is one that can be read.

    That is a literal, or a constant of the module or of one that it is imported from.
    """
    if isinstance(value, ast.Name):
        home, name = module, value.id
        while hops and (imported := imported_name(home, name)):
            other, name, hops = read_module(imported[0]), imported[1], hops - 1
            if not isinstance(other, Module):
                return None, False
            home = other
        bound = home.names.get(name, [])
        if len(bound) != 1 or not isinstance(bound[0], ast.Assign | ast.AnnAssign) or bound[0].value is None:
            return None, False
        value = bound[0].value
    try:
        return ast.literal_eval(value), True
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None, False


def _parameter(module: Module, argument: ast.arg, default: ast.expr | None, kind: inspect._ParameterKind) -> Parameter:
    annotation = None if argument.annotation is None else _annotation(argument.annotation)
    return _with_default(Parameter(argument.arg, annotation, kind=kind), module, default)


def _with_default(parameter: Parameter, module: Module, default: ast.expr | None) -> Parameter:
    if default is None:
        return parameter
    value, known = literal(module, default)
    return replace(parameter, required=False, default=ast.unparse(default), value=value, known=known)


def _annotation(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def _bind(parameters: list[Parameter], found: Found) -> list[Parameter]:
    """With what a `functools.partial` has given already as defaults; behind the first such, all are keywords."""
    return [
        _with_default(parameter, found.module, found.bound[parameter.name])
        if parameter.name in found.bound
        else parameter
        for parameter in parameters
    ]


def _decorator(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def _transparent(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return all(_decorator(one) in TRANSPARENT for one in node.decorator_list)


def _dataclass_options(node: ast.AST) -> dict[str, ast.expr] | None:
    for one in node.decorator_list if isinstance(node, ast.ClassDef) else ():
        if _decorator(one) == "dataclass":
            options = {word.arg: word.value for word in one.keywords if word.arg} if isinstance(one, ast.Call) else {}
            made = options.get("init")
            return None if isinstance(made, ast.Constant) and made.value is False else options
    return None


def _fields(classes: list[Found]) -> list[Parameter]:
    """The parameters of a dataclass, whose own fields come behind those of its bases."""
    fields: dict[str, Parameter] = {}
    for one in reversed(classes):
        options = _dataclass_options(one.node)
        if options is None:
            continue
        keyword_only = _is_true(options.get("kw_only"))
        for node in one.node.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            annotation = _annotation(node.annotation)
            if annotation.removeprefix("dataclasses.") == "KW_ONLY":
                keyword_only = True
            elif not annotation.removeprefix("typing.").startswith("ClassVar"):
                field = _field(one.module, node.target.id, annotation, node.value, keyword_only)
                fields.pop(node.target.id, None) if field is None else fields.update({node.target.id: field})
    positional = [field for field in fields.values() if field.kind is not inspect.Parameter.KEYWORD_ONLY]
    return positional + [field for field in fields.values() if field.kind is inspect.Parameter.KEYWORD_ONLY]


def _field(module: Module, name: str, annotation: str, value: ast.expr | None, keyword_only: bool) -> Parameter | None:
    default = value
    if isinstance(value, ast.Call) and _decorator(value) == "field":
        options = {word.arg: word.value for word in value.keywords if word.arg}
        if "init" in options and not _is_true(options["init"]):
            return None
        keyword_only = _is_true(options["kw_only"]) if "kw_only" in options else keyword_only
        factory = options.get("default_factory")
        empty = {"list": "[]", "dict": "{}", "tuple": "()"}.get(ast.unparse(factory)) if factory else None
        default = options.get("default", factory)
        if factory is not None:
            made = empty or f"{ast.unparse(factory)}()"
            default = ast.parse(made, mode="eval").body
    kinds = inspect.Parameter
    kind = kinds.KEYWORD_ONLY if keyword_only else kinds.POSITIONAL_OR_KEYWORD
    annotation = annotation.removeprefix("dataclasses.")
    if annotation.startswith("InitVar["):
        annotation = annotation[len("InitVar[") : -1]
    return _with_default(Parameter(name, annotation, kind=kind), module, default)


def _is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True
