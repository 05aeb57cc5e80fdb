"""What the tests of worker pools share."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from trl_grpo_ext.guard.workers import Done, WorkerPool

ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and kills by pidfd")


def raising(error: BaseException) -> Callable[[], None]:
    def job() -> None:
        raise error

    return job


def one(pool: WorkerPool, job: Any, **options: Any) -> Done:
    [done] = pool.run([job], **{"allowance": 10.0, **options})
    return done


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids_in(file: Path) -> list[list[int]]:
    return [[int(word) for word in line.split()] for line in file.read_text().splitlines()] if file.exists() else []
