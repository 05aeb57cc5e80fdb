"""What is read from a plugin's text, against what Python says of the imported object; and that no text breaks it."""

from __future__ import annotations

import datetime
import importlib
import inspect
import math
import os
import py_compile
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import griffe
import pytest
import yaml
from hypothesis import example as hypothesis_example
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.plugins.description import (
    BY_PARAMETERS,
    PLACEHOLDER,
    Definition,
    Docstring,
    Parameter,
    SourceError,
    describe,
    example,
    find_definition,
    first_sentence,
    module_spec,
    read_docstring,
    read_module,
    signature_text,
    split_target,
    to_yaml,
)
from trl_grpo_ext.plugins.discovery import PluginInfo, available
from trl_grpo_ext.plugins.kinds import FACTS
from trl_grpo_ext.plugins.loading import resolve
from trl_grpo_ext.plugins.selection import parse_selection

BUILT_IN = [info for info in available() if info.builtin]


def name_of(info: PluginInfo) -> str:
    return info.name


def exported(info: PluginInfo) -> Any:
    module, attribute = split_target(info.target)
    return getattr(importlib.import_module(module), attribute)


def _without_init(thing: Any) -> bool:
    return isinstance(thing, type) and thing.__init__ is object.__init__


# ------------------------------------------------------------------------------------------------- built-in plugins


@pytest.mark.parametrize("info", BUILT_IN, ids=name_of)
def test_what_the_text_says_of_a_built_in_is_what_python_says(info: PluginInfo) -> None:
    found = find_definition(*split_target(info.target))
    assert isinstance(found, Definition)
    read, sure = found.parameters()
    assert sure
    thing = exported(info)
    expected = [] if _without_init(thing) else list(inspect.signature(thing).parameters.values())
    assert [(one.name, one.kind) for one in read] == [(one.name, one.kind) for one in expected]
    for one, real in zip(read, expected, strict=True):
        assert one.required == (real.default is real.empty)
        if not one.required and (info.name, one.name) != ("length_softmax", "r"):  # 1 / 9, which is no literal
            assert one.value == real.default
        assert (one.type or inspect.Parameter.empty) == real.annotation  # these modules have annotations as strings
    docs = describe(info, BUILT_IN, importing=False)
    assert (docs.file, docs.line) == (Path(inspect.getfile(thing)), inspect.getsourcelines(thing)[1])
    attributes = ("takes_rewards", "reference_column", "needs", "teachers", "per_completion", "needs_step_totals")
    for name in (*attributes, "conformance"):
        if (value := docs.declares.get(name)) != BY_PARAMETERS:
            assert value == getattr(thing, name, None)
    for method in ("on_rollout", "on_forward", "weights", "reduce"):
        assert (method in docs.methods) == callable(getattr(thing, method, None))
    undocumented = {one.name for one in docs.parameters} - docs.doc.parameters.keys()
    assert not undocumented, f"Args of {info.name} does not say what these are"
    if info.kind != "reward":
        assert docs.doc.sections["Source"]
        assert docs.doc.sections.keys() <= {"Source", "Departures", "Raises"}
    for line in docs.doc.description.split("\n"):
        assert not line.startswith(("Args:", "Raises:", "Source:"))


def selected(info: PluginInfo, text: str) -> Any:
    read = yaml.safe_load(text)
    for key in FACTS[info.kind].setting:
        assert list(read) == [key]
        read = read[key]
    return read[0] if FACTS[info.kind].several else read


@pytest.mark.parametrize("info", BUILT_IN, ids=name_of)
def test_the_example_of_a_built_in_can_be_pasted(info: PluginInfo) -> None:
    text = describe(info, BUILT_IN, importing=False).example
    asked = parse_selection(info.kind, selected(info, text))
    assert asked.name == info.name
    thing = exported(info)
    assert set(asked.parameters.values()) <= {PLACEHOLDER}
    if not asked.parameters:
        resolve(info.kind, asked)
    if isinstance(thing, type):
        real = {} if _without_init(thing) else inspect.signature(thing).parameters
        assert set(asked.parameters) == {name for name, one in real.items() if one.default is one.empty}
        uncommented = selected(info, re.sub(r"(?m)^(\s*)# ", r"\1", text))
        defaults = {name: one.default for name, one in real.items() if one.default is not one.empty}
        given_ = uncommented if isinstance(uncommented, dict) else {}
        for name, default in defaults.items():
            written = given_[name]
            if (info.name, name) == ("length_softmax", "r"):  # 1 / 9, which stands in a comment
                assert "r:  # default: 1 / 9" in text
            else:
                assert written == (list(default) if isinstance(default, tuple) else default)
                assert type(written) is (list if isinstance(default, tuple) else type(default))


# ------------------------------------------------------------------------------------------------- signatures


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
    assert isinstance(found, Definition)
    read, sure = found.parameters()
    assert sure
    thing = importlib.import_module(module).X
    real = [] if _without_init(thing) else [*inspect.signature(thing).parameters.values()]
    # What inspect shows of a default factory is a placeholder.
    expected = [(one.name, [] if "factory" in repr(one.default) else one.default) for one in real]
    assert [(one.name, inspect.Parameter.empty if one.required else one.value) for one in read] == expected
    if form != "a partial":  # inspect makes keywords of what stands after a bound one
        assert [one.kind for one in read] == [one.kind for one in real]


@pytest.mark.parametrize(
    "text",
    [
        "@strange\nclass X:\n    def __init__(self, a): ...",
        "@strange\ndef X(a): ...",
        "class X(metaclass=type):\n    def __init__(self, a): ...",
        "from no_such_module import Base\nclass X(Base): ...",
        "X = make()",
        "class X(X): ...",
        "class A(X): ...\nclass X(A): ...",
        "class A: ...\nclass X(A, A): ...",
        "class X:\n    def __init__(self, a): ...\nX = strange(X)",
    ],
)
def test_where_the_text_is_not_enough_it_says_so(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"unsure_{abs(hash(text))}"
    (tmp_path / f"{module}.py").write_text(f"def strange(x):\n    return x\ndef make(): ...\n{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = find_definition(module, "X")
    assert not isinstance(found, Definition) or not found.parameters()[1]


def test_a_signature_is_written_as_python_writes_it() -> None:
    real = "(a, b: int, /, c=None, d: float = 0.3, *rest: int, e: str = 'x', f=-1, **more: Any)"
    node = griffe.visit("m", Path("m.py"), f"def f{real}: ...").members["f"]
    assert isinstance(node, griffe.Function)
    read = Definition(node).parameters()[0]
    assert signature_text(read) == real
    assert [str(one) for one in read] == real[1:-1].replace("/, ", "").split(", ")
    assert [one.value for one in read if not one.required] == [None, 0.3, "x", -1]
    assert signature_text(read[-3:]) == f"(*, {', '.join(map(str, read[-3:]))})"
    assert signature_text([]) == "()"


# ------------------------------------------------------------------------------------------------- definitions


FILES = {
    "so_pack/__init__.py": "from .direct import Direct\nfrom .renamed import Original as Renamed\nfrom .star import *\n"
    "from . import direct as module\nLate = module.Direct\n",
    "so_pack/direct.py": "class Other:\n    pass\n\n\nclass Direct:\n    class Inner:\n        pass\n",
    "so_pack/renamed.py": "from .deeper.down import Original\n",
    "so_pack/deeper/__init__.py": "",
    "so_pack/deeper/down.py": "from ..direct import Other\n\nclass Original(Other):\n    pass\n",
    "so_pack/star.py": "from .deeper.down import Original as Starred\n",
    "so_pack/cycle_a.py": "from .cycle_b import X\n",
    "so_pack/cycle_b.py": "from .cycle_a import X\n",
    "so_alone.py": "import functools\nimport so_pack.direct\nimport so_pack.direct as d\n\n"
    "class Base:\n    pass\n\nclass Mine(Base, so_pack.direct.Other):\n    pass\n\n"
    "made = Mine()\nalso = Mine\nviaalias = d.Direct\nif True:\n    class Conditional:\n        pass\n"
    "def function(completions): ...\npartial = functools.partial(function, k=1)\n"
    "try:\n    from so_nowhere import Fast\nexcept ImportError:\n    class Fast:\n        pass\n",
    "so_namespace/inner/leaf.py": "class Leaf:\n    pass\n",
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    read_module.cache_clear()
    module_spec.cache_clear()
    for name in [name for name in sys.modules if name.startswith("so_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize(
    "target",
    [
        *("so_pack:Direct", "so_pack:Renamed", "so_pack:Starred", "so_pack:Late", "so_pack.direct:Direct"),
        *("so_pack.direct:Direct.Inner", "so_pack:Direct.Inner", "so_pack.deeper.down:Original"),
        *("so_alone:Mine", "so_alone:also", "so_alone:viaalias", "so_alone:Conditional", "so_alone:function"),
        *("so_alone:Fast", "so_namespace.inner.leaf:Leaf"),
    ],
)
def test_the_text_leads_to_what_python_imports(path: Path, target: str) -> None:
    module, _, attribute = target.partition(":")
    found = find_definition(module, attribute)
    assert isinstance(found, Definition)
    assert not any(name.startswith("so_") for name in sys.modules), "reading imports nothing"
    real = importlib.import_module(module)
    for part in attribute.split("."):
        real = getattr(real, part)
    assert (found.node.module.path, found.node.name) == (real.__module__, real.__name__)
    assert found.node.filepath == Path(str(sys.modules[real.__module__].__file__))


def test_instances_partials_and_bases(path: Path) -> None:
    made, partial = find_definition("so_alone", "made"), find_definition("so_alone", "partial")
    assert isinstance(made, Definition)
    assert isinstance(partial, Definition)
    assert (made.node.name, made.built) == ("Mine", True)
    assert (partial.node.name, partial.built, partial.bound) == ("function", False, {"k": "1"})
    real = importlib.import_module("so_alone").Mine
    assert [one.name for one in made.classes] == [one.__name__ for one in real.__mro__[:-1]]


@pytest.mark.parametrize(
    ("target", "state"),
    [
        ("so_pack.nowhere:X", "no module"),
        ("so_nowhere:X", "no module"),
        ("so_pack.direct.deeper:X", "no module"),
        ("..:X", "no module"),
        ("/etc/passwd:X", "no module"),
        ("so_pack.direct:Nothing", "no attribute"),
        ("so_pack:Nothing", "unreadable"),  # a star import may bring it
        ("so_pack.cycle_a:X", "unreadable"),
        ("so_namespace:X", "unreadable"),
        ("math:sqrt", "unreadable"),
        ("_bisect:X", "unreadable"),
    ],
)
def test_why_there_is_nothing_to_read(path: Path, target: str, state: str) -> None:
    found = find_definition(*target.split(":"))
    assert isinstance(found, SourceError)
    assert found.state == state
    assert found.detail


def test_a_module_in_an_archive_and_one_that_is_compiled_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("so_zipped/__init__.py", "from .inner import X\n")
        archive.writestr("so_zipped/inner.py", "class X:\n    pass\n")
    (tmp_path / "so_source.py").write_text("class X:\n    pass\n")
    py_compile.compile(str(tmp_path / "so_source.py"), cfile=str(tmp_path / "so_compiled.pyc"))
    for place in (tmp_path / "all.zip", tmp_path):
        monkeypatch.syspath_prepend(place)
    read_module.cache_clear()
    module_spec.cache_clear()
    zipped, compiled = find_definition("so_zipped", "X"), find_definition("so_compiled", "X")
    assert isinstance(zipped, Definition)
    assert zipped.node.path == "so_zipped.inner.X"
    assert isinstance(compiled, SourceError)
    assert compiled.state == "unreadable"


LATTICE = "class A0: ...\nclass B0: ...\n" + "".join(
    f"class A{i + 1}(A{i}, B{i}): ...\nclass B{i + 1}(A{i}, B{i}): ...\n" for i in range(60)
)
HOSTILE = {
    "many statements": "a = 1\n" * 100_000 + "class X: ...",
    "many statements on a line": "a = 1;" * 100_000 + "\nclass X: ...",
    "many statements in a class": "class X:\n" + "    a = 1\n" * 5_900,
    "a lattice of bases": f"{LATTICE}class X(A60, B60): ...",
    "a lattice of dataclasses": f"from dataclasses import dataclass\n{LATTICE}@dataclass\nclass X(A60, B60): ...",
    "aliases in a circle": "X = Y\nY = Z\nZ = X\n",
    "an import of itself": "from hostile import X",
    "everything from itself": "from hostile import *",
    "constants in a circle": "A = B\nB = A\nclass X:\n    def __init__(self, a=A): ...",
    "a deep default": f"class X:\n    def __init__(self, a={'-' * 5000}1): ...",
    "a long sum": f"class X:\n    needs = {'1+' * 5000}1\n    def __init__(self, a={'1+' * 400}1): ...",
    "a deep attribute": f"X = a{'.b' * 5000}",
    "many calls": f"X = f{'()' * 400}",
    "deep branches": "if 1: pass\n" + "elif 1: pass\n" * 2000 + "class X: ...",
    "a megabyte of brackets": "(" * 1_000_000,
    "a null byte": "class X: ...\n\0",
    "a null byte in its docs": 'class X:\n    """X.\n\n    Args:\n        a (\\0): b\n    """',
    "another encoding": "# coding: no-such\nclass X: ...",
    "half a character": "class X: ...  # \udc80",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HOSTILE)
def test_no_source_hangs_or_breaks_the_description(what: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_bytes(HOSTILE[what].encode(errors="surrogateescape"))
    code = (
        "import logging; logging.basicConfig()\n"
        "from trl_grpo_ext.plugins.description import describe\n"
        "from trl_grpo_ext.plugins.discovery import PluginInfo\n"
        "docs = describe(PluginInfo('advantage_hook', 'x', 'd', '1', 'hostile:X'), [], importing=False)\n"
        "print(docs.state, len(str(docs.plain())))"
    )
    # A blow-up takes hours; the limit only makes it a failure that names the case.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[0] in ("ready", "unparsable", "no")  # no attribute


# ------------------------------------------------------------------------------------------------- docstrings


WHOLE = """Weigh tokens by `x`: `w_t = x / Σ_i |o_i|`, or so. More.

A second paragraph says: `not a formula`, `a=b`, and

    L = Σ_t w_t · l_t
      + λ·KL

in between. With α = 0 it is 1907.01234, which arXiv:2401.00001 says.

Args:
    alpha: The first. It goes
        on here.
    beta (dict[str, tuple(int)], optional): The second: with a colon.
    gamma, delta: Two at once.
    **more: The rest.

Source: A paper (2509.07558), which
goes on in the next line.

Departures from the authors' code: none
    but this.

Returns:
    Some text.

    Another paragraph.

Raises:
    ValueError: Why.

What follows the sections is description again, with w = 2.
"""


def test_a_docstring_in_its_parts() -> None:
    read = read_docstring(WHOLE)
    assert read.text == WHOLE
    assert read.summary == "Weigh tokens by `x`: `w_t = x / Σ_i |o_i|`, or so."
    assert read.parameters == {
        "alpha": "The first. It goes on here.",
        "beta": "The second: with a colon.",
        "gamma": "Two at once.",
        "delta": "Two at once.",
        "more": "The rest.",
    }
    assert read.sections == {
        "Source": "A paper (2509.07558), which\ngoes on in the next line.",
        "Departures": "from the authors' code: none\nbut this.",
        "Returns": "Some text.\n\nAnother paragraph.",
        "Raises": "ValueError: Why.",
    }
    assert read.formulas == ("w_t = x / Σ_i |o_i|", "L = Σ_t w_t · l_t\n  + λ·KL")
    assert read.papers == ("1907.01234", "2401.00001", "2509.07558")
    assert read_docstring("See 2413.00001, 12345.67890, 2401.123, 1.2401.01234 or 2400.12345.").papers == ()
    assert read.description.startswith("Weigh tokens by")
    assert read.description.endswith("is description again, with w = 2.")
    assert "Source" not in read.description
    assert "alpha" not in read.description


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("One. Two.", "One."),
        ("One, e.g. Two, i.e. this. Three.", "One, e.g. Two, i.e. this."),
        ("As Dr. GRPO does. More.", "As Dr. GRPO does."),
        ("Score 1.0 where it is. More.", "Score 1.0 where it is."),
        ("Is it? Yes.", "Is it?"),
        ("On two\n   lines. More.", "On two lines."),
        ("No full stop\n\nMore.", "No full stop"),
        ("Ends in code `a.b`. More.", "Ends in code `a.b`."),
        ("Ends. `code` begins.", "Ends."),
        ("", ""),
        ("   ", ""),
        ("...", "..."),
    ],
)
def test_first_sentences(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


@pytest.mark.parametrize(
    "text",
    ["Note that: this is prose.", "Args: on the same line", "Shape: of things", "A sentence, Source: x", "args:"],
)
def test_what_only_looks_like_a_section(text: str) -> None:
    read = read_docstring(f"Summary.\n\n{text}")
    assert not read.sections or text == "args:"
    assert text in read.description or text == "args:"


OTHERS = """Summary.

Shape:
    (B,) in, (B, T) out,
    padded.

Note:
    Of note.

Examples:
    Text.

    >>> 1 + 1  # doctest: +SKIP
    2

Attributes:
    needs (tuple): Some.
    more: Of it.

Methods:
    weights: Weighs.

Yields:
    int: One.

Departures:
    - one
    - two
"""


def test_other_sections_of_a_docstring() -> None:
    read = read_docstring(OTHERS)
    assert read.sections == {
        "Note": "Of note.",
        "Example": "Text.\n\n>>> 1 + 1\n2",
        "Attributes": "needs: Some.\nmore: Of it.",
        "Yields": "int: One.",
        "Departures": "- one\n- two",
    }
    shape = "Shape:\n    (B,) in, (B, T) out,\n    padded."
    assert read.description == f"Summary.\n\n{shape}\n\nFunctions:\n    weights: Weighs."


PIECES = (
    "Args:",
    "Source: x",
    "    a: b",
    "Departures from x: y",
    "`w = Σ`",
    "",
    " ",
    "Raises:",
    "x.",
    "$a = b$",
    "``",
    "(((",
    "\t",
)


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("\n".join)))
def test_no_text_breaks_the_reading_and_none_of_it_gets_lost(text: str) -> None:
    read = read_docstring(text)
    assert isinstance(read, Docstring)
    assert "\n" not in read.summary
    kept = " ".join([read.description, *read.parameters.values(), *read.sections.values()])
    for word in text.split():
        said = word.rstrip(":").lower() in ("args", "raises", "source", "departures")
        if not said and word.isalpha() and "Args:" not in text:
            assert word in kept


@pytest.mark.parametrize("piece", ["`", "(", ":math:`", "$", "a. ", "Source: ", "    a (", "2401.", "\n\n    = "])
def test_a_megabyte_of_hostile_docs_is_read_at_once(piece: str) -> None:
    started = time.process_time()
    read = read_docstring(piece * (1_000_000 // len(piece)))
    assert read.summary or read.description or read.sections
    assert time.process_time() - started < 60  # a blow-up takes hours


# ------------------------------------------------------------------------------------------------- a selection in YAML


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(plain)
@hypothesis_example({"\n": None, "\U00010000": None})
@hypothesis_example({"\n": "\\ud800\\udc00", "\x7f": "\\\U0001f469\x7f"})
@hypothesis_example({"\n": [float("inf"), 1e16, -1e-9, "1e16", "null"]})
def test_any_default_is_written_on_one_line_and_read_back(value: Any) -> None:
    text = to_yaml(value)
    assert text.replace("\t", "").isprintable()
    read = yaml.safe_load(f"key: {text}")["key"]
    assert repr(read) == repr(value) or (isinstance(value, float) and math.isnan(value))


@pytest.mark.parametrize(
    "value", [1e-5, 1e20, -1e-300, math.inf, "1e-5", "yes", "on", "null", "1_000", "0x1f", "a: b", "# a"]
)
def test_what_yaml_reads_as_something_else_is_quoted(value: Any) -> None:
    read = yaml.safe_load(f"key: {to_yaml(value)}")["key"]
    assert (type(read), read) == (type(value), value)


def test_what_yaml_cannot_say_is_a_comment() -> None:
    with pytest.raises(ValueError, match="cannot be written as YAML"):
        to_yaml(object())
    made = Parameter("when", "Any", "datetime.timedelta(1)", datetime.timedelta(1))
    assert example("reward", "x", [made]).endswith("    # when:  # default: datetime.timedelta(1)\n")


def test_hostile_names_and_types_stay_on_their_lines() -> None:
    parameters = [
        Parameter("a", "Literal['\n  - evil']"),
        Parameter("b", None, "'x\n- y'", "x\n- y"),
        Parameter("on", None, "1", 1),
    ]
    for name in ("x: y", "- z", "{a", "\u202eback", "a\nb", "no"):
        text = example("advantage_hook", name, parameters)
        assert len(text.splitlines()) == 5
        assert "\u202e" not in text
        read = yaml.safe_load(text)
        assert read == {"advantage_hooks": [{"name": name, "a": PLACEHOLDER}]}
