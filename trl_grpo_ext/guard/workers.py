"""Processes that run one task on many jobs and can be killed at any time.

A job's time is the CPU time of its process, so that its result does not depend on what else the machine does; the wall
clock is a backstop for jobs that sleep. Pebble imports the user's `__main__` again in every worker, and loky cannot
kill a single task: here a server (`guard.worker_server`) loads the task once, forks workers within milliseconds, and
kills and collects them, so that a pid never refers to another process. This is no sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..errors import RewardError
from . import worker_server
from .parameters import checked_number, checked_whole
from .worker_server import COMMAND, FORK, HEADER, LONGEST_REPLY, receive

__all__ = ["Done", "WorkerPool"]

_MOST_WORKERS = 8
_PATIENCE = 30.0
_SHORTEST_SLEEP = 0.002  # how often the clocks of the workers are read
_LONGEST_SLEEP = 1.0
_LOADING_LIMIT = 300.0  # seconds that the task's imports and chores may take
_FORK_LIMIT = 60.0
_UNKNOWN_SLEEP = 10.0  # where the kernel does not say how long a process waited for a core, time off it counts a tenth


class _LostError(Exception):
    """The process at the other end has died, or sent something invalid; the message says which."""


@dataclass(frozen=True)
class Done:
    """The result of one job."""

    # "timeout": it used up its allowance or slept too long; "died": its worker died twice, or ran out of memory
    status: Literal["done", "timeout", "died", "error"]
    value: Any = None  # what the task returned, after a round trip through JSON: tuples are lists, keys are strings
    detail: str = ""  # the reason; for "error" the exception's type and message
    seconds: float = 0.0  # CPU seconds of the last attempt
    traceback: str = ""  # for "error", the last lines of the worker's traceback


@dataclass
class _Job:
    """One job of a batch, and the time that it has left."""

    number: int
    allowance: float
    patience: float
    death: str = ""  # why its first worker died


class WorkerPool:
    """Processes that start with `start` or the first `run`, stay for the next batch, and end with this process.

    The pool works from any thread, and in forks, which start processes of their own. It pickles, without its processes.

    Args:
        task: Takes a job and returns a JSON value; cloudpickle sends it. Its stdin is empty, and its stdout goes to
            stderr. Functions in a list `chores` of its own are called once it is loaded, to fill caches for all.
        workers: Number of processes; None means one per usable core, divided among this machine's ranks, at most 8.
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
        for parameter, number in (("workers", workers), ("memory_mb", memory_mb)):
            if number is not None:
                checked_whole(f"{name}: {parameter}", number, 1)
        self._task = task
        self._workers = workers
        self._memory_mb = memory_mb
        self.name = name
        self._renew()

    def _renew(self) -> None:
        """Begin without processes, also in a forked child."""
        self._lock = threading.Lock()
        self._processes = _Processes(self.name, self._task, self._memory_mb)
        weakref.finalize(self, self._processes.end)

    def __reduce__(self) -> Any:
        return partial(WorkerPool, workers=self._workers, memory_mb=self._memory_mb, name=self.name), (self._task,)

    @property
    def workers(self) -> int:
        """Number of processes that work at once."""
        return default_workers() if self._workers is None else self._workers

    def start(self) -> None:
        """Start the server in the background, so that the task's imports overlap with other work. Optional."""
        if self._processes.owner != os.getpid():
            self._renew()
        with self._lock:
            self._processes.start()

    def close(self) -> None:
        """End all processes. The next `run` starts new ones."""
        with self._lock:
            self._processes.end()

    def run(self, jobs: Sequence[Any], *, allowance: float, patience: float = _PATIENCE) -> list[Done]:
        """Run the task on every job; return each job's result, in the order of `jobs`.

        A job whose worker dies is tried once more, with the time that it has left. Waiting for a core does not count.

        Args:
            jobs: Anything that cloudpickle can send.
            allowance: CPU seconds that one job may take, in both tries together.
            patience: Seconds that it may sleep, in both tries together: neither use a core nor wait for one.

        Raises:
            ConfigurationError: `allowance` or `patience` is not a positive number.
            RewardError: The server cannot load the task, a job cannot be pickled, or no process can be started.
        """
        for name, seconds in (("allowance", allowance), ("patience", patience)):
            checked_number(f"{self.name}: {name}", seconds, "a positive number of seconds", lambda x: x > 0)
        if self._processes.owner != os.getpid():
            self._renew()
        done: dict[int, Done] = {}
        waiting = deque(_Job(number, allowance, patience) for number in range(len(jobs)))
        at_work: dict[_Worker, _Job] = {}
        with self._lock:
            try:
                while waiting or at_work:
                    while waiting and len(at_work) < self.workers:
                        job = waiting.popleft()
                        payload = _pickle_by_value(jobs[job.number], f"{self.name}: job {job.number}")
                        worker = self._processes.take()
                        at_work[worker] = job
                        worker.send(payload)
                    _wait(at_work)
                    for worker, job in [*at_work.items()]:
                        try:
                            found = worker.advance() or _timeout(worker, job, allowance, patience)
                            is_over = found is not None
                        except _LostError as lost:
                            found = _after_death(worker, job, str(lost))
                            is_over = True
                        if found is not None:
                            done[job.number] = found
                        elif is_over:
                            waiting.append(job)
                        if is_over:
                            del at_work[worker]
                            self._processes.give_back(worker)
            finally:
                self._processes.drop_busy()  # there are some only after an error or an interrupt
        return [done[number] for number in range(len(jobs))]


def default_workers() -> int:
    """The number of usable cores, divided among this machine's ranks (`LOCAL_WORLD_SIZE`), at most 8."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(_MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) // ranks))


def _wait(at_work: dict[_Worker, _Job]) -> None:
    """Sleep until a worker has sent something or may have used up its time."""
    poll = select.poll()
    for worker in at_work:
        poll.register(*worker.watched())
    # No time passes faster than the wall clock, so nothing is missed by sleeping for as long as one has left.
    rest = min(min(job.allowance - worker.seconds, job.patience - worker.slept) for worker, job in at_work.items())
    poll.poll(min(max(rest, _SHORTEST_SLEEP), _LONGEST_SLEEP) * 1000 + 1)


def _timeout(worker: _Worker, job: _Job, allowance: float, patience: float) -> Done | None:
    """The result of a job that has used up its time; None if it has not."""
    if worker.seconds >= job.allowance:
        late = f"no result within {allowance:g} s of CPU time"
    elif worker.slept >= job.patience:
        late = f"no result within {patience:g} s of sleep and {worker.seconds:.2g} s of CPU time"
    else:
        return None
    return Done("timeout", None, late, worker.seconds)


def _after_death(worker: _Worker, job: _Job, why: str) -> Done | None:
    """The result of a job whose worker died for the second time; None after the first, when it is tried again."""
    if job.death:
        return Done("died", None, f"{why}, twice" if job.death == why else f"{job.death}; then {why}", worker.seconds)
    job.death = why
    job.allowance -= worker.seconds_at_most()
    job.patience -= worker.slept
    return None


class _Processes:
    """The server, which loads the task, and the workers that it forks; a fork of this process has others."""

    def __init__(self, name: str, task: Callable[[Any], Any], memory_mb: int | None) -> None:
        self.owner = os.getpid()
        self.idle: list[_Worker] = []
        self._name = name
        self._task = task
        self._memory_mb = memory_mb
        self._server: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket  # to the server, while there is one
        self._is_loaded = False
        self._all: set[_Worker] = set()

    def start(self) -> None:
        """Start the server if there is none, without waiting for it."""
        if self._server is not None:
            return
        data = _pickle_by_value(self._task, f"{self._name}: {self._task!r:.80}")
        self._sock, theirs = socket.socketpair()
        self._is_loaded = False
        # By file, because a large task does not fit into a pipe and the server does not read yet.
        with theirs, tempfile.TemporaryFile() as file:
            pickle.dump([str(folder) or str(Path.cwd()) for folder in sys.path], file)
            file.write(data)
            file.seek(0)
            self._server = subprocess.Popen(
                [sys.executable, "-P", worker_server.__file__, str(theirs.fileno()), str(self._memory_mb or 0)],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=file,
                stdout=2,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def take(self) -> _Worker:
        """An idle worker, or a fresh one."""
        while self.idle:
            worker = self.idle.pop()
            if worker.is_quiet():
                return worker
            self.drop(worker)  # it died, or spoke without having been asked
        why = ""
        for _ in range(3):
            try:
                worker = self._fork()
            except _LostError as lost:
                why = str(lost)
                self._end_server()
            except BaseException:  # the task cannot be loaded, or an interrupt left half a message unread
                self._end_server()
                raise
            else:
                self._all.add(worker)
                return worker
        raise RewardError(f"{self._name}: no worker process can be started; tried three times: {why}.")

    def _fork(self) -> _Worker:
        self.start()
        if not self._is_loaded:
            self._receive("the task cannot be loaded in the worker processes", _LOADING_LIMIT)
            self._is_loaded = True
        with contextlib.suppress(OSError):  # the server has died, as reading shows
            self._sock.sendall(COMMAND.pack(FORK))
        pid, files = self._receive("no worker can be forked", _FORK_LIMIT)
        return _Worker(pid, files[0])

    def _receive(self, problem: str, limit: float) -> tuple[int, list[int]]:
        """The number and the files that the server sends; a `RewardError` if it says that there is a problem."""
        self._sock.settimeout(limit)
        try:
            data, files, *_ = socket.recv_fds(self._sock, HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
            number, size = HEADER.unpack(data)
            reply = json.loads(receive(self._sock, size) or b"")
        except TimeoutError as error:
            raise _LostError(f"their server did not answer within {limit:g} s") from error
        except (OSError, ValueError, struct.error) as error:
            raise _LostError("their server has died") from error
        if "error" in reply:
            kind, message, lines = reply["error"]
            raise RewardError(f"{self._name}: {problem}: {kind}: {message}\n{lines}")
        return number, files

    def give_back(self, worker: _Worker) -> None:
        if worker.is_free:
            self.idle.append(worker)
        else:
            self.drop(worker)

    def drop(self, worker: _Worker) -> None:
        """Kill a worker; if the server is gone, its workers are too."""
        if worker in self._all and self._server is not None:
            with contextlib.suppress(OSError):
                self._sock.sendall(COMMAND.pack(worker.pid))
        worker.sock.close()
        self._all.discard(worker)

    def drop_busy(self) -> None:
        for worker in self._all.difference(self.idle):
            self.drop(worker)

    def end(self) -> None:
        if self.owner == os.getpid():
            self.idle.clear()
            self.drop_busy()
            self._end_server()

    def _end_server(self) -> None:
        """Close the socket, so that the server kills its workers and ends; kill it if it does not."""
        if self._server is None:
            return
        self._sock.close()
        try:
            self._server.wait(1.0)
        except subprocess.TimeoutExpired:  # it is still importing
            self._server.kill()
            self._server.wait()
        finally:
            self._server = None


class _Worker:
    """One forked worker, with one job at a time and the clocks of that job."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.sock = socket.socket(fileno=descriptor)
        self.sock.setblocking(False)
        self.is_free = True  # whether it can have a job
        self._serial = 0
        self._out = bytearray()
        self._in = bytearray()
        self._begun = 0.0  # on the wall clock; then the readings of both others
        self._seen = 0.0  # when the clock of CPU time was last read
        self._cpu_before = self._cpu = 0.0
        self._queued_before = self._queued = 0.0

    def send(self, job: bytes) -> None:
        """Send a job, as much of it as goes without waiting; `advance` sends the rest."""
        self.is_free = False
        self._cpu = self._cpu_before = _cpu_seconds(self.pid) or self._cpu
        self._queued = self._queued_before = _queued_seconds(self.pid) or self._queued
        self._begun = self._seen = time.monotonic()
        self._serial += 1
        self._out += HEADER.pack(self._serial, len(job)) + job
        self._write()

    @property
    def seconds(self) -> float:
        """CPU seconds that the job has used so far."""
        if (cpu := _cpu_seconds(self.pid)) is not None:
            self._cpu = cpu
            self._seen = time.monotonic()
        return self._cpu - self._cpu_before  # of a dead process: what was last seen

    def seconds_at_most(self) -> float:
        """CPU seconds that the job of a dead process can have used: all that passed since its clock was last read."""
        return self.seconds + time.monotonic() - self._seen

    @property
    def slept(self) -> float:
        """Seconds in which the job neither ran nor waited for a core."""
        off_core = time.monotonic() - self._begun - self.seconds
        if not _HAS_QUEUE_CLOCK:
            return off_core / _UNKNOWN_SLEEP
        self._queued = _queued_seconds(self.pid) or self._queued  # of a dead process: what was last seen
        return off_core - (self._queued - self._queued_before)

    def watched(self) -> tuple[int, int]:
        return self.sock.fileno(), select.POLLIN | (select.POLLOUT if self._out else 0)

    def is_quiet(self) -> bool:
        poll = select.poll()
        poll.register(*self.watched())
        return not poll.poll(0) and _cpu_seconds(self.pid) is not None

    def advance(self) -> Done | None:
        """Write and read what is possible without waiting; the result once it is there."""
        # Asked before reading, as what it wrote before it died counts; a process that it started may hold the socket.
        alive = _cpu_seconds(self.pid) is not None
        self._write()
        try:
            while (reply := self._reply()) is None:
                if not (piece := self.sock.recv(2**20)):
                    raise _LostError("its worker process died")
                self._in += piece
        except OSError as error:
            if alive and isinstance(error, BlockingIOError):
                return None
            raise _LostError("its worker process died") from error
        match reply:
            case {"memory": True}:
                raise _LostError("out of memory")
            case {"error": [str(kind), str(message), str(lines)]}:
                self.is_free = True
                return Done("error", None, f"{kind}: {message}", self.seconds, lines)
            case {"value": value}:
                self.is_free = not reply.get("last")
                return Done("done", value, "", self.seconds)
        raise _LostError("its worker process sent an invalid reply")

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # full; or it is gone, which reading shows
            while self._out:
                del self._out[: self.sock.send(memoryview(self._out)[: 2**20])]

    def _reply(self) -> dict[str, Any] | None:
        """The reply, empty if it cannot be read; None while it is incomplete."""
        if len(self._in) < HEADER.size:
            return None
        serial, size = HEADER.unpack_from(self._in)
        end = HEADER.size + size
        reply = None
        if serial == self._serial and size <= LONGEST_REPLY and len(self._in) <= end:
            if len(self._in) < end:
                return None
            with contextlib.suppress(ValueError, RecursionError):
                reply = json.loads(self._in[HEADER.size : end])
        self._in.clear()
        return reply if isinstance(reply, dict) else {}


_SCHEDULED = 2  # CPUCLOCK_SCHED of Linux: `clock_getcpuclockid(3)`, which Python lacks, makes such numbers


def _cpu_seconds(pid: int) -> float | None:
    """CPU seconds of all threads of a process since it began; None if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _SCHEDULED)
    except OSError:
        return None


def _queued_seconds(pid: int) -> float | None:
    """Seconds that a process's main thread waited for a core; None if the kernel does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


_HAS_QUEUE_CLOCK = _queued_seconds(os.getpid()) is not None


def _pickle_by_value(value: Any, what: str) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]
    except Exception as error:  # whatever an object's own pickling raises
        raise RewardError(f"{what} cannot be sent to worker processes: {type(error).__name__}: {error}") from error
