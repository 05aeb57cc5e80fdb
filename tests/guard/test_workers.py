"""`WorkerPool` against tasks that hang, crash, eat memory and break their socket, and against kills from outside.

Jobs are nested functions, which cloudpickle sends by value: the server then imports nothing of the tests.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.busy import busy
from tests.interrupts import interruptible
from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.guard.workers import Done, WorkerPool

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and kills by pidfd")


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    gc.collect()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not left, "a zombie or a worker is left"


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    """Two workers that call what they are sent."""
    with contextlib.closing(WorkerPool(lambda job: job(), workers=2, memory_mb=256, name="trouble")) as made:
        yield made


def raising(error: BaseException) -> Callable[[], None]:
    def job() -> None:
        raise error

    return job


def once(file: Path) -> Callable[[], str]:
    """Kills its worker the first time."""

    def job() -> str:
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return "second try"
        os._exit(1)

    return job


def mark(file: Path, seconds: float) -> Callable[[], None]:
    """Leaves a line of process numbers and waits."""

    def job() -> None:
        with file.open("a") as trace:
            trace.write(f"{os.getpid()} {os.getppid()}\n")
        time.sleep(seconds)

    return job


def work(seconds: float) -> Callable[[], None]:
    """So many seconds of CPU time, however long that takes."""

    def job() -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    return job


def garbage(sent: bytes) -> Callable[[], None]:
    """Writes to whatever socket is open."""

    def job() -> None:
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(descriptor)).send(sent)
        time.sleep(60)

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


def test_any_json_comes_back_as_it_went() -> None:
    jobs = [None, True, -(2**70), 2.5, "\ud800\x00", [["x"], {"a": None}]]
    with contextlib.closing(WorkerPool(lambda job: job, workers=2)) as pool:
        assert [done.value for done in pool.run(jobs, allowance=10.0)] == jobs


def test_a_job_or_a_reply_may_be_large_but_not_too_large(pool: WorkerPool) -> None:
    text = "x" * 5_000_000
    assert one(pool, lambda: len(text)).value == 5_000_000
    assert one(pool, lambda: "x" * 15 * 2**20).value == "x" * 15 * 2**20
    done = one(pool, lambda: "x" * 17 * 2**20)
    assert (done.status, done.detail[:13]) == ("error", "OverflowError")
    worker = one(pool, os.getpid).value
    os.kill(worker, signal.SIGSTOP)  # one that reads nothing does not hang the parent
    assert one(pool, lambda: len(text), allowance=0.5, patience=0.5).status == "timeout"
    wait_until(lambda: not is_running(worker))


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


def test_a_job_that_ends_its_worker_is_tried_twice(pool: WorkerPool, tmp_path: Path) -> None:
    for end in (lambda: os._exit(3), lambda: ctypes.string_at(0), lambda: os.closerange(3, 4096)):
        done = one(pool, end)
        assert (done.status, done.detail) == ("died", "its worker process died, twice")
        assert one(pool, os.getpid).status == "done"
    assert one(pool, once(tmp_path / "tried")).value == "second try"


def test_a_reply_that_is_none_counts_as_a_death(pool: WorkerPool) -> None:
    header = (1).to_bytes(8)
    none = [b"hello, this is no header", header + (2**40).to_bytes(8), header + (5).to_bytes(8) + b"[1,2]"]
    none += [header + (200_000).to_bytes(8) + b"[" * 200_000]
    done = pool.run([garbage(sent) for sent in none], allowance=30.0, patience=30.0)
    detail = "its worker process sent an invalid reply, twice"
    assert [(one.status, one.detail) for one in done] == [("died", detail)] * len(none)


def test_pool_limits_memory(pool: WorkerPool) -> None:
    done = one(pool, lambda: len(bytearray(2000 * 2**20)))
    assert (done.status, done.detail) == ("died", "out of memory, twice")
    grown = one(pool, lambda: sys.modules.update(kept=bytearray(200 * 2**20)) or os.getpid()).value  # type: ignore[func-returns-value, call-overload]
    assert one(pool, os.getpid).value != grown  # which serves no further job


def test_a_job_that_hangs_is_killed_by_its_cpu_time_or_its_sleep(pool: WorkerPool) -> None:
    sleeps, spins = pool.run([lambda: time.sleep(60), lambda: 9 ** (9**9)], allowance=0.6, patience=0.7)
    assert (sleeps.status, spins.status) == ("timeout", "timeout")
    assert sleeps.seconds < 0.3
    assert 0.6 <= spins.seconds < 1.5


def test_a_job_takes_no_longer_for_a_busy_machine(pool: WorkerPool) -> None:
    with busy(4):
        done = pool.run([work(0.4)] * 4, allowance=1.0, patience=0.5)
    assert [result.status for result in done] == ["done"] * 4
    assert all(result.seconds < 1.0 for result in done)


def test_a_server_killed_from_outside_is_started_again(pool: WorkerPool, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    results: list[Done] = []
    thread = threading.Thread(target=lambda: results.extend(pool.run([mark(trace, 0.3)] * 6, allowance=30.0)))
    thread.start()
    wait_until(lambda: len(pids_in(trace)) >= 2)
    os.kill(pids_in(trace)[0][1], signal.SIGKILL)
    thread.join(30)
    assert [done.status for done in results] == ["done"] * 6
    assert len({server for _, server in pids_in(trace)}) == 2


def test_pool_does_chores_before_the_first_job() -> None:
    seen: list[int] = []
    task: Any = partial(lambda job: seen)
    task.chores = [lambda: seen.append(1)]
    with contextlib.closing(WorkerPool(task, workers=1)) as pool:
        assert one(pool, None).value == [1]


@pytest.mark.parametrize("spend", [work(0.5), lambda: time.sleep(0.5)], ids=["works", "sleeps"])
def test_a_job_whose_worker_dies_has_the_rest_of_its_time(pool: WorkerPool, spend: Any) -> None:
    def dies_late() -> None:
        spend()
        os._exit(3)

    done = one(pool, dies_late, allowance=0.8, patience=0.8)
    assert done.status == "timeout"
    assert done.seconds < 0.5


def test_an_idle_worker_or_server_that_was_killed_costs_no_try(pool: WorkerPool, tmp_path: Path) -> None:
    worker = one(pool, os.getpid).value
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not is_running(worker))
    assert one(pool, once(tmp_path / "tried")).value == "second try"
    assert pool._processes._server is not None
    server = pool._processes._server.pid
    worker = one(pool, os.getpid).value
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not is_running(worker))  # workers die with their server
    assert one(pool, os.getpid).status == "done"


def test_an_interrupt_leaves_the_pool_usable(pool: WorkerPool, tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    def interrupt() -> None:
        wait_until(lambda: len(pids_in(trace)) >= 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with interruptible():
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            pool.run([mark(trace, 60)] * 2, allowance=60.0, patience=60.0)
        thread.join()
    for worker, _ in pids_in(trace):
        wait_until(lambda pid=worker: not is_running(pid))  # type: ignore[misc]
    assert one(pool, lambda: 2).value == 2


def test_it_may_be_used_from_several_threads_at_once(pool: WorkerPool) -> None:
    def use(number: int) -> list[Any]:
        jobs = [partial(int, 100 * number + i) for i in range(30)]
        return [done.value for done in pool.run(jobs, allowance=10.0)]

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(use, range(4))] == [[100 * number + i for i in range(30)] for number in range(4)]


def test_pool_in_a_forked_child(pool: WorkerPool, tmp_path: Path) -> None:
    mine = one(pool, os.getpid).value
    answers = tmp_path / "answers"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's threads are there; this child calls none of them
        pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            answers.write_text(json.dumps([done.value for done in pool.run([os.getpid, lambda: 3], allowance=10.0)]))
            pool.close()
        os._exit(0)
    os.waitpid(pid, 0)
    theirs, three = json.loads(answers.read_text())
    assert three == 3
    assert theirs != mine == one(pool, os.getpid).value


def test_processes_end_with_the_pool_and_after_close() -> None:
    pool = WorkerPool(lambda job: job(), workers=1)
    first = one(pool, os.getpid).value
    pool.close()
    second = one(pool, os.getpid).value  # the next run starts new ones
    assert second != first
    del pool
    gc.collect()
    wait_until(lambda: not is_running(first) and not is_running(second))


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


def test_what_cannot_be_sent_is_an_error_that_says_so(pool: WorkerPool) -> None:
    with pytest.raises(RewardError, match=r"job 1 .*TypeError"):
        pool.run([os.getpid, threading.Lock()], allowance=1.0)
    assert one(pool, lambda: 1).value == 1


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for ranks, workers in {"1": 6, "2": 3, "4": 1, "100": 1}.items():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert WorkerPool(len).workers == workers
    assert WorkerPool(len, workers=20).workers == 20
