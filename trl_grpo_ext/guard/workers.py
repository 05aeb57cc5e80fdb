"""Processes that run one task on many jobs and may be killed at any time.

Not pebble: under spawn or forkserver it imports the user's `__main__` again in every worker that it starts or replaces
(an unguarded training script would train again), and a worker that is killed from outside breaks the whole pool, whose
workers share one pipe and its lock. Not loky: it cannot kill a single task. Here a small server process
(`guard.worker_server`) that never imports `__main__` loads the task once and forks a worker whenever one is needed, in
milliseconds; every worker has a socket of its own and shares no lock.

This protects against code that hangs, crashes or eats memory. It is no sandbox: a worker has all rights of its user.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigurationError, RewardError
from .parameters import checked_number, checked_whole
from .progress import scored
from .worker_processes import LostError, Processes, Worker, pickled

__all__ = ["Done", "WorkerPool"]

_MOST_WORKERS = 8
_FIRST_SLICE = 0.25
_LONGEST_SLEEP = 3600.0  # poll takes milliseconds as a C int


@dataclass(frozen=True)
class Done:
    """What became of one job.

    Attributes:
        status: "done"; "timeout" after its full deadline, or where the batch's budget was spent; "died" where its
            worker did, twice, or ran out of memory; "error" where the task raised.
        value: What the task returned, as JSON brings it back: tuples are lists, keys of mappings are strings.
        detail: Why; for "error" the exception's type and message.
        seconds: How long the last attempt took.
        traceback: For "error", the last lines of the worker's traceback.
    """

    status: Literal["done", "timeout", "died", "error"]
    value: Any = None
    detail: str = ""
    seconds: float = 0.0
    traceback: str = ""


class WorkerPool:
    """Processes that run one task on many jobs and may be killed at any time.

    No process is started before `start` or the first `run`. Workers stay for the next batch and end with this process,
    however it ends. The pool may be used from any thread, and in a forked copy of this process, which starts processes
    of its own. It pickles, without its processes.

    Args:
        task: Takes a job and returns a JSON value. It is sent by cloudpickle, so a lambda will do, and so will a
            function of `__main__`. It runs with stdin empty and stdout sent to stderr.
        workers: Number of processes; None is `usual_workers()`: as many as there are usable cores, at most 8.
        memory_mb: Address space that a worker may add to what it started with, in MiB; None is no limit.
        name: For messages.

    Raises:
        ConfigurationError: A parameter cannot work.
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
        """Begin without processes: at construction, after unpickling, and in a forked child."""
        self._lock = threading.Lock()
        self._processes = Processes(self.name)
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
        return usual_workers() if self._workers is None else self._workers

    def start(self) -> None:
        """Start the server in the background, so that the task's imports overlap with other work. Optional.

        Raises:
            RewardError: The task cannot be pickled, or no process can be started.
        """
        with self._lock:
            self._processes.start(self._task, self._memory_mb)

    def close(self) -> None:
        """End all processes. The next `run` starts new ones."""
        with self._lock:
            self._processes.end()

    def run(
        self,
        jobs: Sequence[Any],
        *,
        deadline: float,
        budget: float | None = None,
        slice: float | None = None,
    ) -> list[Done]:
        """Run the task on every job, in the order given.

        A job that overruns its slice is killed and goes to the end of the queue with a four times longer one, so a few
        hostile jobs never keep ordinary ones waiting. A job whose worker dies is tried once more in a fresh one.

        Args:
            jobs: Anything that cloudpickle can send.
            deadline: Seconds that one attempt at one job may take, on the wall clock.
            budget: Seconds for the whole batch, from its first job's beginning. Once they are spent, jobs that have
                had a try are "timeout", and those that had none get one slice each.
            slice: Seconds of a job's first attempt; None is a quarter of a second.

        Returns:
            What became of each job, in the order of `jobs`.

        Raises:
            ConfigurationError: `deadline`, `budget` or `slice` is not a positive number.
            RewardError: The task cannot be loaded by the server, a job cannot be pickled, or no process can be started.
        """
        for name, seconds in (("deadline", deadline), ("budget", budget), ("slice", slice)):
            if seconds is not None or name == "deadline":
                checked_number(f"{self.name}: {name}", seconds, "a positive number of seconds", lambda x: x > 0)
        with self._lock:
            batch = _Batch(len(jobs), deadline, budget, _FIRST_SLICE if slice is None else slice)
            busy: dict[Worker, _Attempt] = {}
            try:
                while True:
                    batch.give_up_late_ones()
                    while batch.queue and len(busy) < self.workers:
                        self._hand_out(jobs, batch, busy)
                    if not busy:
                        return batch.results()
                    self._wait(batch, busy)
                    scored(batch.settled, len(jobs))
            finally:
                self._processes.drop_busy()  # there are some only after an error or an interrupt

    def _hand_out(self, jobs: Sequence[Any], batch: _Batch, busy: dict[Worker, _Attempt]) -> None:
        attempt = batch.queue.popleft()
        try:
            payload = pickled(jobs[attempt.job])
        except Exception as error:  # whatever an object's own pickling raises
            raise RewardError(
                f"{self.name}: job {attempt.job} cannot be sent to a worker: {type(error).__name__}: {error}"
            ) from error
        worker = self._processes.take(self._task, self._memory_mb)
        busy[worker] = attempt
        batch.begin(attempt)
        worker.begin(payload)

    def _wait(self, batch: _Batch, busy: dict[Worker, _Attempt]) -> None:
        """Sleep until a worker has something for us or a slice ends, and settle what has ended."""
        now = time.monotonic()
        poll = select.poll()
        owners: dict[int, Worker] = {}
        for worker in busy:
            for descriptor, mask in worker.watched():
                poll.register(descriptor, mask)
                owners[descriptor] = worker
        first = min(batch.ends(attempt) for attempt in busy.values())
        events = poll.poll(min(max(0.0, first - now), _LONGEST_SLEEP) * 1000 + 1)
        for worker in {owners[descriptor] for descriptor, _ in events}:
            try:
                reply = worker.advance()
            except LostError as lost:
                self._processes.drop(worker)
                batch.died(busy.pop(worker), str(lost))
                continue
            if reply is not None:
                last = batch.answered(busy.pop(worker), reply)
                if last:
                    self._processes.drop(worker)
                else:
                    self._processes.give_back(worker)
        now = time.monotonic()
        for worker, attempt in [*busy.items()]:
            if now >= batch.ends(attempt):
                self._processes.drop(worker)
                batch.overran(busy.pop(worker))


def usual_workers() -> int:
    """The number of usable cores, shared with the other ranks of this machine (`LOCAL_WORLD_SIZE`), at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(_MOST_WORKERS, max(1, cores // max(1, int(ranks) if ranks.isdecimal() else 1)))


_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in [*_POOLS]:
        pool._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


# ---------------------------------------------------------------------------------------------- one batch


@dataclass
class _Attempt:
    job: int
    slice: float
    started: float = 0.0
    overruns: int = 0
    deaths: tuple[str, ...] = ()

    @property
    def tries(self) -> int:
        return self.overruns + len(self.deaths)


class _Batch:
    """Which job is next, how long it may take, and what became of those that are through."""

    def __init__(self, count: int, deadline: float, budget: float | None, slice: float) -> None:
        self._deadline, self._budget = deadline, budget
        self._spent_at = math.inf  # until the first job begins: loading the task is no job's fault
        self._done: dict[int, Done] = {}
        self._count = count
        self.queue = deque(_Attempt(job, min(slice, deadline)) for job in range(count))

    @property
    def settled(self) -> int:
        """Jobs that are through."""
        return len(self._done)

    def results(self) -> list[Done]:
        return [self._done[job] for job in range(self._count)]

    def begin(self, attempt: _Attempt) -> None:
        attempt.started = time.monotonic()
        if self._budget is not None and self._spent_at == math.inf:
            self._spent_at = attempt.started + self._budget

    def ends(self, attempt: _Attempt) -> float:
        """When the attempt is over: with its slice, or with the budget where the job has had a try."""
        end = attempt.started + attempt.slice
        return min(end, self._spent_at) if attempt.tries else end

    def give_up_late_ones(self) -> None:
        """Take from the queue the jobs that have had a try, once the budget is spent."""
        if time.monotonic() < self._spent_at:
            return
        late = [attempt for attempt in self.queue if attempt.tries]
        self.queue = deque(attempt for attempt in self.queue if not attempt.tries)
        for attempt in late:
            self._out_of_budget(attempt, 0.0)

    def answered(self, attempt: _Attempt, reply: dict[str, Any]) -> bool:
        """Take a worker's reply; True where it is the worker's last."""
        seconds = time.monotonic() - attempt.started
        if reply.get("memory"):
            self.died(attempt, "out of memory")
        elif "error" in reply:
            kind, message, lines = reply["error"]
            self._done[attempt.job] = Done("error", None, f"{kind}: {message}", seconds, lines)
        else:
            self._done[attempt.job] = Done("done", reply["value"], "", seconds)
        return bool(reply.get("last"))

    def died(self, attempt: _Attempt, why: str) -> None:
        attempt.deaths += (why,)
        if len(attempt.deaths) == 1:
            self.queue.append(attempt)
            return
        first, second = attempt.deaths
        detail = f"{first}, twice" if first == second else f"{first}; then {second}"
        self._done[attempt.job] = Done("died", None, detail, time.monotonic() - attempt.started)

    def overran(self, attempt: _Attempt) -> None:
        now = time.monotonic()
        attempt.overruns += 1
        if attempt.slice >= self._deadline and now >= attempt.started + attempt.slice:
            detail = f"no result within {self._deadline:g} s"
            self._done[attempt.job] = Done("timeout", None, detail, now - attempt.started)
        elif now >= self._spent_at:
            self._out_of_budget(attempt, now - attempt.started)
        else:
            attempt.slice = min(attempt.slice * 4, self._deadline)
            self.queue.append(attempt)

    def _out_of_budget(self, attempt: _Attempt, seconds: float) -> None:
        spent = f"the batch's budget of {self._budget:g} s is spent"
        if attempt.deaths:
            detail = f"{attempt.deaths[0]}, and {spent} before a second try"
            self._done[attempt.job] = Done("died", None, detail, seconds)
        else:
            detail = f"{spent}; no result in {attempt.overruns} tries"
            self._done[attempt.job] = Done("timeout", None, detail, seconds)
