"""A headless Chromium for the browser tests, or the reason why there is none."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


def why_no_browser() -> str | None:
    """What is missing for the browser tests; None where nothing is."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed: pip install 'trl-grpo-ext[test]'"
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found: `make browser` installs them" if missing else None


@contextmanager
def browser(profile: Path, width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A Chromium with a profile of its own; its log of the console and of the network is kept."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        driver.set_page_load_timeout(120)
        driver.set_script_timeout(60)
        yield driver
    finally:
        driver.quit()


def open_page(driver: Any, page: Path) -> None:
    """Open a report and wait until it can be used."""
    driver.get(page.as_uri())
    wait_until(driver, "return document.documentElement.dataset.ready === 'true'")


def wait_until(driver: Any, script: str, *arguments: Any, seconds: float = 30) -> Any:
    """Wait until a script returns something true, also while pages come and go, and return that."""
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.support.ui import WebDriverWait

    patient = WebDriverWait(driver, seconds, poll_frequency=0.05, ignored_exceptions=[WebDriverException])
    return patient.until(lambda d: d.execute_script(script, *arguments))


def set_device(driver: Any, width: int, height: int, *, mobile: bool = False) -> None:
    """Another window, or a phone."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer_colours(driver: Any, name: str) -> None:
    """What the system prefers: "light" or "dark"."""
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": name}]}
    )


# ---------------------------------------------------------------------------------------------- what tests ask it


def empty_logs(driver: Any) -> None:
    driver.get_log("browser")
    driver.get_log("performance")


def assert_silent(driver: Any) -> None:
    """Nothing on the console, no script of a completion has run, and nothing but the page itself was asked for."""
    assert driver.get_log("browser") == []
    assert driver.execute_script("return typeof window.pwned") == "undefined"
    sent = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
    assert {address for address in asked if not address.startswith(("file:///", "about:", "chrome:", "data:"))} == set()
    assert sum(address.startswith("file:///") for address in asked) <= 1


def rows_of(run: Path) -> list[dict[str, Any]]:
    """All records of a run, with the outcome of `right_answer`, as the files have them."""
    rows: list[dict[str, Any]] = []
    for file in sorted((run / "token_records").iterdir()):
        for row in pyarrow.parquet.read_table(file).to_pylist():
            rows.append({**row, "outcome": dict(row["outcomes"])["right_answer"], "rewards": dict(row["rewards"])})
    return rows


def key(row: dict[str, Any]) -> str:
    return f"{row['step']}/{row['group']}/{row['member']}"


def credit(row: dict[str, Any]) -> float:
    live = [place for place, value in enumerate(row["live"]) if value]
    if row["advantage"] is None:
        return math.fsum(row["advantages"][-1][place] for place in live) / len(live)
    return math.fsum(row["advantage"][place] * row["weight"][place] for place in live)


def choose(driver: Any, name: str, value: str) -> None:
    """Choose a value as a user does, and wait until the page has followed."""
    driver.execute_script(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('change', {bubbles: true}))",
        *(name, value),
    )


def found(driver: Any) -> list[str]:
    """The keys of all results, after showing the last page of them."""
    wait_until(driver, "return !document.getElementById('status').textContent.startsWith('Searching')")
    time.sleep(0.1)
    while driver.execute_script(
        "const m = document.getElementById('more-results'); if (!m.hidden) m.click(); return !m.hidden"
    ):
        pass
    keys: list[str] = driver.execute_script(
        "return [...document.querySelectorAll('#results [data-key]')].map((b) => b.dataset.key)"
    )
    said = driver.execute_script("return document.getElementById('status').textContent")
    if keys:
        assert said == f"{len(keys)} of 500 completions."
    return keys


HOVER = """
const card = document.querySelector(`.card[data-member="${arguments[0]}"]`);
const span = card.querySelectorAll('.token')[arguments[1]];
if (arguments[2] === 'focus') span.focus();
else span.dispatchEvent(new MouseEvent('mouseover', {bubbles: true}));
const tip = document.getElementById('tip');
return {
  hidden: tip.hidden, described: span.getAttribute('aria-describedby'), kind: span.className,
  lines: [...tip.querySelectorAll('tr')].map((tr) => [...tr.cells].map((cell) => cell.textContent))
    .map(([name, ...values]) => [name, values]),
};
"""


def shown(value: float) -> float:
    """Four digits of the five that the page has of a float32."""
    stored = f"{struct.unpack('f', struct.pack('f', value))[0]:.5g}"
    return float(f"{float(stored):.4g}")


def read(text: str) -> float:
    return float(text.replace("\u2212", "-"))


OVERFLOWING = """
return [...document.querySelectorAll('.card, .card *, #prompt, #results *')].filter((e) => {
  const inside = e.closest('.card, #prompt, #results');
  if (e.matches('.token') && inside.dataset.member === String(arguments[0])) return false;
  const card = inside.getBoundingClientRect();
  const box = e.getBoundingClientRect();
  return box.width > 0 && (box.right > card.right + 1 || box.left < card.left - 1);
}).map((e) => e.className + ': ' + e.textContent.slice(0, 40));
"""
