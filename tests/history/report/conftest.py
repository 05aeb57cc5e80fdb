"""Two small runs made up, and Chromium for the page in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.history.report.browsing import browser
from tests.history.report.make_big_run import write_big_run


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        driver.get("about:blank")
        yield driver


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 2 steps, 3 groups of 4 completions; the second step of both was not trained on."""
    folder = tmp_path_factory.mktemp("small")
    for seed, name in enumerate(("first", "second")):
        write_big_run(folder / name, steps=2, groups=3, size=4, tokens=40, seed=seed)
    return folder
