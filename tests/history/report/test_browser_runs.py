"""Really trained runs in a real browser, and one that goes on while somebody watches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.history.report.browsing import (
    HOVER,
    assert_silent,
    choose,
    empty_logs,
    open_page,
    read,
    set_device,
    shown,
    wait_until,
    why_no_browser,
)
from trl_grpo_ext.history.report import load_run, load_runs
from trl_grpo_ext.history.report.page import visible, write_page

NO_BROWSER = why_no_browser()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_BROWSER is not None, reason=NO_BROWSER or "")]


def test_a_really_trained_run_is_shown(chromium: Any, own_runs: Path) -> None:
    write_page(load_runs([own_runs / "one", own_runs / "two"]), own_runs / "report.html")
    set_device(chromium, 1280, 900)
    empty_logs(chromium)
    open_page(chromium, own_runs / "report.html")
    row = pyarrow.parquet.read_table(sorted((own_runs / "one" / "token_records").iterdir())[-1]).to_pylist()[0]
    told = chromium.execute_script(HOVER, row["member"], 0, "focus")
    lines = dict(told["lines"])
    assert [name for name, _ in told["lines"]][: len(row["stages"])] == row["stages"]
    if row["advantage"] is not None:
        assert read(lines["advantage in the loss"][0]) == shown(row["advantage"][0])
        assert read(lines["log-probability"][0]) == shown(row["logp"][0])
    drawn = chromium.execute_script(
        "return [...document.querySelectorAll('figure svg')].map((s) => s.getBoundingClientRect().height)"
    )
    assert len(drawn) > 5
    assert min(drawn) > 50
    assert_silent(chromium)


def test_tables_of_trl_alone_are_shown(chromium: Any, own_runs: Path) -> None:
    import shutil

    shutil.rmtree(own_runs / "two" / "token_records")
    write_page([load_run(own_runs / "two")], own_runs / "tables.html")
    empty_logs(chromium)
    open_page(chromium, own_runs / "tables.html")
    table = pyarrow.parquet.read_table(sorted((own_runs / "two" / "completions").iterdir())[-1]).to_pylist()
    cards = chromium.execute_script("return [...document.querySelectorAll('.card .tokens')].map((t) => t.textContent)")
    assert cards == [visible(row["completion"]) for row in table[: len(cards)]]
    assert len(cards) == 4
    assert chromium.execute_script("return document.getElementById('legend').hidden") is True
    assert_silent(chromium)


# ---------------------------------------------------------------------------------------------- a training that goes on


RELOADED = """
if (!(performance.timeOrigin > arguments[0] && document.documentElement.dataset.ready)) return null;
const value = (id) => document.getElementById(id).value;
return { step: document.getElementById('step').selectedOptions[0].textContent, group: value('group'),
  filter: value('filter'), sort: value('sort'), text: value('search'), run: value('run') };
"""
"""Where a page stands that has loaded itself again since then."""

ORIGIN = "return performance.timeOrigin"


def test_a_watched_page_loads_itself_again_and_stays_where_it_was(chromium: Any, own_runs: Path) -> None:
    page = own_runs / "watched.html"
    write_page(load_runs([own_runs / "one", own_runs / "two"]), page, reload_seconds=3)
    set_device(chromium, 1280, 900)
    open_page(chromium, page)
    steps = chromium.execute_script("return [...document.getElementById('step').options].map((o) => o.textContent)")
    chosen = {"run": "1", "step": "0", "group": "1", "filter": "truncated", "sort": "reward-up"}
    for name, value in chosen.items():
        choose(chromium, name, value)
    place = wait_until(chromium, RELOADED, chromium.execute_script(ORIGIN))
    assert place == {**chosen, "step": steps[0], "text": ""}
    # Somebody who points at things is left alone.
    chromium.execute_script("window.busy = setInterval(() => dispatchEvent(new Event('pointermove')), 50)")
    begun = chromium.execute_script(ORIGIN)
    time.sleep(4)
    assert chromium.execute_script(ORIGIN) == begun


def test_who_looks_at_the_newest_step_sees_the_next(chromium: Any, own_runs: Path) -> None:
    page, newest = own_runs / "watched.html", sorted((own_runs / "one" / "token_records").iterdir())[-1]
    table = own_runs / "one" / "completions" / newest.name.replace("step_", "completions_")
    kept = {path: path.read_bytes() for path in (newest, table)}
    for path in kept:
        path.unlink()
    write_page([load_run(own_runs / "one")], page, reload_seconds=3)
    open_page(chromium, page)
    shown = "Number(document.getElementById('step').selectedOptions[0].textContent)"
    before = chromium.execute_script(f"return {shown}")
    for path, content in kept.items():
        path.write_bytes(content)
    write_page([load_run(own_runs / "one")], page, reload_seconds=3)
    assert wait_until(chromium, f"return document.documentElement.dataset.ready && {shown} > arguments[0]", before)
