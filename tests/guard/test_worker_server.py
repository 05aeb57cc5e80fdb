"""The server of a pool: what it loads first, what its workers may not do, and that it ends with the parent."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.guard.pools import ON_LINUX, is_running, one, pids_in, raising, wait_until
from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.guard.workers import WorkerPool

pytestmark = [ON_LINUX, pytest.mark.usefixtures("no_process_is_left")]


def test_what_a_task_raises_is_its_answer(pool: WorkerPool) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    before = one(pool, os.getpid).value
    done = one(pool, raising(ValueError("no such thing")))
    assert (done.status, done.detail) == ("error", "ValueError: no such thing")
    assert "in job" in done.traceback
    assert one(pool, raising(SystemExit(4))).detail == "SystemExit: 4"
    assert one(pool, object).detail.startswith("TypeError: ")
    assert len(one(pool, raising(ValueError("x" * 10**6))).detail) < 3000
    assert one(pool, raising(MuteError())).detail.startswith("MuteError: ")
    assert one(pool, os.getpid).value == before  # none of these costs a worker


def test_pool_limits_memory(pool: WorkerPool) -> None:
    done = one(pool, lambda: len(bytearray(2000 * 2**20)))
    assert (done.status, done.detail) == ("died", "out of memory, twice")
    grown = one(pool, lambda: sys.modules.update(kept=bytearray(200 * 2**20)) or os.getpid()).value  # type: ignore[func-returns-value, call-overload]
    assert one(pool, os.getpid).value != grown  # which serves no further job


def test_pool_does_chores_before_the_first_job() -> None:
    seen: list[int] = []
    task: Any = partial(lambda job: seen)
    task.chores = [lambda: seen.append(1)]
    with contextlib.closing(WorkerPool(task, workers=1)) as pool:
        assert one(pool, None).value == [1]


PROGRAM = """
    import os, signal, sys, threading, time, warnings
    from trl_grpo_ext.guard.workers import WorkerPool
    with open(sys.argv[1], "a") as file:
        file.write("body\\n")
    trace = sys.argv[2]
    def task(job):
        import os, time
        with open(trace, "a") as file:
            file.write(f"{os.getpid()} {os.getppid()}\\n")
        print("printed by a worker")
        time.sleep(job)
        return job
    LONG = {"allowance": 60, "patience": 60}
    pool = WorkerPool(task, workers=2)
"""


def program(tmp_path: Path, text: str) -> tuple[subprocess.Popen[str], Path, Path]:
    """Start a script without any `if __name__ == "__main__"`."""
    script, bodies, trace = (tmp_path / name for name in ("script.py", "bodies", "trace"))
    script.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(text))
    command = [sys.executable, "-W", "error::ResourceWarning", str(script), str(bodies), str(trace)]
    root = str(Path(__file__).parents[2])
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": root}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root}, **how), bodies, trace


def all_gone(trace: Path, seconds: float = 5.0) -> None:
    pids = {pid for line in pids_in(trace) for pid in line}
    assert len(pids) >= 2
    wait_until(lambda: not any(is_running(pid) for pid in pids), seconds)


def test_a_script_without_a_main_guard_runs_its_body_once(tmp_path: Path) -> None:
    process, bodies, trace = program(
        tmp_path, "print([done.value for done in pool.run([0, 0.01, 0], allowance=5, patience=5)])"
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == "[0, 0.01, 0]\n"  # what workers print goes to stderr
    assert err.count("printed by a worker") == 3
    assert not err.replace("printed by a worker", "").strip(), "nothing warns"
    assert bodies.read_text() == "body\n"
    all_gone(trace)


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        "pool.run([60, 60], **LONG)",  # killed from outside
        "threading.Timer(1, os.kill, [os.getpid(), signal.SIGTERM]).start(); pool.run([60, 60], **LONG)",
        # A child lives on and holds the server's socket open, as one forked by C code would.
        "pool.run([0, 0], allowance=60, patience=60); os.dup(pool._processes._sock.fileno())\n"
        "if os.fork() == 0: time.sleep(6); os._exit(0)\n"
        "os._exit(0)",
    ],
    ids=["SIGKILL", "SIGTERM", "forked child lives on"],
)
def test_no_process_outlives_the_parent_however_it_ends(tmp_path: Path, end: str) -> None:
    process, _, trace = program(tmp_path, end)
    wait_until(lambda: len(pids_in(trace)) >= 1, 60)
    if end.startswith("pool.run([60"):
        wait_until(lambda: len(pids_in(trace)) >= 2)
        process.kill()
    status = process.wait(45)  # the jobs take 60 seconds
    all_gone(trace)
    _, err = process.communicate(timeout=60)
    assert status in (0, -signal.SIGKILL, -signal.SIGTERM), err


def test_a_task_that_cannot_be_loaded_is_an_error_with_its_text() -> None:
    class Broken:
        def __reduce__(self) -> Any:
            return eval, ("__import__('module_that_there_is_not')",)

        def __call__(self, job: Any) -> None: ...

    with contextlib.closing(WorkerPool(Broken(), name="broken")) as pool:
        for _ in range(2):
            with pytest.raises(RewardError, match="module_that_there_is_not"):
                pool.run([1], allowance=1.0)
