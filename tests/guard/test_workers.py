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
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.busy import busy
from tests.guard.pools import ON_LINUX, is_running, one, pids_in, wait_until
from tests.interrupts import interruptible
from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.guard.workers import Done, WorkerPool

pytestmark = [ON_LINUX, pytest.mark.usefixtures("no_process_is_left")]


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


def test_a_job_that_hangs_is_killed_by_its_cpu_time_or_its_sleep(pool: WorkerPool) -> None:
    sleeps, spins = pool.run([lambda: time.sleep(60), lambda: 9 ** (9**9)], allowance=0.6, patience=0.7)
    assert (sleeps.status, spins.status) == ("timeout", "timeout")
    assert sleeps.seconds < 0.3
    assert 0.6 <= spins.seconds < 1.5


def test_a_job_takes_no_longer_for_a_busy_machine(pool: WorkerPool) -> None:
    with busy(8):
        done = pool.run([work(0.5)] * 4, allowance=1.25, patience=1.5)
    assert [result.status for result in done] == ["done"] * 4
    assert all(result.seconds < 1.25 for result in done)


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
