"""The pictures in docs/report.md: two trainings of a real language model, and hostile completions.

    python -m bench.report_pictures [--folder FOLDER] [--into docs/images]

The two trainings (`json_fields_grpo.py`, paid as a whole and field by field) take half an hour; with `--folder` they
are kept and reused. The hostile run is the one of the browser tests.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.json_fields import train
from tests.history.report.browsing import browser, open_page, prefer_colours, set_device, wait_until, why_no_browser
from tests.history.report.make_big_run import write_hostile_run
from trl_grpo_ext.history.report import load_runs
from trl_grpo_ext.history.report.page import write_page

ROOT = Path(__file__).resolve().parents[1]
RUNS = ("fields", "spans")

CHOOSE = """
const select = document.getElementById(arguments[0]);
select.value = arguments[1];
select.dispatchEvent(new Event('change', {bubbles: true}));
"""


def main() -> None:
    """Train what is missing, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="for the trainings and pages; default: a temporary one")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "images", help="for the pictures")
    chosen = parser.parse_args()
    if (missing := why_no_browser()) is not None:
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as name:
        folder = chosen.folder or Path(name)
        for run in RUNS:
            train(folder / run, run, 1, ["--max_steps", "20"])
        page = folder / "report.html"
        write_page(load_runs([folder / run for run in RUNS]), page)
        hostile = folder / "hostile.html"
        write_page(load_runs([write_hostile_run(Path(name) / "hostile")]), hostile)
        with browser(Path(name) / "profile") as driver:
            take(driver, page, hostile, chosen.into)


def take(driver: Any, page: Path, hostile: Path, into: Path) -> None:
    """The curves and the completions of a screen in light and dark, a phone, and what is hostile."""
    set_device(driver, 1280, 900)
    prefer_colours(driver, "light")
    open_page(driver, page)
    driver.execute_script("document.querySelector('#figures h3').scrollIntoView({block: 'start'})")
    save(driver, into / "report_light.png")
    prefer_colours(driver, "dark")
    look_at_a_token(driver, ".legend")
    save(driver, into / "report_dark.png")
    set_device(driver, 390, 844, mobile=True)
    prefer_colours(driver, "light")
    open_page(driver, page)
    look_at_a_token(driver, ".legend")
    save(driver, into / "report_phone.png")
    set_device(driver, 1280, 900)
    open_page(driver, hostile)
    driver.execute_script("document.querySelector('.card').scrollIntoView({block: 'start'})")
    save(driver, into / "report_hostile.png")


def look_at_a_token(driver: Any, top: str) -> None:
    """Go to the run with spans, a step from the middle, a group with right and wrong, and a token of its first."""
    index = driver.execute_script("return JSON.parse(document.getElementById('index').textContent)")
    run = len(RUNS) - 1
    steps = index["runs"][run]["steps"]
    place = len(steps) // 2
    by_group: dict[int, set[float]] = {}
    for group, reward in zip(steps[place]["group"], steps[place]["reward"], strict=True):
        by_group.setdefault(group, set()).add(reward)
    mixed = next((order for order, rewards in enumerate(by_group.values()) if len(rewards) > 1), 0)
    for name, value in {"run": run, "step": place, "group": mixed}.items():
        driver.execute_script(CHOOSE, name, str(value))
    wait_until(driver, "return document.querySelectorAll('.card .token').length > 0")
    driver.execute_script("document.querySelector(arguments[0]).scrollIntoView({block: 'start'})", top)
    driver.execute_script("document.querySelectorAll('.card .token')[14].focus({preventScroll: true})")
    wait_until(driver, "return !document.getElementById('tip').hidden")


def save(driver: Any, path: Path) -> None:
    """Take the picture once the drawing is stable."""
    driver.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))")
    driver.save_screenshot(str(path))
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
