"""Examinations in forks."""

from pathlib import Path

import pytest

from tests.launch.doctor import forked
from trl_grpo_ext.launch.doctor import command


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examination's two processes are forks that have their imports already."""
    monkeypatch.setattr(command, "_child", forked.child)
    monkeypatch.chdir(tmp_path)
