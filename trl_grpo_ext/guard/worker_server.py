"""The process that forks workers: `python worker_server.py FD MEMORY`, started by `guard.workers`.

It loads the task once and never imports the parent's `__main__`. When its parent closes the socket or is gone, it kills
its workers with everything that they started, and ends. Workers send JSON back, which makes the parent run no code.
"""

import contextlib
import ctypes
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

HEADER = struct.Struct("!QQ")  # before each job and reply: a serial number, which the reply repeats, and the length
COMMAND = struct.Struct("!Q")  # what the parent sends to the server: `FORK`, or the pid of a worker to kill
FORK = 0
LONGEST_REPLY = 16 * 2**20
_SET_PDEATHSIG = 1  # of Linux' prctl
_SET_CHILD_SUBREAPER = 36
_COLLECTING_LIMIT = 0.5
_OUT_OF_MEMORY = b'{"memory": true, "last": true}'  # made now: later there is no memory for it


def send(sock: socket.socket, serial: int, message: bytes, *files: int) -> None:
    """Send one message with its header, and open files along with it."""
    data = HEADER.pack(serial, len(message)) + message
    sent = socket.send_fds(sock, [data], files) if files else 0
    sock.sendall(data[sent:])


def receive(sock: socket.socket, size: int) -> bytes | None:
    """Read exactly this many bytes; None if the other side closes first."""
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 2**20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def main(descriptor: int, memory: int) -> None:
    """Load the task and fork workers until the parent closes the socket or is gone."""
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # else a killed worker's lines are lost
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    try:
        with open(0, "rb", closefd=False) as file:
            sys.path[:] = pickle.load(file)
            task = pickle.load(file)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        for chore in getattr(task, "chores", ()):  # they fill caches
            chore()
    except BaseException as error:
        send(control, 0, json.dumps({"error": _describe(error)}).encode())
        return
    gc.collect()
    gc.freeze()
    with contextlib.suppress(BrokenPipeError):  # the parent ended meanwhile, which `serve` sees too
        send(control, 0, b"{}")
    _Server(control, task, memory, parent).serve()


class _Server:
    def __init__(self, control: socket.socket, task: Callable[[Any], Any], memory: int, parent: int) -> None:
        self._control = control
        self._task = task
        self._memory = memory
        self._parent = parent
        self._workers: set[int] = set()
        self._wake, self._woken_by = socket.socketpair()
        self._wake.setblocking(False)
        self._woken_by.setblocking(False)
        self._prctl = ctypes.CDLL(None).prctl
        self._prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what workers leave running is collected here, not by process 1

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken_by.fileno(), warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while os.getppid() == self._parent:
                ready = dict(poll.poll(1000))
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._reap()
                if self._control.fileno() in ready:
                    data = receive(self._control, COMMAND.size)
                    if data is None:
                        return
                    (command,) = COMMAND.unpack(data)
                    if command == FORK:
                        self._fork()
                    elif command in self._workers:  # not reaped yet, so the number is still this worker's
                        os.kill(command, signal.SIGKILL)
        except ConnectionError:  # the parent is gone
            return
        finally:
            for pid in self._workers:
                _kill_group(pid)
            end = time.monotonic() + _COLLECTING_LIMIT
            while self._reap() and time.monotonic() < end:
                time.sleep(0.001)

    def _reap(self) -> bool:
        """Collect the dead, after killing what they started (their group's number is free then); are there others?"""
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            if dead is None:
                return True
            if dead.si_pid in self._workers:
                _kill_group(dead.si_pid)
                self._workers.discard(dead.si_pid)
            os.waitpid(dead.si_pid, 0)

    def _fork(self) -> None:
        theirs, ours = socket.socketpair()
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            send(self._control, 0, json.dumps({"error": _describe(error)}).encode())
            return
        finally:
            if os.getpid() == server:
                ours.close()
        if pid == 0:
            theirs.close()
            self._work(ours, server)
        self._workers.add(pid)
        with contextlib.suppress(OSError):  # the worker does so too: whoever comes first
            os.setpgid(pid, pid)
        with theirs, contextlib.suppress(BrokenPipeError):  # the parent has ended, which the next read will show
            send(self._control, pid, b"{}", theirs.fileno())

    def _work(self, sock: socket.socket, server: int) -> NoReturn:
        """Be a worker. Never returns into the server's code."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for owned in (self._control, self._wake, self._woken_by):
                owned.close()
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            self._prctl(_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != server:
                os._exit(0)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _answer_jobs(sock, self._task, self._memory * 2**20)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def _answer_jobs(sock: socket.socket, task: Callable[[Any], Any], memory: int) -> None:
    own = os.getpid()
    before = _address_space()
    if memory:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = before + memory if hard == resource.RLIM_INFINITY else min(before + memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while (header := receive(sock, HEADER.size)) is not None:
        serial, size = HEADER.unpack(header)
        is_last = False
        try:
            job = receive(sock, size)
            if job is None:
                return
            value = task(pickle.loads(job))
            is_last = bool(memory) and _address_space() - before > memory // 2  # would be the next job's trouble
            reply = json.dumps({"value": value, "last": is_last}).encode()
            if len(reply) > LONGEST_REPLY:
                raise OverflowError(f"the reply has {len(reply)} bytes; at most {LONGEST_REPLY} can be sent")
        except MemoryError:
            is_last = True
            reply = _OUT_OF_MEMORY
        except BaseException as error:  # SystemExit too: what a task raises is its answer, and no end of the worker
            reply = json.dumps({"error": _describe(error)}).encode()
        if os.getpid() != own:  # the task forked, and this is the copy
            return
        send(sock, serial, reply)
        if is_last:
            return


def _describe(error: BaseException) -> tuple[str, str, str]:
    message = "(its message cannot be read)"
    with contextlib.suppress(Exception):
        message = str(error)[:2000]
    return type(error).__name__, message, "".join(traceback.format_exception(error))[-4000:]


def _address_space() -> int:
    """This process's virtual memory in bytes; 0 if a task has given up the right to read it."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
