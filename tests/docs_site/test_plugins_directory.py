"""`docs/plugins-directory.md` is about what is known and has its versions, and its levels are those of real runs.

Those of the built-in plugins in `tests/test_every_plugin.py`, those of the examples in `tests/examples`, which run the
kit anyway.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import version

import yaml

from docs.site.plugins_directory import BEGIN, END, PAGE, ROOT, known, read, renewed, tables
from trl_grpo_ext import available
from trl_grpo_ext.plugins.kinds import GROUPS, LABELS
from trl_grpo_ext.testing.reports import LEVELS

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_are_the_command_s_and_nobody_has_written_in_them() -> None:
    assert renewed(TEXT, read(TEXT)) == TEXT, "run: python -m docs.site.plugins_directory"


def test_every_distribution_of_this_repository_is_known_with_its_version_and_all_of_its_plugins() -> None:
    found = {tried.known["name"]: tried for tried in read(TEXT)}
    folders = [ROOT, *(file.parent for file in sorted((ROOT / "docs" / "examples").glob("*/pyproject.toml")))]
    projects = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in folders]
    assert [*found] == [entry["name"] for entry in known()]
    assert {project["name"] for project in projects} <= found.keys()
    for project in projects:
        tried = found[project["name"]]
        assert tried.tested[:3] == (project["version"], version("trl-grpo-ext"), version("trl"))
        points = project["entry-points"]
        offered = [(f"`{name}`", LABELS[kind]) for kind, group in GROUPS.items() for name in points.get(group, {})]
        assert sorted(row[:2] for row in tried.plugins) == sorted(offered)
        assert all(level in LEVELS for _, _, level, _ in tried.plugins)
    assert len(found["trl-grpo-ext"].plugins) == sum(info.builtin for info in available())


def test_a_distribution_has_the_level_of_its_lowest_plugin_and_rows_survive_being_read() -> None:
    found = read(TEXT)
    one = found[0]
    one.plugins[0] = ("`a|b`", "reward", "none", "keep x | y")
    one.plugins.append(("`c`", "reward", "gold", ""))
    page = f"{BEGIN}\n\n{tables(found)}\n\n{END}\n"
    assert f"| {one.known['name']}](" not in page
    assert f"[{one.known['name']}]({one.known['page']}) | none |" in page
    assert read(page) == found


def test_the_workflow_runs_the_command_and_may_write_nothing() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "plugins.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = workflow["jobs"]["kit"]["steps"]
    assert steps[-1]["run"].endswith("python -m docs.site.plugins_directory --check")
    assert "secrets." not in str(workflow)
