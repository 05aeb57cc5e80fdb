"""Chromium, for the page in a real browser."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.history.report.browsing import browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        driver.get("about:blank")
        yield driver
