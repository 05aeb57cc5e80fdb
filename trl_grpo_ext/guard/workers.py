"""Processes that run one task on many jobs and can be suspended and killed at any time.

A job's result depends on the job alone, not on what else the machine does: its time is the CPU time of its process. A
job that has used up its turn is suspended, and resumes after others have had theirs; it is killed once its allowance is
used up. The wall clock is a backstop for jobs that sleep.

Why not pebble: under spawn or forkserver it imports the user's `__main__` again in every worker that it starts or
replaces (an unguarded training script would train again), and killing a worker from outside breaks the whole pool,
whose workers share one pipe and its lock. Why not loky: it cannot kill a single task. Here a small server process
(`guard.worker_server`) that never imports `__main__` loads the task once and forks workers within milliseconds; every
worker has its own socket and shares no lock.

This protects against code that hangs, crashes or eats memory. It is not a sandbox: a worker has all rights of its user.
"""

from __future__ import annotations

import math
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigurationError, RewardError
from .parameters import checked_number, checked_whole
from .progress import report_progress
from .worker_processes import LostError, Processes, Worker, pickle_by_value

__all__ = ["Done", "WorkerPool"]

_MOST_WORKERS = 8
_FIRST_TURN = 0.25
_PATIENCE = 30.0
_MOST_SUSPENDED = 64
_MOST_SUSPENDED_BYTES = 2**30
_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.002, 1.0  # how often the clocks of others' processes are read


@dataclass(frozen=True)
class Done:
    """The result of one job.

    Attributes:
        status: "done"; "timeout" if it used up its allowance, slept too long, or the batch's budget was spent; "died"
            if its worker died twice or ran out of memory; "error" if the task raised.
        value: What the task returned, after a round trip through JSON: tuples are lists, keys are strings.
        detail: The reason; for "error" the exception's type and message.
        seconds: CPU seconds of the last attempt.
        whole: For "timeout", whether the job had its whole allowance or patience rather than running out of budget.
        traceback: For "error", the last lines of the worker's traceback.
    """

    status: Literal["done", "timeout", "died", "error"]
    value: Any = None
    detail: str = ""
    seconds: float = 0.0
    whole: bool = True
    traceback: str = ""


class WorkerPool:
    """Processes that run one task on many jobs and can be suspended and killed at any time.

    The first process starts with `start` or the first `run`. Workers stay for the next batch and end with this process,
    however it ends. The pool works from any thread, and in forks of this process, which start processes of their own.
    It pickles, without its processes.

    Args:
        task: Takes a job and returns a JSON value. Cloudpickle sends it, so a lambda or a function of `__main__` will
            do. It runs with an empty stdin, and its stdout goes to stderr.
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
        """Start without processes: at construction, after unpickling, and in a forked child."""
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
        return default_workers() if self._workers is None else self._workers

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
        allowance: float,
        patience: float = _PATIENCE,
        budget: float | None = None,
        turn: float | None = None,
    ) -> list[Done]:
        """Run the task on every job, in the order given.

        A job that has used up its turn is suspended while others have theirs, then resumes for twice as long. So a few
        hostile jobs never keep ordinary ones waiting, and no work is lost. A job whose worker dies is tried once more
        in a fresh one. Time that a job waits for a core on a busy machine does not count.

        Args:
            jobs: Anything that cloudpickle can send.
            allowance: CPU seconds that one job may take.
            patience: Seconds that one job may sleep: neither use a core nor wait for one.
            budget: Seconds of CPU time and sleep that jobs without a result may use together, over all workers. Once it
                is spent, jobs that have had a turn are "timeout", and the others get one turn each. Jobs that end with
                a result do not count, so slow jobs cost each other nothing as long as they finish.
            turn: Seconds of CPU time and sleep in a job's first turn; None means a quarter of a second.

        Returns:
            Each job's result, in the order of `jobs`.

        Raises:
            ConfigurationError: `allowance`, `patience`, `budget` or `turn` is not a positive number.
            RewardError: The server cannot load the task, a job cannot be pickled, or no process can be started.
        """
        given = (("allowance", allowance), ("patience", patience), ("budget", budget), ("turn", turn))
        for name, seconds in given:
            if seconds is not None:
                checked_number(f"{self.name}: {name}", seconds, "a positive number of seconds", lambda x: x > 0)
        with self._lock:
            batch = _Schedule(len(jobs), allowance, patience, budget, _FIRST_TURN if turn is None else turn)
            try:
                while True:
                    for late in batch.take_late():
                        self._processes.drop(late.worker)
                    while len(batch.running) < self.workers and (attempt := batch.take_next()) is not None:
                        self._go_on(attempt, jobs)
                    if not batch.running:
                        return batch.results()
                    self._wait(batch)
                    report_progress(batch.settled, len(jobs))
            finally:
                self._processes.drop_busy()  # there are some only after an error or an interrupt

    def _go_on(self, attempt: _Attempt, jobs: Sequence[Any]) -> None:
        """Start a job, or resume it."""
        if attempt.has_worker:
            self._processes.resume(attempt.worker)
            return
        try:
            payload = pickle_by_value(jobs[attempt.job])
        except Exception as error:  # whatever an object's own pickling raises
            raise RewardError(
                f"{self.name}: job {attempt.job} cannot be sent to a worker: {type(error).__name__}: {error}"
            ) from error
        attempt.worker = self._processes.take(self._task, self._memory_mb)
        attempt.has_worker = True
        attempt.worker.begin(payload)

    def _wait(self, batch: _Schedule) -> None:
        """Sleep until a worker has sent something or may have used up its turn, then settle what has ended."""
        poll = select.poll()
        owners: dict[int, _Attempt] = {}
        for attempt in batch.running:
            for descriptor, mask in attempt.worker.watched():
                poll.register(descriptor, mask)
                owners[descriptor] = attempt
        # CPU time passes no faster than the wall clock, so nothing is missed by sleeping for as long as one has left.
        sleep = min(max(batch.shortest_rest(), _SHORTEST_SLEEP), _LONGEST_SLEEP)
        events = poll.poll(sleep * 1000 + 1)
        for attempt in dict.fromkeys(owners[descriptor] for descriptor, _ in events):
            try:
                reply = attempt.worker.advance()
            except LostError as lost:
                self._processes.drop(attempt.worker)
                batch.take_death(attempt, str(lost))
                continue
            if reply is not None:
                worker = attempt.worker
                if batch.take_reply(attempt, reply):
                    self._processes.drop(worker)
                else:
                    self._processes.give_back(worker, self.workers)
        for attempt in [*batch.running]:
            if batch.settle_if_over(attempt):
                self._processes.drop(attempt.worker)
            elif batch.must_suspend(attempt):
                self._processes.suspend(attempt.worker)


def default_workers() -> int:
    """The number of usable cores, divided among this machine's ranks (`LOCAL_WORLD_SIZE`), at most 8."""
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


@dataclass(eq=False)
class _Attempt:
    job: int
    turns: int = 0
    turn_ends: float = 0.0
    suspended_at: float = 0.0
    deaths: tuple[str, ...] = ()
    has_worker: bool = False
    worker: Worker = field(init=False, repr=False)


class _Schedule:
    """The schedule of one batch: whose turn is next and how long it is, and the results so far."""

    def __init__(self, count: int, allowance: float, patience: float, budget: float | None, turn: float) -> None:
        self._allowance, self._patience, self._budget, self._turn = allowance, patience, budget, turn
        self._spent = 0.0  # seconds of jobs that are through, without a result
        self._done: dict[int, Done] = {}
        self._count = count
        self._fresh = deque(_Attempt(job) for job in range(count))
        self._suspended: list[_Attempt] = []
        self.running: list[_Attempt] = []

    @property
    def settled(self) -> int:
        """Number of finished jobs."""
        return len(self._done)

    def results(self) -> list[Done]:
        return [self._done[job] for job in range(self._count)]

    def take_next(self) -> _Attempt | None:
        """Take the waiting job with the fewest turns.

        If there is no room for more suspended jobs, one of those resumes instead of a new one.
        """
        if self._fresh and (self._has_room() or not self._suspended):
            attempt = self._fresh.popleft()
        elif self._suspended:
            attempt = min(self._suspended, key=lambda one: one.turns)  # of several the one that has waited longest
            self._suspended.remove(attempt)
        else:
            return None
        self._begin_turn(attempt)
        self.running.append(attempt)
        return attempt

    def _begin_turn(self, attempt: _Attempt) -> None:
        attempt.turn_ends += self._turn * 2**attempt.turns
        attempt.turns += 1

    def _turn_end(self, attempt: _Attempt) -> float:
        """The CPU time and sleep, in seconds, at which the attempt's turn ends.

        A turn is longer if the budget has room: up to half of what is left for each waiting job. So honest batches
        suspend hardly a job; each suspended job takes a fresh worker.
        """
        waiting = len(self._fresh) + len(self._suspended)
        share = 0.0 if self._budget is None else self._budget_left() / 2 / max(waiting, 1)
        return max(attempt.turn_ends, share)

    def _has_room(self) -> bool:
        grown = sum(attempt.worker.extra_memory() for attempt in self._suspended)
        return len(self._suspended) < _MOST_SUSPENDED and grown < _MOST_SUSPENDED_BYTES

    def _budget_left(self) -> float:
        if self._budget is None:
            return math.inf
        suspended = sum(attempt.suspended_at for attempt in self._suspended)
        return self._budget - self._spent - suspended - sum(map(_own_seconds, self.running))

    def take_late(self) -> list[_Attempt]:
        """Once the budget is spent, remove waiting jobs that have had a turn; the caller kills their workers."""
        if not (self._suspended or any(attempt.deaths for attempt in self._fresh)) or self._budget_left() > 0:
            return []
        late, self._suspended = self._suspended, []
        for attempt in late:
            self._out_of_budget(attempt)
        for attempt in [attempt for attempt in self._fresh if attempt.deaths]:
            self._fresh.remove(attempt)
            self._out_of_budget(attempt)
        return late

    def shortest_rest(self) -> float:
        """Seconds until the first running job may be over or have used up its turn."""
        rests = (
            min(self._turn_end(one) - _own_seconds(one), self._allowance - one.worker.seconds) for one in self.running
        )
        return min(self._patience, self._budget_left(), *rests)

    def settle_if_over(self, attempt: _Attempt) -> bool:
        """Settle a running attempt if its time is up; the caller kills its worker."""
        seconds = attempt.worker.seconds
        if seconds >= self._allowance:
            self._settle(attempt, Done("timeout", None, f"no result within {self._allowance:g} s of CPU time", seconds))
        elif attempt.worker.idle_seconds() >= self._patience:
            detail = f"no result within {self._patience:g} s of sleep and {seconds:.2g} s of CPU time"
            self._settle(attempt, Done("timeout", None, detail, seconds))
        elif self._budget_left() <= 0 and (attempt.turns > 1 or _own_seconds(attempt) >= attempt.turn_ends):
            self._out_of_budget(attempt)
        else:
            return False
        return True

    def must_suspend(self, attempt: _Attempt) -> bool:
        """Whether a running attempt has used up its turn and others wait."""
        if _own_seconds(attempt) < self._turn_end(attempt):
            return False
        if not (self._fresh or self._suspended) or not self._has_room():
            self._begin_turn(attempt)
            return False
        attempt.suspended_at = _own_seconds(attempt)
        self.running.remove(attempt)
        self._suspended.append(attempt)
        return True

    def take_reply(self, attempt: _Attempt, reply: dict[str, Any]) -> bool:
        """Take a worker's reply; True if it is the worker's last."""
        seconds = attempt.worker.seconds
        if reply.get("memory"):
            self.take_death(attempt, "out of memory")
        elif "error" in reply:
            kind, message, lines = reply["error"]
            self._settle(attempt, Done("error", None, f"{kind}: {message}", seconds, traceback=lines))
        else:
            self._settle(attempt, Done("done", reply["value"], "", seconds))
        return bool(reply.get("last"))

    def take_death(self, attempt: _Attempt, why: str) -> None:
        """Try a job again whose worker died, or settle it after the second death."""
        attempt.deaths += (why,)
        if len(attempt.deaths) == 1:
            self._spent += _own_seconds(attempt)
            self.running.remove(attempt)
            self._fresh.append(_Attempt(attempt.job, deaths=attempt.deaths))
            return
        first, second = attempt.deaths
        detail = f"{first}, twice" if first == second else f"{first}; then {second}"
        self._settle(attempt, Done("died", None, detail, attempt.worker.seconds))

    def _out_of_budget(self, attempt: _Attempt) -> None:
        seconds = attempt.worker.seconds if attempt.has_worker else 0.0
        spent = f"the batch's budget of {self._budget:g} s is spent"
        if attempt.deaths:
            self._settle(attempt, Done("died", None, f"{attempt.deaths[0]}, and {spent} before a second try", seconds))
        else:
            detail = f"{spent}; no result within {seconds:.2g} s"
            self._settle(attempt, Done("timeout", None, detail, seconds, whole=False))

    def _settle(self, attempt: _Attempt, done: Done) -> None:
        if done.status in ("timeout", "died"):
            self._spent += _own_seconds(attempt)
        self._done[attempt.job] = done
        if attempt in self.running:
            self.running.remove(attempt)


def _own_seconds(attempt: _Attempt) -> float:
    """Seconds that a job has run or slept so far."""
    return attempt.worker.seconds + max(0.0, attempt.worker.idle_seconds()) if attempt.has_worker else 0.0
