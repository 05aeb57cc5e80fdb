"""Facts about the machine are what the machine says, found another way."""

import os
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from trl_grpo_ext.launch.doctor import environment
from trl_grpo_ext.launch.doctor.environment import Environment, inspect_machine


def test_versions_and_devices_are_those_of_this_machine_or_as_described() -> None:
    here, there = inspect_machine(), inspect_machine(gpu_memory=24, gpus=8)
    assert here.version("trl") == Version(metadata.version("trl"))
    assert Environment(versions={"x": "built by hand"}).version("x") is None
    assert len(here.devices) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert there.elsewhere
    assert there.devices == (24 * 1024**3,) * 8


def test_a_place_where_nothing_can_be_saved_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert (
        inspect_machine(output_dir=str(tmp_path / "file")).output_problem == f"{tmp_path}/file is a file, not a folder"
    )
    assert "is a file" in str(inspect_machine(output_dir=str(tmp_path / "file" / "below")).output_problem)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.geteuid():  # root may write anywhere
        assert "may not be written to" in str(inspect_machine(output_dir=str(closed / "out")).output_problem)


def test_variables_are_shown_without_their_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert inspect_machine().variables == {}
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true\x1b[2J")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    assert inspect_machine().variables == {"ACCELERATE_USE_CPU": r"true\x1b[2J"}
