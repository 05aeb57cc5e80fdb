"""A headless Chromium for the browser tests, or the reason why there is none."""

import importlib.util
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


def why_no_browser() -> str | None:
    """What is missing for the browser tests; None where nothing is."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed: pip install '.[test]'"
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


def credit(row: dict[str, Any]) -> float:
    live = [place for place, value in enumerate(row["live"]) if value]
    if row["advantage"] is None:
        return math.fsum(row["advantages"][-1][place] for place in live) / len(live)
    return math.fsum(row["advantage"][place] * row["weight"][place] for place in live)
