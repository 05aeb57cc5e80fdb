"""`trl-grpo-ext report` as a person runs it: what it writes, where it says so, and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import assert_readable, invoke, run_command
from tests.history.report.trained import write_history

pytestmark = pytest.mark.slow

HISTORY = [{"step": step, "loss": 0.5 / step, "reward": float(step)} for step in (1, 2, 3)]


def test_a_page_is_written_named_and_opened(own_runs: Path, tmp_path: Path) -> None:
    page, told = tmp_path / "a page.html", tmp_path / "told"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {told}\n')
    browser.chmod(0o755)
    words = ["report", own_runs / "one", own_runs / "two", "--out", page, "--open"]
    done = run_command(*words, env={"BROWSER": f"{browser} %s"})
    assert done.status == 0, done.err
    assert told.read_text().strip() == page.resolve().as_uri()
    assert done.out.startswith(f"{page} (")
    assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    assert "set pass_at_k" in done.err  # what is not drawn, and why
    assert list(tmp_path.glob(".*")) == []  # nothing unfinished


def test_in_a_terminal_what_is_missing_is_told_and_nothing_is_obeyed(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "odd\x1b[2J", HISTORY)
    (folder / "completions").mkdir()
    (folder / "completions" / "completions_00001.parquet").write_bytes(b"PAR1")
    done = invoke("report", folder, "--limit", "5", width=60)
    assert done.status == 0
    assert_readable(done.out, None)
    assert "damaged, truncated or still being written" in done.plain
    assert (folder / "report.html").is_file()
    assert (folder / "report.html").stat().st_size < 1_000_000


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    done = invoke("report", write_history(tmp_path / "run", HISTORY), "--out", tmp_path)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1), done.err
    assert f"cannot be written to {tmp_path}: Is a directory" in done.err


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "run", HISTORY)
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None; "
        f"sys.argv = ['trl-grpo-ext', 'report', {str(folder)!r}]; from trl_grpo_ext.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "pip install matplotlib" in done.stderr
    assert "Traceback" not in done.stderr
