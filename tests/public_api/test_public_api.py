"""The public surface changes only with an entry in the changelog, is documented, and imports no torch for nothing."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tests.public_api.surface import MODULES, commands, latest, surface

from trl_grpo_ext import __version__

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
API_PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def sections(changelog: str) -> dict[str, str]:
    """The changelog's text by version; what is not released yet stands under `Unreleased`."""
    parts = re.split(r"^## (\S+).*$", changelog, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def newer_entries(changelog: str, version: str) -> str:
    """What stands above a version's heading."""
    text = ""
    for heading, entries in sections(changelog).items():
        if heading == version:
            return text
        text += entries
    raise AssertionError(f"CHANGELOG.md has no section '## {version}'")


def unmentioned(before: dict[str, str], now: dict[str, str], entries: str) -> list[str]:
    """The changes that no entry names: each by its last part in backticks, as `Rollout.texts` or `rewards`."""
    changes = []
    for name in sorted(before.keys() | now.keys()):
        whole = name.rpartition(".")[0]
        of_something_new = (whole in before) != (whole in now)  # its class has come or gone, and is named
        if before.get(name) == now.get(name) or of_something_new:
            continue
        short = name.split(" ")[-1].removeprefix("trl_grpo_ext.")
        names = {short, short.split(".")[-1], ".".join(short.split(".")[-2:])}
        if not any(f"`{known}`" in entries or f"`{known}(" in entries for known in names):
            what = "new" if name not in before else "gone" if name not in now else f"{before[name]} -> {now[name]}"
            changes.append(f"{name}: {what}")
    return changes


def test_every_change_of_the_public_surface_is_in_the_changelog() -> None:
    released = latest()
    if released is None:
        assert list(sections(CHANGELOG)) == [__version__], "nothing is released, so the changelog has one version"
        return
    version, before = released
    entries = newer_entries(CHANGELOG, version)
    missing = unmentioned(before, surface(), entries)
    assert not missing, (
        f"The public surface differs from that of {version}. Say so in CHANGELOG.md, under '## Unreleased', naming "
        "each of these in backticks:\n" + "\n".join(missing)
    )


def test_surface_change_needs_an_entry() -> None:
    before = {"trl_grpo_ext.types.Rollout": "class", "command list": "--json", "plugin reward x": "(a=1)"}
    now = {"trl_grpo_ext.types.Rollout": "class", "command list": "--json --wide", "plugin reward y": "(a=1)"}
    assert unmentioned(before, now, "") == [
        "command list: --json -> --json --wide",
        "plugin reward x: gone",
        "plugin reward y: new",
    ]
    assert unmentioned(before, now, "- `list` has --wide; `x` is called `y`") == []
    assert unmentioned(before, before, "") == []
    with_a_class = now | {"trl_grpo_ext.records.log.New": "class", "trl_grpo_ext.records.log.New.method": "()"}
    assert unmentioned(now, with_a_class, "") == ["trl_grpo_ext.records.log.New: new"]
    assert unmentioned(with_a_class, with_a_class | {"trl_grpo_ext.records.log.New.other": "()"}, "- `New`") == [
        "trl_grpo_ext.records.log.New.other: new"
    ]


def test_the_surface_sees_a_changed_default_and_a_new_parameter() -> None:
    found = surface()
    assert "num_generations" not in found["trl_grpo_ext.load_rewards"]
    assert found["trl_grpo_ext.load_rewards"] == "(selections)"
    assert found["plugin loss_aggregation length_power"] == "(*, alpha=1.0)"
    assert found["plugin loss_aggregation dr_grpo"] == "alias of constant_length"
    assert found["trl_grpo_ext.types.Rollout.texts"] == "Sequence[str]"
    assert found["setting token_records"].endswith("= 0")
    assert "--json" in found["command list"]


def test_changelog_knows_this_version() -> None:
    assert __version__ in sections(CHANGELOG)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there_and_on_the_page(name: str) -> None:
    module = import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    (row,) = [line for line in API_PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    assert sorted(re.findall(r"`(\w+)`", row.split(" | ")[2])) == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


def test_every_command_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert [name for name in commands() if f"trl-grpo-ext {name}" not in pages] == []


def test_the_public_names_that_need_no_torch_load_without_it() -> None:
    light = ["load_rewards", "Rollout", "Outcome", "TRLGRPOExtError", "completion_text", "available"]
    code = f"import sys, trl_grpo_ext\nfor n in {light}: getattr(trl_grpo_ext, n)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
