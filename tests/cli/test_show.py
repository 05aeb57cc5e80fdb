"""`trl-grpo-ext show` as a command: what it finds, when it imports, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.distributions import MARKED, write_distribution
from tests.cli.terminal import assert_readable, invoke

HOOK = '''
from trl_grpo_ext.types import HookDeclaration

class Hook:
    """Scale by `factor`: `A'_t = factor · A_t`.

    Args:
        factor (float, optional): What to multiply
            with.
        mode: How.

    Source: Somebody et al. (2401.01234).

    Departures from the paper: none.

    Raises:
        ValueError: Never.
    """

    def __init__(self, mode: str, *, factor: float = 2.0) -> None:
        self.declares = HookDeclaration(role="transform", needs=("old_logps",), teachers=(mode,))

    def on_rollout(self, advantages_B_T, rollout):
        return advantages_B_T
'''
DECORATED = '''
print("chatter of the plugin")
def hidden(cls):
    def make(strength: float = 1.5, **more):
        """Made by a decorator."""
        return cls()
    return make

@hidden
class Reward:
    """A reward whose text does not say what it takes."""
    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("path")
    hooks = {"hook": {"sh_scale": "sh_hooks:Hook"}, "trl_grpo_ext.advantage_hooks.aliases": {"sh_also": "sh_scale"}}
    write_distribution(folder, "sh-hooks", hooks, {"sh_hooks.py": MARKED + HOOK}, version="3.1")
    both = {"reward": {"sh_scale": "sh_both:reward"}}
    function = 'def reward(completions, answer, strict=True, **columns):\n    """A reward."""\n'
    write_distribution(folder, "sh-both", both, {"sh_both.py": MARKED + function})
    unsure = {"reward": {"sh_unsure": "sh_unsure:Reward", "sh_raises": "sh_raises:Reward"}}
    raises = f"{MARKED}{DECORATED}raise RuntimeError('not today')\n"
    modules = {"sh_unsure.py": MARKED + DECORATED, "sh_raises.py": raises}
    write_distribution(folder, "sh-unsure", unsure, modules)
    return folder


def shown(folder: Path, *words: str) -> list[dict[str, Any]]:
    return list(json.loads(invoke("show", *words, "--json", env={"PYTHONPATH": str(folder)}).out))


def test_all_that_is_known_of_a_hook(folder: Path) -> None:
    (docs,) = shown(folder, "sh_also")
    text = (folder / "sh_hooks.py").read_text().splitlines()
    example = "advantage_hooks:\n- name: sh_scale\n  mode: REPLACE_ME\n"
    summary = "Scale by `factor`: `A'_t = factor · A_t`."
    sections = {"Source": "Somebody et al. (2401.01234).", "Departures": "from the paper: none."}
    expected = {
        "name": "sh_scale",
        "aliases": ["sh_also"],
        "version": "3.1",
        "form": "class",
        "methods": ["on_rollout"],
        "description": summary,
        "papers": ["2401.01234"],
        "sections": sections | {"Raises": "ValueError: Never."},
        "line": text.index("class Hook:") + 1,
        "example": example,
    }
    assert docs | expected == docs
    mode, factor = docs["parameters"]
    assert mode == {"name": "mode", "type": "str", "required": True, "default": None, "doc": "How."}
    assert (factor["default"], factor["doc"]) == ("2.0", "What to multiply with.")
    words = invoke("show", "sh-hooks:sh_scale", env={"PYTHONPATH": str(folder)}).out
    assert f"file: {docs['file']}:{docs['line']}" in words
    assert "mode: str, required" in words
    assert "Somebody et al. (2401.01234)." in words
    assert words.endswith(example)


def test_a_name_of_two_kinds_shows_both_and_says_how_to_pick_one(folder: Path) -> None:
    done = invoke("show", "sh_scale", env={"PYTHONPATH": str(folder)})
    assert done.out.count("kind: ") == 2
    assert "2 plugins are called 'sh_scale'" in done.err
    (reward,) = shown(folder, "sh_scale", "--kind", "reward")
    assert (reward["form"], reward["columns"]) == ("function", ["answer"])
    assert [one["name"] for one in reward["parameters"]] == ["strict"]
    assert yaml.safe_load(reward["example"]) == {"rewards": ["sh_scale"]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("entrpy_shapng", "Did you mean 'entropy_shaping'"),
        ("trl-grpo-ext:thinkformat", "'trl-grpo-ext:thinkformat' is not a reward"),
        ("x\x1b[31my", "plugin 'x\\x1b[31my'"),
    ],
)
def test_what_there_is_not_is_an_error_with_a_hint(name: str, message: str) -> None:
    done = invoke("show", name)
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert "\x1b" not in done.err


def test_show_a_plugin_that_cannot_be_imported(folder: Path) -> None:
    done = invoke("show", "sh_raises", env={"PYTHONPATH": str(folder)})
    assert done.status == 1
    assert "state: broken: " in done.out
    assert "RuntimeError: not today" in done.out


def test_show_loses_no_word_in_a_narrow_terminal() -> None:
    narrow = invoke("show", "kl_in_reward", width=60)
    assert_readable(narrow.out, 60)
    # A path is longer than the line, so words are compared without the places where lines break.
    assert "".join(narrow.plain.split()) == "".join(invoke("show", "kl_in_reward").out.split())
