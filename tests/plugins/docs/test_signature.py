"""Parameters read from text against what Python says of the imported object."""

from __future__ import annotations

import ast
import importlib
import inspect
import keyword
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.plugins.discovery import PluginInfo, available
from trl_grpo_ext.plugins.docs.describe import BY_PARAMETERS, describe
from trl_grpo_ext.plugins.docs.signature import Parameter, function_parameters, parameters_of, signature_text
from trl_grpo_ext.plugins.docs.source import Found, Module, find_definition, split_target

BUILT_IN = [info for info in available() if info.builtin]


def name_of(info: PluginInfo) -> str:
    return info.name


def exported(info: PluginInfo) -> object:
    module, attribute = split_target(info.target)
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("info", BUILT_IN, ids=name_of)
def test_what_the_text_says_of_a_built_in_is_what_python_says(info: PluginInfo) -> None:
    found = find_definition(*split_target(info.target))
    assert isinstance(found, Found)
    read, sure = parameters_of(found)
    assert sure
    thing = exported(info)
    expected = list(inspect.signature(thing).parameters.values())  # type: ignore[arg-type]
    if isinstance(thing, type) and thing.__init__ is object.__init__:
        expected = []
    assert [(one.name, one.kind) for one in read] == [(one.name, one.kind) for one in expected]
    for one, real in zip(read, expected, strict=True):
        assert one.required == (real.default is real.empty)
        if not one.required and (info.name, one.name) != ("length_softmax", "r"):  # 1 / 9, which is no literal
            assert one.known, f"the default of {one.name} is not read"
            assert one.value == real.default
        assert (one.type or inspect.Parameter.empty) == real.annotation  # these modules have annotations as strings
    assert found.node.lineno == _first_line(thing)


def _first_line(thing: object) -> int:
    lines, first = inspect.getsourcelines(thing)  # type: ignore[arg-type]
    decorators = next(place for place, line in enumerate(lines) if line.startswith(("class ", "def ", "async def ")))
    return first + decorators


@pytest.mark.parametrize("info", BUILT_IN, ids=name_of)
def test_what_a_built_in_says_of_itself_is_what_the_object_has(info: PluginInfo) -> None:
    docs = describe(info, BUILT_IN, importing=False)
    thing = exported(info)
    for name in ("takes_rewards", "reference_column", "needs", "teachers", "per_completion", "needs_step_totals"):
        value = docs.declares.get(name)
        if value == BY_PARAMETERS:
            continue
        assert value == getattr(thing, name, None)
    for method in ("on_rollout", "on_forward", "weights", "reduce"):
        assert (method in docs.methods) == callable(getattr(thing, method, None))
    undocumented = {one.name for one in docs.parameters} - docs.doc.parameters.keys()
    assert not undocumented, f"Args of {info.name} does not say what these are"


FORMS = {
    "a class without __init__": "class X:\n    pass",
    "a class": "class X:\n    def __init__(self, a: int, b='x', *, c: 'float | None' = None, **more: int): ...",
    "an inherited __init__": "class Base:\n    def __init__(self, a, /, b=2): ...\nclass X(Base):\n    pass",
    "two levels": "class A:\n    def __init__(self, a=1): ...\nclass B(A): ...\nclass X(B): ...",
    "an abstract base": (
        "from abc import ABC\nfrom typing import Generic, TypeVar\nT = TypeVar('T')\n"
        "class X(ABC, Generic[T]):\n    def __init__(self, a=1): ..."
    ),
    "a function": "def X(completions, answer, scale: float = 0.5, *args, **columns): ...",
    "an async function": "async def X(completions, *, scale=-1, **columns): ...",
    "a dataclass": (
        "import dataclasses\nfrom typing import ClassVar\n@dataclasses.dataclass(frozen=True)\nclass X:\n"
        "    needed: int\n    kind: ClassVar[str] = 'k'\n    a: float = 1.0\n"
        "    b: list[int] = dataclasses.field(default_factory=list)\n"
        "    hidden: int = dataclasses.field(init=False, default=3)\n    c: str = dataclasses.field(default='x')"
    ),
    "a dataclass of keywords": (
        "from dataclasses import dataclass\n@dataclass(kw_only=True)\nclass X:\n    a: int\n    b: int = 2"
    ),
    "a dataclass with KW_ONLY": (
        "from dataclasses import KW_ONLY, InitVar, dataclass\n@dataclass\nclass X:\n    a: int\n    _: KW_ONLY\n"
        "    b: int = 2\n    c: InitVar[int] = 3"
    ),
    "a dataclass of a dataclass": (
        "from dataclasses import dataclass, field\n@dataclass\nclass Base:\n    a: int\n    b: int = 1\n"
        "@dataclass\nclass X(Base):\n    c: int = 3\n    b: int = 2\n    d: int = field(default=4, kw_only=True)"
    ),
    "a dataclass with its own __init__": (
        "from dataclasses import dataclass\n@dataclass(init=False)\nclass X:\n    a: int\n"
        "    def __init__(self, z=1): ..."
    ),
    "a plain child of a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass Base:\n    a: int = 1\nclass X(Base):\n    b: int = 2"
    ),
    "a partial": "import functools\ndef f(completions, a, b=1, **columns): ...\nX = functools.partial(f, b=2)",
    "a constant as the default": "LIMIT = 2_000\nclass X:\n    def __init__(self, limit: int = LIMIT): ...",
    "defined twice": "class X:\n    def __init__(self, a): ...\nclass X:\n    def __init__(self, b): ...",
    "a fallback": "try:\n    import no_such_module\nexcept ImportError:\n    def X(completions, a=1): ...",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_plugin(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"form_{list(FORMS).index(form)}"
    (tmp_path / f"{module}.py").write_text(FORMS[form])
    monkeypatch.syspath_prepend(tmp_path)
    found = find_definition(module, "X")
    assert isinstance(found, Found)
    read, sure = parameters_of(found)
    assert sure
    thing = importlib.import_module(module).X
    real = inspect.signature(thing).parameters
    if isinstance(thing, type) and thing.__init__ is object.__init__:
        real = {}  # type: ignore[assignment]
    expected = [(one.name, one.default) for one in real.values() if one.name != "args"]
    factories = {"list": []}
    seen = [
        (one.name, inspect.Parameter.empty if one.required else factories.get(str(one.default), one.value))
        for one in read
        if one.name != "args"
    ]
    if form == "a dataclass":  # what inspect shows of a factory is a placeholder
        expected = [(name, [] if name == "b" else default) for name, default in expected]
    assert seen == expected
    if form != "a partial":  # inspect makes keywords of what stands behind a bound one
        assert [one.kind for one in read] == [one.kind for one in real.values()]


@pytest.mark.parametrize(
    "text",
    [
        "@strange\nclass X:\n    def __init__(self, a): ...",
        "@strange\ndef X(a): ...",
        "class X(metaclass=type):\n    def __init__(self, a): ...",
        "from no_such_module import Base\nclass X(Base): ...",
        "X = make()",
    ],
)
def test_where_the_text_is_not_enough_it_says_so(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"unsure_{abs(hash(text))}"
    (tmp_path / f"{module}.py").write_text(f"def strange(x):\n    return x\ndef make(): ...\n{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = find_definition(module, "X")
    assert not isinstance(found, Found) or not parameters_of(found)[1]


names = st.lists(
    st.from_regex(r"[a-z]{1,4}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name)),
    unique=True,
    max_size=6,
)
defaults = st.one_of(
    st.none(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5), st.booleans()
)


@given(names, st.data())
def test_any_signature_is_written_as_python_writes_it(names: list[str], data: st.DataObject) -> None:
    kinds = inspect.Parameter
    order = (
        kinds.POSITIONAL_ONLY,
        kinds.POSITIONAL_OR_KEYWORD,
        kinds.VAR_POSITIONAL,
        kinds.KEYWORD_ONLY,
        kinds.VAR_KEYWORD,
    )
    drawn = sorted(data.draw(st.sampled_from(order)) for _ in names)
    parameters, given_one = [], False
    for name, kind in zip(names, drawn, strict=True):
        single = kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if single and any(one.kind is kind for one in parameters):
            continue
        with_default = not single and (data.draw(st.booleans()) or (given_one and kind < kinds.VAR_POSITIONAL))
        given_one = given_one or (with_default and kind < kinds.VAR_POSITIONAL)
        default = data.draw(defaults) if with_default else kinds.empty
        annotation = data.draw(st.sampled_from([kinds.empty, int, float]))
        parameters.append(kinds(name, kind, default=default, annotation=annotation))
    real = str(inspect.Signature(parameters))
    tree = ast.parse(f"def f{real}: ...")
    (node,) = tree.body
    assert isinstance(node, ast.FunctionDef)
    read = function_parameters(Module("m", None, "", tree), node)
    assert signature_text(read) == real
    assert [one.value for one in read if one.known] == [
        one.default for one in parameters if one.default is not kinds.empty
    ]


def test_a_parameter_as_text() -> None:
    assert str(Parameter("a", "int", False, "1")) == "a: int = 1"
    assert str(Parameter("a", None, False, "1")) == "a=1"
    assert str(Parameter("a", kind=inspect.Parameter.VAR_KEYWORD)) == "**a"
    assert signature_text([]) == "()"
