"""Processes that run one task on many jobs and can be killed at any time.

A job's result depends on the job alone, not on its neighbours or on what else the machine does: its time is the CPU
time of its process, and each job has the whole allowance. The wall clock is a backstop for jobs that sleep.

Why not pebble: under spawn or forkserver it imports the user's `__main__` again in every worker that it starts or
replaces (an unguarded training script would train again), and killing a worker from outside breaks the whole pool,
whose workers share one pipe and its lock. Why not loky: it cannot kill a single task. Here a small server process
(`guard.worker_server`) that never imports `__main__` loads the task once and forks workers within milliseconds; every
worker has its own socket and shares no lock.

This protects against code that hangs, crashes or eats memory. It is not a sandbox: a worker has all rights of its user.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigurationError, RewardError
from .parameters import checked_number, checked_whole
from .worker_processes import LostError, Processes, Worker, pickle_by_value

__all__ = ["Done", "WorkerPool"]

_MOST_WORKERS = 8
_PATIENCE = 30.0
_COLD_SLICE = 0.25  # CPU seconds, at most, for a job in a worker whose caches are empty
_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.002, 1.0  # how often the clocks of the workers are read


@dataclass(frozen=True)
class Done:
    """The result of one job.

    Attributes:
        status: "done"; "timeout" if it used up its allowance or slept too long; "died" if its worker died twice or ran
            out of memory; "error" if the task raised.
        value: What the task returned, after a round trip through JSON: tuples are lists, keys are strings.
        detail: The reason; for "error" the exception's type and message.
        seconds: CPU seconds of the last attempt.
        traceback: For "error", the last lines of the worker's traceback.
    """

    status: Literal["done", "timeout", "died", "error"]
    value: Any = None
    detail: str = ""
    seconds: float = 0.0
    traceback: str = ""


class WorkerPool:
    """Processes that run one task on many jobs and can be killed at any time.

    The first process starts with `start` or the first `run`. Workers stay for the next batch and end with this process,
    however it ends. The pool works from any thread, and in forks of this process, which start processes of their own.
    It pickles, without its processes.

    Args:
        task: Takes a job and returns a JSON value. Cloudpickle sends it, so a lambda or a function of `__main__` will
            do. It runs with an empty stdin, and its stdout goes to stderr. Functions in a list `chores` of its own are
            called while the server is idle, to fill caches for later workers.
        workers: Number of processes; None means `default_workers()`: one per usable core, at most 8.
        memory_mb: Address space that a worker may add to what it started with, in MiB; None means no limit.
        name: For messages.

    Raises:
        ConfigurationError: A parameter is invalid.
    """

    def __init__(
        self,
        task: Callable[[Any], Any],
        *,
        workers: int | None = None,
        memory_mb: int | None = 512,
        name: str = "worker",
    ) -> None:
        if not callable(task):
            raise ConfigurationError(f"{name}: the task must be callable, got {task!r:.80}")
        for parameter, number in (("workers", workers), ("memory_mb", memory_mb)):
            if number is not None:
                checked_whole(f"{name}: {parameter}", number, 1)
        self._task, self._workers, self._memory_mb, self.name = task, workers, memory_mb, name
        self._renew()

    def _renew(self) -> None:
        """Start without processes, also after unpickling and in a forked child."""
        self._lock = threading.Lock()
        self._processes = Processes(self.name, self._task, self._memory_mb)
        self._end = weakref.finalize(self, self._processes.end)
        _POOLS.add(self)

    def _after_fork(self) -> None:
        self._end.detach()
        self._processes.forget()
        self._renew()

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self._task, "workers": self._workers, "memory_mb": self._memory_mb, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        WorkerPool.__init__(self, **state)

    def __repr__(self) -> str:
        return f"WorkerPool({self.name!r}, workers={self.workers}, memory_mb={self._memory_mb})"

    @property
    def workers(self) -> int:
        """Number of processes that work at once."""
        return default_workers() if self._workers is None else self._workers

    def start(self) -> None:
        """Start the server in the background, so that the task's imports overlap with other work. Optional."""
        with self._lock:
            self._processes.start()

    def close(self) -> None:
        """End all processes. The next `run` starts new ones."""
        with self._lock:
            self._processes.end()

    def run(self, jobs: Sequence[Any], *, allowance: float, patience: float = _PATIENCE) -> list[Done]:
        """Run the task on every job; return each job's result, in the order of `jobs`.

        A job whose worker dies is tried once more in a fresh one, with the time that it has left. Time that a job waits
        for a core on a busy machine does not count.

        Args:
            jobs: Anything that cloudpickle can send.
            allowance: CPU seconds that one job may take. While the task's chores are not done, it has a slice of at
                most 0.25 s before, so that ordinary jobs need not wait for them, and slow ones find their caches full.
            patience: Seconds that one job may sleep: neither use a core nor wait for one.

        Raises:
            ConfigurationError: `allowance` or `patience` is not a positive number.
            RewardError: The server cannot load the task, a job cannot be pickled, or no process can be started.
        """
        for name, seconds in (("allowance", allowance), ("patience", patience)):
            checked_number(f"{self.name}: {name}", seconds, "a positive number of seconds", lambda x: x > 0)
        with self._lock:
            batch = _Batch(self, jobs, allowance, patience)
            try:
                while batch.hand_out():
                    batch.wait()
            finally:
                self._processes.drop_busy()  # there are some only after an error or an interrupt
        return [batch.done[job] for job in range(len(jobs))]


class _Batch:
    """The jobs of one batch: those that wait, the one that each worker has, and the results so far."""

    def __init__(self, pool: WorkerPool, jobs: Sequence[Any], allowance: float, patience: float) -> None:
        self._name, self._workers, self._processes = pool.name, pool.workers, pool._processes
        self._jobs, self._allowance, self._patience = jobs, allowance, patience
        self._waiting = deque(range(len(jobs)))
        self._slow = deque[int]()  # their slice in a cold worker is used up: they wait for a warm one
        self._spent: dict[int, float] = {}  # by jobs whose worker died
        self._given: dict[Worker, int] = {}
        self._deaths: dict[int, str] = {}
        self.done: dict[int, Done] = {}

    def hand_out(self) -> bool:
        """Give every free worker a job; False if none is at work."""
        while len(self._given) < self._workers:
            if self._waiting:
                worker, job = self._processes.take(), self._waiting.popleft()
            elif self._slow and (self._processes.is_warm or not self._given):
                worker, job = self._processes.take(warm=True), self._slow.popleft()
            else:
                break
            try:
                payload = pickle_by_value(self._jobs[job])
            except Exception as error:  # whatever an object's own pickling raises
                raise RewardError(
                    f"{self._name}: job {job} cannot be sent to a worker: {type(error).__name__}: {error}"
                ) from error
            self._given[worker] = job
            worker.send(payload)
        return bool(self._given)

    def wait(self) -> None:
        """Sleep until a worker has sent something or may have used up its time, then settle what has ended."""
        poll = select.poll()
        for worker in self._given:
            poll.register(*worker.watched())
        # CPU time passes no faster than the wall clock, so nothing is missed by sleeping for as long as one has left.
        rest = min(self._patience, *(self._limit(worker) - worker.seconds for worker in self._given))
        poll.poll(min(max(rest, _SHORTEST_SLEEP), _LONGEST_SLEEP) * 1000 + 1)
        for worker, job in [*self._given.items()]:
            again = self._slow
            try:
                done, is_last = self._result(worker)
            except LostError as lost:
                done, is_last, again = self._after_death(job, str(lost), worker), True, self._waiting
            if done is None and not is_last:
                continue
            del self._given[worker]
            if is_last:
                self._processes.drop(worker)
            else:
                self._processes.give_back(worker)
            if done is None:
                again.append(job)
            else:
                self.done[job] = done

    def _result(self, worker: Worker) -> tuple[Done | None, bool]:
        """The result of a worker's job, None while there is none, and whether the worker can have no other job."""
        if (reply := worker.advance()) is None:
            late = self._late(worker)
            is_over = bool(late) or worker.seconds >= self._limit(worker)
            return Done("timeout", None, late, worker.seconds) if late else None, is_over
        if reply.get("memory"):
            raise LostError("out of memory")
        if "error" in reply:
            kind, message, lines = reply["error"]
            return Done("error", None, f"{kind}: {message}", worker.seconds, lines), False
        return Done("done", reply["value"], "", worker.seconds), bool(reply.get("last"))

    def _limit(self, worker: Worker) -> float:
        """CPU seconds for a worker's job: what is left of its allowance, or a slice while caches are cold."""
        left = self._allowance - self._spent.get(self._given[worker], 0.0)
        return min(left, self._allowance / 4, _COLD_SLICE) if worker.is_cold else left

    def _late(self, worker: Worker) -> str:
        if not worker.is_cold and worker.seconds >= self._limit(worker):
            return f"no result within {self._allowance:g} s of CPU time"
        if worker.idle_seconds() >= self._patience:
            return f"no result within {self._patience:g} s of sleep and {worker.seconds:.2g} s of CPU time"
        return ""

    def _after_death(self, job: int, why: str, worker: Worker) -> Done | None:
        """The result of a job whose worker died for the second time; None after the first, when it is tried again."""
        if (first := self._deaths.pop(job, None)) is None:
            self._deaths[job], self._spent[job] = why, worker.seconds_at_most()
            return None
        return Done("died", None, f"{first}, twice" if first == why else f"{first}; then {why}", worker.seconds)


def default_workers() -> int:
    """The number of usable cores, divided among this machine's ranks (`LOCAL_WORLD_SIZE`), at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(_MOST_WORKERS, max(1, cores // max(1, int(ranks) if ranks.isdecimal() else 1)))


_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in [*_POOLS]:
        pool._after_fork()


os.register_at_fork(after_in_child=_forget_all)
