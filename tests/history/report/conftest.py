"""A real two-run directory, trained once."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.history.report.browsing import browser
from tests.history.report.trained import train_two


@pytest.fixture(scope="session")
def trained_once(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder with the runs `one` and `two`, not to be changed, and their log histories."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, train_two(tiny_model, folder)


@pytest.fixture
def own_runs(trained_once: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of that folder to damage; without weights."""
    left_out = shutil.ignore_patterns("*.safetensors", "*.pt", "*.bin", "tokenizer*")
    return Path(shutil.copytree(trained_once[0], tmp_path / "runs", ignore=left_out))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        driver.get("about:blank")
        yield driver
