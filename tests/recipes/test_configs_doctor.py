"""Every shipped launch and run file is what the doctor calls sound, on the hardware that its header names."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.config_memory import LAUNCH_FILES, RUN_FILES, named_gpu, run_doctor
from tests.recipes.config_objects import launches

COMMANDS = [(path, number) for path in [*LAUNCH_FILES, *RUN_FILES] for number in range(len(launches(path)))]


def named(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=named)
def test_the_doctor_finds_no_error_in_a_shipped_command_line(path: Path, command: int) -> None:
    status, said = run_doctor(path, command, named_gpu(path) or 80)
    assert [problem for problem in said["problems"] if problem["severity"] == "error"] == []
    assert status == 0
    assert said["launch"]["processes"] >= 1
    assert said["run"] is not None
