"""What a listing reads from a plugin's text without importing it, and what is said of an imported plugin."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_grpo_ext.plugins.description import PLACEHOLDER, Parameter, _definitions_in, describe, example, overview
from trl_grpo_ext.plugins.discovery import PluginInfo, available
from trl_grpo_ext.plugins.kinds import FACTS
from trl_grpo_ext.plugins.loading import resolve
from trl_grpo_ext.plugins.selection import parse_selection

BUILT_IN = [info for info in available() if info.builtin]


def selected(info: PluginInfo, text: str) -> Any:
    read = yaml.safe_load(text)
    for key in FACTS[info.kind].setting:
        assert list(read) == [key]
        read = read[key]
    return read[0] if FACTS[info.kind].several else read


def test_builtins_are_documented_with_examples() -> None:
    for info in BUILT_IN:
        docs = describe(info, BUILT_IN)
        assert docs.state == "ready", info.name
        undocumented = {one.name for one in docs.parameters} - docs.doc.parameters.keys()
        assert not undocumented, f"Args of {info.name} does not say what these are"
        assert info.kind == "reward" or docs.doc.sections["Source"], info.name
        assert docs.doc.sections.keys() <= {"Source", "Departures", "Raises", "Returns"}
        assert not re.search(r"(?m)^(Args|Raises|Source):", docs.doc.description)
        asked = parse_selection(info.kind, selected(info, docs.example))
        assert asked.name == info.name
        assert set(asked.parameters) == {one.name for one in docs.parameters if one.required}
        if not asked.parameters:
            resolve(info.kind, asked)


FILES = {
    "so_alone.py": "from so_other import Elsewhere\n"
    'class Mine(Elsewhere):\n    "Mine."\nmade = Mine()\n'
    'def function(completions):\n    "A function."\n',
    "so_namespace/inner/leaf.py": 'class Leaf:\n    "A leaf."\n',
    "so_deep.py": "X = " + "(" * 100_000,
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    _definitions_in.cache_clear()
    for name in [name for name in sys.modules if name.startswith("so_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "state", "summary"),
    [
        ("so_alone:Mine", "ready", "Mine."),
        ("so_alone:function", "ready", "A function."),
        *((f"so_alone:{name}", "ready", "") for name in ("made", "Elsewhere", "Nothing")),
        ("so_namespace.inner.leaf:Leaf", "ready", "A leaf."),
        *((f"{name}:X", "ready", "") for name in ("so_deep", "math")),
        *((target, "no module", "") for target in ("so_nowhere.x:X", "so_alone.x:X", "..:X", "/etc/passwd:X")),
    ],
)
def test_overview_imports_nothing(path: Path, target: str, state: str, summary: str) -> None:
    info = PluginInfo("advantage_hook", "x", "d", "1", target)
    (entry,) = overview([info], [info])
    assert (entry.state, bool(entry.detail), entry.summary) == (state, state != "ready", summary)
    assert not any(name.startswith("so_") for name in sys.modules), "reading imports nothing"


HOOK = """
from trl_grpo_ext.types import HookDeclaration

class Hook:
    'Scale.'

    declares = HookDeclaration(role='transform', needs=('old_logps',))

    def __init__(self, a: int, b='x', *, c: 'float | None' = None, **more: int): ...

    def on_rollout(self, advantages, rollout): ...

class Meta(type):
    def __getattribute__(self, name):
        if not name.startswith('__'):
            raise RuntimeError('not for you')
        return super().__getattribute__(name)

class Odd(metaclass=Meta):
    pass
"""


def test_what_an_import_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "si_hook.py").write_text(HOOK)
    monkeypatch.syspath_prepend(tmp_path)
    docs = describe(PluginInfo("advantage_hook", "x", None, None, "si_hook:Hook"), [])
    assert [str(one) for one in docs.parameters] == ["a: int", "b='x'", "c: float | None = None"]
    assert (docs.declares["role"], docs.methods, docs.line) == ("transform", ("on_rollout",), 4)
    broken = describe(PluginInfo("advantage_hook", "x", None, None, "si_hook:Odd"), [])
    assert (broken.state, "RuntimeError: not for you" in broken.detail) == ("broken", True)


@pytest.mark.parametrize("name", ["x: y", "\u202eback", "a\nb", "1e-5"])
def test_a_selection_in_yaml_holds_hostile_names_as_text(name: str) -> None:
    text = example("advantage_hook", name, [Parameter(name, "Any", None)])
    assert text.isascii()
    assert yaml.safe_load(text) == {"advantage_hooks": [{"name": name, name: PLACEHOLDER}]}
