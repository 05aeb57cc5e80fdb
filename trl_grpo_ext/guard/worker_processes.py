"""The parent's side of a `WorkerPool`: sockets and pidfds of the server and its workers.

Nothing here waits for a worker. A worker is killed by its pidfd, which never refers to another process that reuses the
pid. Without pidfds the server does it: its children keep their pids until it collects them.

A worker's time is the CPU time of its process, so it does not depend on what else the machine does. Linux shows it to
any process of the same user; on other systems it is the wall clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import RewardError
from .worker_server import COMMAND, FORK, HEADER, KILL, LOAD, LONGEST_REPLY, ORIGINAL_PATH

_LOADING_LIMIT = 300.0  # seconds that the task's imports may take
_FORK_LIMIT = 60.0
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_UNKNOWN_SLEEP = 10.0  # where the kernel does not say how long a process waited for a core, time off it counts a tenth
_DIED = "its worker process died"
_NO_REPLY = "its worker process sent an invalid reply"


class LostError(Exception):
    """The process at the other end has died, or sent something invalid; the message says which."""


class Processes:
    """The server and its workers. They belong to the process that made this object, not to its forks."""

    def __init__(self, name: str) -> None:
        self._name, self._owner = name, os.getpid()
        self._server: Server | None = None
        self._all: set[Worker] = set()
        self._idle: list[Worker] = []

    def start(self, task: Callable[[Any], Any], memory_mb: int | None) -> Server:
        """Start the server if there is none, without waiting for it."""
        if self._server is None:
            self._server = Server(self._name, task, memory_mb)
        return self._server

    def take(self, task: Callable[[Any], Any], memory_mb: int | None) -> Worker:
        """An idle worker, or a fresh one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_quiet():
                return worker
            self.drop(worker)  # it died, or spoke without having been asked
        why = ""
        for _ in range(3):
            server = self.start(task, memory_mb)
            try:
                worker = server.fork()
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

    def give_back(self, worker: Worker, most: int) -> None:
        """Keep a worker that has answered for the next job, unless `most` are already idle."""
        self._idle.append(worker) if len(self._idle) < most else self.drop(worker)

    def drop(self, worker: Worker) -> None:
        """Kill a worker."""
        if not worker.kill() and self._server is not None:
            self._server.kill(worker.pid)
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
        for worker in [*self._all]:
            self.drop(worker)
        self._end_server()

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.end()

    def forget(self) -> None:
        """In a forked child: close our copies of what is the parent's, and leave its processes alone."""
        for worker in self._all:
            worker.close()
        if self._server is not None:
            self._server.forget()


class Server:
    """The process that loads the task and forks workers."""

    def __init__(self, name: str, task: Callable[[Any], Any], memory_mb: int | None) -> None:
        self._name, self._ready = name, False
        try:
            os.fstat(2)
            output = 2
        except OSError:  # this process has no standard error
            output = subprocess.DEVNULL
        try:
            data = pickle_by_value(task)
        except Exception as error:  # whatever an object's own pickling raises
            raise RewardError(
                f"{name}: {task!r:.80} cannot be sent to worker processes: {type(error).__name__}: {error}"
            ) from error
        self._sock, theirs = socket.socketpair()
        with theirs, _anonymous_file() as file:
            file.write(data)
            file.flush()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", f"{__package__}.worker_server", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_environment(),
                )
            except OSError as error:
                self._sock.close()
                raise RewardError(f"{name}: the server of the worker processes cannot be started: {error}") from error
            # By file, because a large task does not fit into the socket and the server does not read yet.
            with contextlib.suppress(OSError):  # it is gone already; the first fork will show it
                socket.send_fds(self._sock, [COMMAND.pack(LOAD, memory_mb or 0)], [file.fileno()])

    def fork(self) -> Worker:
        """Make one more worker."""
        if not self._ready:
            reply, *_ = self._receive(_LOADING_LIMIT)
            if "error" in reply:
                kind, message, lines = reply["error"]
                raise RewardError(
                    f"{self._name}: the task cannot be loaded in the worker processes: {kind}: {message}\n{lines}"
                )
            self._ready = True
        try:
            self._sock.sendall(COMMAND.pack(FORK, 0))
        except OSError as error:
            raise LostError(f"the server of the worker processes has died ({error})") from error
        reply, pid, files = self._receive(_FORK_LIMIT)
        if "error" in reply:
            raise RewardError(f"{self._name}: no worker can be forked: {': '.join(reply['error'][:2])}")
        return Worker(pid, files)

    def kill(self, pid: int) -> None:
        """Have the server kill a worker for which there is no pidfd."""
        with contextlib.suppress(OSError):
            self._sock.sendall(COMMAND.pack(KILL, pid))

    def _receive(self, limit: float) -> tuple[dict[str, Any], int, list[int]]:
        self._sock.settimeout(limit)
        try:
            data, files, *_ = socket.recv_fds(self._sock, HEADER.size, 2, _CLOSE_ON_EXEC)
            serial, size = HEADER.unpack(data)
            text = b""
            while len(text) < size and (piece := self._sock.recv(size - len(text))):
                text += piece
            return json.loads(text), serial, files
        except TimeoutError as error:
            raise LostError(f"the server of the worker processes did not answer within {limit:g} s") from error
        except (OSError, ValueError, struct.error) as error:
            raise LostError("the server of the worker processes has died") from error

    def end(self) -> None:
        """Close the socket, so that the server kills its workers and ends; kill it if it does not."""
        self._sock.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:  # it is still importing
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """In a forked child: close our copy of the socket; the server is no child of this process."""
        self._sock.close()
        self._process.returncode = 0  # else `Popen` would warn that it still runs


class Worker:
    """One forked worker."""

    def __init__(self, pid: int, files: Sequence[int]) -> None:
        self.pid = pid
        self._sock = socket.socket(fileno=files[0])
        self._sock.setblocking(False)
        self._pidfd = files[1] if len(files) > 1 else None
        self._serial = 0
        self._out = memoryview(b"")
        self._in = bytearray()
        self._closed = False
        self._begun = self._cpu_before = self._cpu = self._queued_before = self._queued = 0.0

    def begin(self, job: bytes) -> None:
        """Send a job, as much of it as goes without waiting; `advance` sends the rest."""
        self._serial += 1
        self._cpu = self._cpu_before = _cpu_seconds(self.pid) or 0.0
        self._queued = self._queued_before = queued_seconds(self.pid) or 0.0
        self._begun = time.monotonic()
        self._out = memoryview(HEADER.pack(self._serial, len(job)) + job)
        self._in.clear()
        self._write()

    @property
    def seconds(self) -> float:
        """CPU seconds that the job has used so far; other than on Linux, wall-clock seconds."""
        if not _HAS_CPU_CLOCK:
            return time.monotonic() - self._begun
        self._cpu = _cpu_seconds(self.pid) or self._cpu  # of a dead process: what was last seen
        return self._cpu - self._cpu_before

    def idle_seconds(self) -> float:
        """Seconds in which the job neither ran nor waited for a core."""
        off_core = time.monotonic() - self._begun - self.seconds
        if not _HAS_QUEUE_CLOCK:
            return off_core / _UNKNOWN_SLEEP
        self._queued = queued_seconds(self.pid) or self._queued  # of a dead process: what was last seen
        return off_core - (self._queued - self._queued_before)

    def watched(self) -> list[tuple[int, int]]:
        """File descriptors and the events to wait for."""
        watched = [(self._sock.fileno(), select.POLLIN | (select.POLLOUT if self._out else 0))]
        if self._pidfd is not None:  # a process that the task has started may hold the socket open
            watched.append((self._pidfd, select.POLLIN))
        return watched

    def is_quiet(self) -> bool:
        """Whether it is alive and has sent nothing."""
        return not _readable(*(descriptor for descriptor, _ in self.watched()))

    def advance(self) -> dict[str, Any] | None:
        """Write and read what is possible without waiting; return the reply once it is complete."""
        alive = self._is_alive()  # asked before reading: what it wrote before it died counts
        self._write()
        try:
            while piece := self._sock.recv(2**20):
                self._in += piece
                if (reply := self._reply()) is not None:
                    return reply
        except BlockingIOError:
            if alive:
                return None
        except OSError as error:
            raise LostError(f"{_DIED} ({error})") from error
        raise LostError(_DIED)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # full; or it is gone, which reading shows
            while self._out:
                self._out = self._out[self._sock.send(self._out[: 2**20]) :]

    def _reply(self) -> dict[str, Any] | None:
        if len(self._in) < HEADER.size:
            return None
        serial, size = HEADER.unpack_from(self._in)
        if serial != self._serial or size > LONGEST_REPLY or len(self._in) > HEADER.size + size:
            raise LostError(_NO_REPLY)
        if len(self._in) < HEADER.size + size:
            return None
        try:
            reply = json.loads(self._in[HEADER.size :])
        except (ValueError, RecursionError) as error:
            raise LostError(_NO_REPLY) from error
        if not _is_reply(reply):
            raise LostError(_NO_REPLY)
        self._in.clear()
        return reply  # type: ignore[no-any-return]

    def _is_alive(self) -> bool:
        return self._pidfd is None or not _readable(self._pidfd)  # without a pidfd only the socket shows it

    def kill(self) -> bool:
        """Kill the process; False if only the server can, because there is no pidfd."""
        if self._closed:
            return True
        if self._pidfd is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return True

    def close(self) -> None:
        """Close the socket and the pidfd."""
        if not self._closed:
            self._closed = True
            self._sock.close()
            if self._pidfd is not None:
                os.close(self._pidfd)


def _readable(*descriptors: int) -> bool:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _cpu_seconds(pid: int) -> float | None:
    """CPU seconds of all threads of a process since it began; None if it is gone, or not on Linux."""
    try:
        return time.clock_gettime((~pid << 3) | _SCHEDULED)
    except OSError:
        return None


_SCHEDULED = 2  # CPUCLOCK_SCHED of Linux: `clock_getcpuclockid(3)`, which Python lacks, makes such numbers
_HAS_CPU_CLOCK = sys.platform.startswith("linux") and _cpu_seconds(os.getpid()) is not None


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


def _anonymous_file() -> Any:
    in_memory = hasattr(os, "memfd_create")
    return os.fdopen(os.memfd_create("task"), "w+b") if in_memory else tempfile.TemporaryFile()


def _environment() -> dict[str, str]:
    folders = [str(folder) or str(Path.cwd()) for folder in sys.path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        ORIGINAL_PATH: os.environ.get("PYTHONPATH", ""),
        "OMP_NUM_THREADS": "1",
    }
