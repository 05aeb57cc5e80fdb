"""`docs/compatibility.md` says what the files say that decide, and what is installed where the tests run."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
from packaging.specifiers import SpecifierSet

from docs.site import compatibility
from docs.site.compatibility import PACKAGES, PAGE, pinned, ranges, renewed
from tests.recipes import test_launch_configs
from trl_grpo_ext.trainer import upstream

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_the_files_say() -> None:
    python = compatibility.tested_pythons(TEXT)[0]
    assert renewed(TEXT, python) == TEXT, "run: python -m docs.site.compatibility"


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_called_tested_is_installed_here_and_allowed(name: str) -> None:
    if name == "trl" and version("trl") != pinned()["trl"]:
        pytest.skip("another TRL beside the installed one")
    assert version(name).split("+")[0] == pinned()[name]
    assert SpecifierSet(ranges()[name]).contains(pinned()[name])


def test_trl_s_range_is_the_one_that_the_package_enforces() -> None:
    assert f"| {upstream.OLDEST_TESTED}.0, {pinned()['trl']} |" in TEXT
    assert pinned()["trl"].startswith(f"{upstream.NEWEST_TESTED}.")
    assert ranges()["trl"] == f">={upstream.OLDEST_TESTED}, <2"


def test_the_launch_files_are_those_that_the_tests_resolve() -> None:
    assert compatibility.launch_files() == test_launch_configs.ENGINES
    assert all(f"| `{name}` |" in TEXT for name in test_launch_configs.BY_NAME)
