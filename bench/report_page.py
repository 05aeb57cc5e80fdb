"""Size and speed of the report of two real runs with 500 completions of about 500 tokens each, in a headless Chromium.

    python -m bench.report_page [--rounds 5] [--folder FOLDER]

Trains a tiny model twice for five steps of 100 completions (about two minutes), then prints how long the page takes to
write, its size, how long Chromium takes until the page is usable, and its console messages. The time runs from the
start of the navigation to the performance mark that the page sets when the first group of completions stands there.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.tables import machine
from tests.history.report.browsing import browser, open_page, why_no_browser
from tests.support import save_tiny_model, train
from trl_grpo_ext.history.report import load_runs
from trl_grpo_ext.history.report.page import write_page

MARK = "return performance.getEntriesByName('report-interactive')[0].startTime / 1000"


def many_vowels(completions: list[str], **columns: Any) -> list[float]:
    """The share of vowels; no two completions of 500 characters are alike in it for long."""
    return [sum(text.count(vowel) for vowel in "aeiou") / max(len(text), 1) for text in completions]


def train_thousand(model: Path, folder: Path) -> list[Path]:
    """Two real trainings of five steps with 100 completions of about 500 tokens each, all of them recorded."""
    chosen: dict[str, list[Any]] = {"plain": [], "hooks": ["leave_one_out", {"name": "entropy_shaping", "alpha": 0.4}]}
    for name, hooks in chosen.items():
        train(
            model,
            folder / name,
            scripted=False,
            reward_funcs=many_vowels,
            rewards=[{"name": "regex_match", "pattern": "a b|c d", "guard": {}}],
            reward_weights=[1.0, 0.1],
            advantage_hooks=hooks,
            prompt_count=10,
            max_steps=5,
            per_device_train_batch_size=100,
            num_generations=10,
            max_completion_length=500,
            generation_kwargs={"min_new_tokens": 470},
            token_records=100,
            log_completions=True,
            num_completions_to_print=0,
            save_strategy="steps",
            save_steps=5,
        )
    return [folder / name for name in chosen]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often the page is opened")
    parser.add_argument("--folder", type=Path, help="keep the runs and the page there; default: a temporary one")
    chosen = parser.parse_args()
    rounds = chosen.rounds
    if (missing := why_no_browser()) is not None:
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as name:
        folder = chosen.folder or Path(name)
        with contextlib.redirect_stdout(sys.stderr):
            runs = load_runs(train_thousand(save_tiny_model(folder / "model"), folder))
        begun = time.perf_counter()
        page = folder / "report.html"
        write_page(runs, page)
        wrote = time.perf_counter() - begun
        size = page.stat().st_size
        seconds = []
        with browser(Path(name) / "profile") as driver:
            version = driver.capabilities["browserVersion"]
            index = open_index(driver, page)
            for _ in range(rounds):
                driver.get("about:blank")
                open_page(driver, page)
                seconds.append(float(driver.execute_script(MARK)))
            console = driver.get_log("browser")
    lengths = [length for run in index["runs"] for step in run["steps"] for length in step["length"]]
    sys.stdout.write(
        f"{machine()}, Chromium {version}\n"
        f"{len(lengths)} completions, {statistics.mean(lengths):.0f} tokens on average; "
        f"written in {wrote:.1f} s, {size / 1e6:.1f} MB\n"
        f"usable after {statistics.median(seconds):.2f} s (median of {rounds}, "
        f"{min(seconds):.2f} to {max(seconds):.2f}); {len(console)} messages on the console\n"
    )


def open_index(driver: Any, page: Path) -> dict[str, Any]:
    """What the page says of the completions that it holds."""
    open_page(driver, page)
    index: dict[str, Any] = driver.execute_script("return JSON.parse(document.getElementById('index').textContent)")
    return index


if __name__ == "__main__":
    main()
