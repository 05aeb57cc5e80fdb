"""The report that follows a training."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.live.worker import environment
from trl_grpo_ext.history.report.run import load_run
from trl_grpo_ext.history.report.watch import watch
from trl_grpo_ext.trainer.live import LOG_FILE

ROOT = Path(__file__).parents[3]


# ---------------------------------------------------------------------------------------------- watching


@pytest.fixture
def training(command: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    chosen = {
        "max_steps": 8,
        "seconds": 0.4,
        "token_records": 4,
        "log_completions": True,
        "num_completions_to_print": 0,
    }
    process = subprocess.Popen(
        [*command, str(tmp_path / "run"), json.dumps(chosen)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_the_report_grows_while_another_process_trains(training: subprocess.Popen[bytes], tmp_path: Path) -> None:
    steps: list[int] = []
    stop, said = threading.Event(), list[str]()
    until = time.monotonic() + 90

    def write() -> None:
        run = load_run(tmp_path / "run")
        steps.append(run.last_step)
        if run.last_step == 8 or time.monotonic() > until:
            stop.set()

    assert watch([tmp_path / "run"], write, every=0.1, stop=stop, say=said.append) == 0
    assert training.wait(60) == 0
    assert steps == sorted(steps)
    assert steps[-1] == 8
    assert len(set(steps)) >= 4, steps  # it was there while it grew
    assert len(said) <= 1, said  # at first there was no run


def test_the_report_is_written_when_something_changed_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    looks = iter(range(100))
    writes: list[int] = []

    class Steps:
        """Stands for the time between two looks."""

        def wait(self, seconds: float) -> bool:
            look = next(looks)
            if look == 2:
                (tmp_path / LOG_FILE).write_text("{}\n")
            if look == 4:
                (tmp_path / "report.html").write_text("our own")
            if look == 5:
                (tmp_path / "token_records").mkdir()
                (tmp_path / "token_records" / "step_00001.parquet").write_bytes(b"half")
            return look == 8

    def write() -> None:
        writes.append(len(writes))
        if len(writes) == 2:
            raise OSError("disk full")

    said: list[str] = []
    assert watch([tmp_path], write, every=1, stop=Steps(), say=said.append) == 0  # type: ignore[arg-type]
    assert len(writes) == 4  # at first; the log, which failed; the log again; the records
    assert said == ["not written this time, will try again: disk full"]
