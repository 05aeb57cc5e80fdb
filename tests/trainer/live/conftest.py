"""A training in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def command(tiny_model: Path) -> list[str]:
    return [sys.executable, "-m", "tests.trainer.live.worker", str(tiny_model)]
