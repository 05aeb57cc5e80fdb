"""The parent's side of a `WorkerPool`: the sockets of the server and of its workers.

Nothing here waits for a worker. The server kills and collects the workers, its children, so that a pid never refers to
another process. A worker's time is the CPU time of its process, so it does not depend on what else the machine does.
Linux shows it to any process of the same user.
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import RewardError
from . import worker_server
from .worker_server import COMMAND, FORK, FORK_WARM, HEADER, LONGEST_REPLY, receive

_LOADING_LIMIT = 300.0  # seconds that the task's imports may take
_FORK_LIMIT = 60.0
_UNKNOWN_SLEEP = 10.0  # where the kernel does not say how long a process waited for a core, time off it counts a tenth


class LostError(Exception):
    """The process at the other end has died, or sent something invalid; the message says which."""


class Processes:
    """The server, which loads the task, and the workers that it forks; a fork of this process has others."""

    def __init__(self, name: str, task: Callable[[Any], Any], memory_mb: int | None) -> None:
        self._name, self._task, self._memory_mb, self._owner = name, task, memory_mb, os.getpid()
        self._server: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket  # to the server, while there is one
        self._is_loaded = self.is_warm = False  # warm: the server has done its chores
        self._all: set[Worker] = set()
        self._idle: list[Worker] = []

    def start(self) -> None:
        """Start the server if there is none, without waiting for it."""
        if self._server is not None:
            return
        try:
            data = pickle_by_value(self._task)
        except Exception as error:  # whatever an object's own pickling raises
            raise RewardError(
                f"{self._name}: {self._task!r:.80} cannot be sent to worker processes: {type(error).__name__}: {error}"
            ) from error
        try:
            os.fstat(2)
            output = 2
        except OSError:  # this process has no standard error
            output = subprocess.DEVNULL
        self._sock, theirs = socket.socketpair()
        self._is_loaded = self.is_warm = False
        # By file, because a large task does not fit into a pipe and the server does not read yet.
        with theirs, tempfile.TemporaryFile() as file:
            pickle.dump([str(folder) or str(Path.cwd()) for folder in sys.path], file)
            file.write(data)
            file.seek(0)
            try:
                self._server = subprocess.Popen(
                    [sys.executable, "-P", worker_server.__file__, str(theirs.fileno()), str(self._memory_mb or 0)],
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=file,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            except OSError as error:
                self._sock.close()
                raise RewardError(
                    f"{self._name}: the server of the worker processes cannot be started: {error}"
                ) from error

    def take(self, *, warm: bool = False) -> Worker:
        """An idle worker, or a fresh one; a `warm` one comes after the server's chores, which are done if need be."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_quiet() and not (warm and worker.is_cold):
                return worker
            self.drop(worker)  # it died, spoke without having been asked, or is cold
        why = ""
        for _ in range(3):
            self.start()
            try:
                worker = self._fork(FORK_WARM if warm else FORK)
            except LostError as lost:
                why = str(lost)
                self._end_server()
                continue
            except BaseException:  # the task cannot be loaded, or an interrupt left half a message unread
                self._end_server()
                raise
            self._all.add(worker)
            return worker
        raise RewardError(f"{self._name}: no worker process can be started; tried three times: {why}.")

    def _fork(self, command: int) -> Worker:
        if not self._is_loaded:
            reply, *_ = self._receive(_LOADING_LIMIT)
            if "error" in reply:
                kind, message, lines = reply["error"]
                raise RewardError(
                    f"{self._name}: the task cannot be loaded in the worker processes: {kind}: {message}\n{lines}"
                )
            self._is_loaded = True
        self._command(command)
        reply, pid, files = self._receive(_FORK_LIMIT)
        if "error" in reply:
            raise RewardError(f"{self._name}: no worker can be forked: {': '.join(reply['error'][:2])}")
        self.is_warm = not reply["cold"]
        return Worker(pid, files[0], reply["cold"])

    def _command(self, command: int) -> None:
        try:
            self._sock.sendall(COMMAND.pack(command))
        except OSError as error:
            raise LostError(f"the server of the worker processes has died ({error})") from error

    def _receive(self, limit: float) -> tuple[dict[str, Any], int, list[int]]:
        self._sock.settimeout(limit)
        try:
            data, files, *_ = socket.recv_fds(self._sock, HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
            serial, size = HEADER.unpack(data)
            return json.loads(receive(self._sock, size) or b""), serial, files
        except TimeoutError as error:
            raise LostError(f"the server of the worker processes did not answer within {limit:g} s") from error
        except (OSError, ValueError, struct.error) as error:
            raise LostError("the server of the worker processes has died") from error

    def give_back(self, worker: Worker) -> None:
        """Keep a worker that has answered for the next job."""
        self._idle.append(worker)

    def drop(self, worker: Worker) -> None:
        """Kill a worker; if the server is gone, its workers are too."""
        if worker in self._all and self._server is not None:
            with contextlib.suppress(LostError):
                self._command(worker.pid)
        worker.close()
        self._all.discard(worker)

    def drop_busy(self) -> None:
        """Kill the workers that are not idle."""
        for worker in self._all.difference(self._idle):
            self.drop(worker)

    def end(self) -> None:
        """Kill everything, and wait for the server, so that no zombie stays."""
        if self._owner != os.getpid():
            return
        self._idle.clear()
        self.drop_busy()
        self._end_server()

    def _end_server(self) -> None:
        """Close the socket, so that the server kills its workers and ends; kill it if it does not."""
        server, self._server = self._server, None
        if server is None:
            return
        self._sock.close()
        try:
            server.wait(1.0)
        except subprocess.TimeoutExpired:  # it is still importing
            server.kill()
            server.wait()

    def forget(self) -> None:
        """In a forked child: close our copies of what is the parent's, and leave its processes alone."""
        for worker in self._all:
            worker.close()
        if self._server is not None:
            self._sock.close()
            self._server.returncode = 0  # else `Popen` would warn that it still runs


class Worker:
    """One forked worker, with one job at a time and the clocks of that job."""

    def __init__(self, pid: int, descriptor: int, is_cold: bool) -> None:
        self.pid, self.is_cold = pid, is_cold  # cold: forked before the server's chores had filled the caches
        self._sock = socket.socket(fileno=descriptor)
        self._sock.setblocking(False)
        self._serial = 0
        self._out, self._in = bytearray(), bytearray()
        self._begun = self._seen = self._cpu_before = self._cpu = self._queued_before = self._queued = 0.0

    def send(self, job: bytes) -> None:
        """Send a job, as much of it as goes without waiting; `advance` sends the rest."""
        self._cpu = self._cpu_before = _cpu_seconds(self.pid) or self._cpu
        self._queued = self._queued_before = queued_seconds(self.pid) or self._queued
        self._begun = self._seen = time.monotonic()
        self._serial += 1
        self._out += HEADER.pack(self._serial, len(job)) + job
        self._write()

    @property
    def seconds(self) -> float:
        """CPU seconds that the job has used so far."""
        if (cpu := _cpu_seconds(self.pid)) is not None:
            self._cpu, self._seen = cpu, time.monotonic()
        return self._cpu - self._cpu_before  # of a dead process: what was last seen

    def seconds_at_most(self) -> float:
        """CPU seconds that the job of a dead process can have used: all that passed since its clock was last read."""
        return self.seconds + time.monotonic() - self._seen

    def idle_seconds(self) -> float:
        """Seconds in which the job neither ran nor waited for a core."""
        off_core = time.monotonic() - self._begun - self.seconds
        if not _HAS_QUEUE_CLOCK:
            return off_core / _UNKNOWN_SLEEP
        self._queued = queued_seconds(self.pid) or self._queued  # of a dead process: what was last seen
        return off_core - (self._queued - self._queued_before)

    def watched(self) -> tuple[int, int]:
        """The file descriptor and the events to wait for."""
        return self._sock.fileno(), select.POLLIN | (select.POLLOUT if self._out else 0)

    def is_quiet(self) -> bool:
        """Whether it is alive and has sent nothing."""
        poll = select.poll()
        poll.register(*self.watched())
        return not poll.poll(0) and self.is_alive()

    def is_alive(self) -> bool:
        """False once the server has collected it, also where a process that it started still holds the socket open."""
        return _cpu_seconds(self.pid) is not None

    def advance(self) -> dict[str, Any] | None:
        """Write and read what is possible without waiting; the reply once it is complete."""
        alive = self.is_alive()  # asked before reading: what it wrote before it died counts
        self._write()
        try:
            while (reply := self._reply()) is None:
                if not (piece := self._sock.recv(2**20)):
                    raise LostError("its worker process died")
                self._in += piece
            return reply
        except BlockingIOError:
            if alive:
                return None
            raise LostError("its worker process died") from None
        except OSError as error:
            raise LostError("its worker process died") from error

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # full; or it is gone, which reading shows
            while self._out:
                del self._out[: self._sock.send(memoryview(self._out)[: 2**20])]

    def _reply(self) -> dict[str, Any] | None:
        if len(self._in) < HEADER.size:
            return None
        serial, size = HEADER.unpack_from(self._in)
        end = HEADER.size + size
        if serial != self._serial or size > LONGEST_REPLY or len(self._in) > end:
            raise LostError("its worker process sent an invalid reply")
        if len(self._in) < end:
            return None
        try:
            reply = json.loads(self._in[HEADER.size : end])
        except (ValueError, RecursionError):
            reply = None
        self._in.clear()
        if not _is_reply(reply):
            raise LostError("its worker process sent an invalid reply")
        return reply  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def _cpu_seconds(pid: int) -> float | None:
    """CPU seconds of all threads of a process since it began; None if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _SCHEDULED)
    except OSError:
        return None


_SCHEDULED = 2  # CPUCLOCK_SCHED of Linux: `clock_getcpuclockid(3)`, which Python lacks, makes such numbers


def queued_seconds(pid: int) -> float | None:
    """Seconds that a process's main thread waited for a core; None if the kernel does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


_HAS_QUEUE_CLOCK = queued_seconds(os.getpid()) is not None


def pickle_by_value(value: Any) -> bytes:
    """Pickle, including functions and classes that cannot be imported elsewhere."""
    import cloudpickle

    data: bytes = cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return data


def _is_reply(reply: Any) -> bool:
    if not isinstance(reply, dict):
        return False
    if "error" in reply:
        error = reply["error"]
        return isinstance(error, list) and len(error) == 3 and all(isinstance(part, str) for part in error)
    return "value" in reply or reply.get("memory") is True
