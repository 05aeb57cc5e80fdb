"""Size and speed of the report: two runs of 500 completions of 500 tokens each, in a headless Chromium.

    python -m tests.bench.report_page [--rounds 5]

Prints how long the page takes to write, its size, and how long Chromium takes until it can be used: from the start of
the navigation to the performance mark that the page sets when the first group of completions stands there.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.report.browsing import browser, open_page, why_no_browser
from tests.report.make_big_run import write_big_run
from trl_grpo_ext.report import load_runs
from trl_grpo_ext.report.page import write_page

MARK = "return performance.getEntriesByName('report-interactive')[0].startTime / 1000"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often the page is opened")
    rounds = parser.parse_args().rounds
    if (missing := why_no_browser()) is not None:
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = load_runs([write_big_run(folder / run, seed=seed) for seed, run in enumerate(("first", "second"))])
        begun = time.perf_counter()
        written = write_page(runs, folder / "report.html")
        wrote = time.perf_counter() - begun
        seconds = []
        with browser(folder / "profile") as driver:
            version = driver.capabilities["browserVersion"]
            for _ in range(rounds):
                driver.get("about:blank")
                open_page(driver, written.path)
                seconds.append(float(driver.execute_script(MARK)))
    sys.stdout.write(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, Chromium {version}\n"
        f"written in {wrote:.1f} s, {written.bytes / 1e6:.1f} MB\n"
        f"usable after {statistics.median(seconds):.2f} s (median of {rounds}, "
        f"{min(seconds):.2f} to {max(seconds):.2f})\n"
    )


if __name__ == "__main__":
    main()
