"""Hostile completions in a real browser: text, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.history.report.browsing import (
    HOVER,
    OVERFLOWING,
    assert_silent,
    choose,
    empty_logs,
    open_page,
    prefer_colours,
    set_device,
    why_no_browser,
)
from tests.history.report.make_big_run import HOSTILE, write_hostile_run
from trl_grpo_ext.history.report import load_run
from trl_grpo_ext.history.report.page import visible, write_page

NO_BROWSER = why_no_browser()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_BROWSER is not None, reason=NO_BROWSER or "")]


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    run = write_hostile_run(folder / "run <img src=x onerror=window.pwned=9>")
    return write_page([load_run(run)], folder / "report.html").path


@pytest.fixture
def attacked(chromium: Any, hostile_page: Path) -> Iterator[Any]:
    set_device(chromium, 1280, 900)
    prefer_colours(chromium, "light")
    empty_logs(chromium)
    open_page(chromium, hostile_page)
    yield chromium
    assert_silent(chromium)


def test_hostile_completions_are_text_and_nothing_runs(attacked: Any) -> None:
    texts = attacked.execute_script(
        "return [...document.querySelectorAll('.card')]"
        ".map((c) => [c.dataset.member, c.querySelector('.tokens').textContent])"
    )
    seen = {int(member): text for member, text in texts}
    assert sorted(seen) == list(range(len(HOSTILE)))
    for member, text in enumerate(HOSTILE):
        whole = visible(text + "\ufffd\u00b7").replace("\n", "\u21b5\n")  # half a character, and the token that ends it
        if len(text) < 1500:
            assert seen[member].replace("\u00b7", "") == whole.replace("\u00b7", ""), text
        else:
            assert whole.startswith(seen[member])
            assert len(seen[member]) <= 6000
    for name in ("filter", "right", "sort"):
        values = attacked.execute_script(
            "return [...document.getElementById(arguments[0]).options].map((o) => o.value)", name
        )
        for value in values:
            choose(attacked, name, value)
            time.sleep(0.02)
    for member in range(len(HOSTILE)):
        assert attacked.execute_script(HOVER, member, 0, "hover")["hidden"] is False
    assert (
        attacked.execute_script(
            "return document.querySelectorAll('.card script, .card img, .card svg, .card iframe').length"
        )
        == 0
    )


@pytest.mark.parametrize("width", [375, 1280])
def test_hostile_completions_stay_inside_their_cards(attacked: Any, width: int) -> None:
    set_device(attacked, width, 812, mobile=width < 500)
    choose(attacked, "filter", "longest")
    assert attacked.execute_script("return document.documentElement.scrollWidth") == width
    # 600 marks on one letter cannot be broken: they are cut off at the edge of their stretch.
    marks = next(number for number, text in enumerate(HOSTILE) if text.startswith("Z\u0300"))
    assert attacked.execute_script(OVERFLOWING, marks) == []
    kinds = attacked.execute_script(
        "return [...document.querySelectorAll('.stretch')].map((e) => getComputedStyle(e).overflow)"
    )
    assert set(kinds) == {"hidden"}


def test_a_hundred_thousand_characters_do_not_freeze_the_page(attacked: Any) -> None:
    member = next(number for number, text in enumerate(HOSTILE) if len(text) == 100_000)
    script = """
    const card = document.querySelector(`.card[data-member="${arguments[0]}"]`);
    const [spent, more] = [[], card.querySelector('button.more')];
    while (!more.hidden) {
      const begun = performance.now();
      more.click();
      card.getBoundingClientRect();
      spent.push(performance.now() - begun);
    }
    return [Math.max(...spent), spent.length, card.querySelector('.tokens').textContent.length];
    """
    slowest, clicks, length = attacked.execute_script(script, member)
    assert length >= 100_000
    assert clicks < 10
    assert slowest < 5000  # generous: a machine with other work; the last click adds about 40,000 tokens


def test_directions_of_writing_do_not_leave_their_completion(attacked: Any) -> None:
    kinds = attacked.execute_script(
        "return [...document.querySelectorAll('.stretch')].map((e) => [getComputedStyle(e).unicodeBidi, e.dir])"
    )
    assert {tuple(kind) for kind in kinds} == {("isolate", "auto")}
    member = next(number for number, text in enumerate(HOSTILE) if text.startswith("ש"))
    direction = (
        'return getComputedStyle(document.querySelector(`.card[data-member="${arguments[0]}"] .stretch`)).direction'
    )
    assert attacked.execute_script(direction, member) == "rtl"
