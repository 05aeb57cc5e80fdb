"""Every shipped launch and run file is what the doctor calls sound, on the hardware that its header names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.recipes.config_memory import LAUNCH_FILES, RUN_FILES, examined, gpu_named, peak, table
from tests.recipes.config_objects import DEEPSPEED_FILES, header, launches
from tests.recipes.launching import RECIPES

COMMANDS = [(path, number) for path in [*LAUNCH_FILES, *RUN_FILES] for number in range(len(launches(path)))]


def named(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def test_no_file_is_left_out() -> None:
    assert {path for path, _ in COMMANDS} == {*LAUNCH_FILES, *RUN_FILES}
    assert len(LAUNCH_FILES) == 11
    assert len(RUN_FILES) == 13
    text = "".join(path.read_text() for path in LAUNCH_FILES)
    assert all(path.name in text for path in DEEPSPEED_FILES)


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=named)
def test_the_doctor_finds_no_error_in_a_shipped_command_line(path: Path, command: int) -> None:
    status, said = examined(path, command, gpu_named(path) or 80)
    assert [problem for problem in said["problems"] if problem["severity"] == "error"] == []
    assert status == 0
    assert said["launch"]["processes"] >= 1
    assert said["run"] is not None


@pytest.mark.parametrize("path", [path for path in RUN_FILES if peak(path) is not None and gpu_named(path)], ids=named)
def test_a_header_says_what_the_doctor_estimates(path: Path) -> None:
    found = peak(path)
    assert found is not None
    text = " ".join(line.strip() for line in header(path))
    memory = re.search(r"Memory[^:]*: (\d+) GB[^(]*\((\w+)\), ([\d.]+) GB of disk", text)
    if path.name == "detox.yaml":  # its hooks and its reward load models, which the doctor does not count
        assert memory is None
        return
    assert memory is not None, text
    assert (memory[1], memory[2], memory[3]) == (f"{found[0]:.0f}", found[1], f"{found[2]:.1f}")
    assert found[0] < (gpu_named(path) or 0)


def test_the_table_in_the_docs_is_the_doctors() -> None:
    assert table() in (RECIPES.parent / "docs" / "recipes.md").read_text()
