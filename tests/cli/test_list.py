"""`trl-grpo-ext list` as a command: what it lists, in which states, and that it imports nothing."""

import importlib
import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.distributions import MARKED, imported, write_distribution
from tests.cli.terminal import invoke
from trl_grpo_ext.plugins.kinds import FACTS, KINDS

ROOT = Path(__file__).parents[2]
Listed = dict[tuple[str, str], dict[str, Any]]
OF_INFO = {"kind", "name", "aliases", "distribution", "version", "builtin", "target"}
DOCUMENTED = '''
def reward(completions, **columns):
    """Score 1.0 e.g. always. And more
    of it.

    Args:
        completions: Some.
    """
    return [1.0 for _ in completions]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plugins in every state, each of which would leave a trace if it were imported."""
    folder = tmp_path_factory.mktemp("path")
    fine = {"reward": {"fine": "st_fine:reward"}, "trl_grpo_ext.rewards.aliases": {"good": "fine", "well": "fine"}}
    write_distribution(folder, "st-fine", fine, {"st_fine.py": MARKED + DOCUMENTED}, version="2.5")
    for twin in ("st_a", "st_b"):
        code = f'{MARKED}class Hook:\n    """Of {twin}."""\n'
        write_distribution(folder, twin.replace("_", "-"), {"hook": {"twin": f"{twin}:Hook"}}, {f"{twin}.py": code})
    twice = "[trl_grpo_ext.rewards]\ndouble = st_twice:one\ndouble = st_twice:other\n"
    write_distribution(folder, "st-twice", twice, {"st_twice.py": f"{MARKED}def one(): ...\ndef other(): ...\n"})
    gone = {"aggregation": {"gone": "st_gone.nowhere:X", "outside": "../../etc/passwd:X"}}
    write_distribution(folder, "st-gone", gone, {"st_gone/__init__.py": MARKED})
    makes = {"st_made.py": f"{MARKED}globals()['M' + 'ade'] = print\n"}
    write_distribution(folder, "st-lacking", {"reward": {"made": "st_made:Made"}}, makes)
    return folder


@pytest.fixture(scope="module")
def listed(folder: Path) -> Listed:
    """What `list --json` prints of them, by distribution and name."""
    entries = json.loads(invoke("list", "--json", env={"PYTHONPATH": str(folder)}).out)
    return {(entry["distribution"], entry["name"]): entry for entry in entries}


def test_list_has_every_builtin_ready(listed: Listed) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    declared = {(kind, name, target) for kind in KINDS for name, target in groups[FACTS[kind].group].items()}
    ours = [entry for entry in listed.values() if entry["builtin"]]
    assert {(entry["kind"], entry["name"], entry["target"]) for entry in ours} == declared
    assert {entry["state"] for entry in ours} == {"ready"}
    assert {entry["distribution"] for entry in ours} == {"trl-grpo-ext"}
    of_hooks = groups["trl_grpo_ext.advantage_hooks.aliases"]
    assert {alias: e["name"] for e in ours if e["kind"] == "advantage_hook" for alias in e["aliases"]} == of_hooks
    assert all(entry.keys() == OF_INFO | {"state", "detail", "summary"} for entry in listed.values())
    for entry in ours:  # the line of docs is the first sentence that Python would give
        module, _, attribute = entry["target"].partition(":")
        text = inspect.getdoc(getattr(importlib.import_module(module), attribute)) or ""
        paragraph = " ".join(text.split("\n\n")[0].split())
        assert entry["summary"].endswith(".")
        assert f"{paragraph} ".startswith(f"{entry['summary']} "), entry["name"]


@pytest.mark.parametrize(
    ("distribution", "name", "state", "detail"),
    [
        ("st-fine", "fine", "ready", ""),
        *((one, "twin", "ambiguous", "Say which one you mean: st-a:twin or st-b:twin.") for one in ("st-a", "st-b")),
        ("st-gone", "gone", "no module", "there is no module for its target 'st_gone.nowhere:X'"),
        ("st-gone", "outside", "no module", "there is no module for its target '../../etc/passwd:X'"),
        ("st-lacking", "made", "ready", ""),  # what runs at import may make it
        ("st-twice", "double", "ambiguous", "Say which one you mean: st_twice:one or st_twice:other"),
    ],
)
def test_states(listed: Listed, distribution: str, name: str, state: str, detail: str) -> None:
    entry = listed[distribution, name]
    assert entry["state"] == state, entry
    assert detail in entry["detail"]
    assert bool(detail) == bool(entry["detail"])


def test_list_as_text(folder: Path) -> None:
    done = invoke("list", env={"PYTHONPATH": str(folder)})
    assert "\nfine (good) (well)  st-fine 2.5, ready\n  Score 1.0 e.g. always.\n" in done.out
    assert done.out.count("st-twice 1.0, ambiguous\n") == 2
    assert "\x1b" not in done.out


def test_what_may_not_load_is_blocked_and_collides_with_nobody(folder: Path) -> None:
    env = {"PYTHONPATH": str(folder), "TRL_GRPO_EXT_PLUGINS": "st-a"}
    hooks = json.loads(invoke("list", "hooks", "--json", env=env).out)
    twins = {entry["distribution"]: entry["state"] for entry in hooks if entry["name"] == "twin"}
    assert twins == {"st-a": "ready", "st-b": "blocked"}


def test_listing_imports_no_plugin(folder: Path) -> None:
    # Last in the file: every listing above has left its traces by now, were there any.
    assert imported(folder) == []
