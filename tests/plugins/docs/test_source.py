"""Definitions found in text against those that Python finds by importing."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path

import pytest

from trl_grpo_ext.plugins.docs.source import (
    Found,
    SourceError,
    ancestry,
    find_definition,
    module_spec,
    read_module,
)

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
    assert isinstance(found, Found)
    assert not any(name.startswith("so_") for name in sys.modules), "reading imports nothing"
    real = importlib.import_module(module)
    for part in attribute.split("."):
        real = getattr(real, part)
    assert (found.module.name, found.node.name) == (real.__module__, real.__name__)
    assert found.module.path == Path(str(sys.modules[real.__module__].__file__))


def test_instances_and_partials(path: Path) -> None:
    made, partial = find_definition("so_alone", "made"), find_definition("so_alone", "partial")
    assert isinstance(made, Found)
    assert (made.node.name, made.built) == ("Mine", True)
    assert isinstance(partial, Found)
    assert (partial.node.name, partial.built, list(partial.bound)) == ("function", False, ["k"])


def test_the_bases_of_a_class_nearest_first(path: Path) -> None:
    mine = find_definition("so_alone", "Mine")
    assert isinstance(mine, Found)
    classes, complete = ancestry(mine)
    assert complete
    real = importlib.import_module("so_alone").Mine
    assert [one.node.name for one in classes] == [one.__name__ for one in real.__mro__[:-1]]


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


def test_a_module_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("so_zipped/__init__.py", "from .inner import X\n")
        archive.writestr("so_zipped/inner.py", "class X:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path / "all.zip")
    read_module.cache_clear()
    found = find_definition("so_zipped", "X")
    assert isinstance(found, Found)
    assert found.module.name == "so_zipped.inner"


def test_a_module_that_is_compiled_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import py_compile

    (tmp_path / "so_source.py").write_text("class X:\n    pass\n")
    py_compile.compile(str(tmp_path / "so_source.py"), cfile=str(tmp_path / "so_compiled.pyc"))
    monkeypatch.syspath_prepend(tmp_path)
    read_module.cache_clear()
    found = find_definition("so_compiled", "X")
    assert isinstance(found, SourceError)
    assert found.state == "unreadable"


def test_where_a_module_is_found_is_where_python_finds_it() -> None:
    for name in ("json.decoder", "importlib.metadata", "xml.etree.ElementTree", "trl_grpo_ext.plugins.docs.source"):
        spec = module_spec(name)
        assert spec is not None
        assert spec.origin == importlib.import_module(name).__file__
