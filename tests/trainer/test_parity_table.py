"""`docs/parity.md` is what the grid of today makes: read its numbers, and nothing but them can differ."""

from __future__ import annotations

import re

import pytest

from tests.support import OWN_AGGREGATION
from tests.trainer import parity_table
from tests.trainer.parity_grid import TOLERANCE
from tests.trainer.parity_table import Gap, Measured
from trl_grpo_ext.trainer import upstream

STALE = f"docs/parity.md is not of this grid; run: {parity_table.COMMAND}"


@pytest.fixture(scope="module")
def text() -> str:
    return parity_table.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def runs(text: str) -> list[Measured]:
    """The page's runs: versions from its last lines, gaps from the rows that begin with a loss type."""
    found = []
    for place, (release, others) in enumerate(re.findall(r"^TRL (\S+): (.*), CPU\.$", text, re.MULTILINE)):
        versions = {"trl": release, **dict(other.split(" ") for other in others.split(", "))}
        gaps = {}
        for loss_type, numbers in re.findall(r"^\| `(\w+)` \| `\w+` \| \d+ \| ([-+.e\d |]+) \|$", text, re.MULTILINE):
            gradient, loss = numbers.split(" | ")[2 * place : 2 * place + 2]
            gaps[loss_type] = Gap(float(gradient), float(loss))
        found.append(Measured(versions, gaps))
    return found


def test_the_page_is_of_this_grid(text: str, runs: list[Measured]) -> None:
    assert [run.gaps.keys() for run in runs] == [OWN_AGGREGATION.keys()] * 2, STALE
    assert parity_table.page(runs) == text, STALE


def test_the_page_is_of_the_supported_range(runs: list[Measured]) -> None:
    releases = [".".join(run.release.split(".")[:2]) for run in runs]
    assert releases == [upstream.OLDEST_TESTED, upstream.NEWEST_TESTED], STALE


def test_every_gap_on_the_page_is_within_the_tolerance(runs: list[Measured]) -> None:
    assert all(
        0 <= gap.gradient <= TOLERANCE and 0 <= gap.loss <= TOLERANCE for run in runs for gap in run.gaps.values()
    )
