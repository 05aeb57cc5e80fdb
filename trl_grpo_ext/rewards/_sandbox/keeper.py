"""The server, started by `jobs`, that forks the processes that run and judge code, and watches over them.

For each job it forks a keeper, which forks the solution's process (`hostile`) and, for a module, the tests' process
(`tests_process`), counts their processor time, storage and threads, ends them, and answers the parent.
"""

# What runs between forks is as plain as can be, and pathlib gives nothing here.
# ruff: noqa: PTH101, PTH104, PTH106, PTH108, PTH118, PTH123, PTH208, SIM115, SIM905
import atexit
import base64
import contextlib
import gc
import importlib
import json
import mmap
import os
import secrets
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from . import hostile, layers, tests_process

MAX_OUTPUT = 4 * 2**20  # bytes that a program may print, and bytes that a process may report
MAX_FILES = 1000
MAX_STORED = 64 * 2**20
MAX_THREADS = 256
_TICK = 0.02
_WARM = (
    "array asyncio bisect binascii calendar cmath collections concurrent.futures configparser contextlib copy csv "
    "ctypes dataclasses datetime "
    "decimal difflib enum fractions functools glob hashlib heapq io itertools json logging math numbers operator "
    "pathlib pprint queue random re secrets shutil statistics string struct tempfile textwrap threading time "
    "traceback typing unittest unittest.mock uuid weakref zipfile pytest"
).split()


def serve(descriptor: int, libraries: list[str]) -> None:
    """Fork a keeper for each connection that comes, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes its connections
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers report for themselves
    control = socket.socket(fileno=descriptor)
    control.settimeout(1.0)
    parent = os.getppid()

    def warm(*names: str) -> None:
        sys.path += libraries
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        del sys.path[len(sys.path) - len(libraries) :]
        gc.freeze()

    warm(*_WARM)
    while True:
        try:
            data, files, _, _ = socket.recv_fds(control, 1, 1)
        except TimeoutError:
            if os.getppid() != parent:  # a copy of the parent may still have its end of the connection
                return
            continue
        if not data:
            return
        if data == b"n" and "numpy" not in sys.modules:
            warm("numpy.testing")
        for file in files:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                gc.disable()
                _keep(Connection(file))
            os.close(file)


def _keep(connection: Connection) -> NoReturn:
    try:
        keeper = _Keeper(json.loads(connection.recv_bytes()), connection)
        try:
            answer = keeper.run()
        finally:
            keeper.end()
        connection.send_bytes(json.dumps(answer).encode("ascii"))
    finally:  # nobody waits for an answer any more where it could not be given
        os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(BaseException):  # the code's own stream: this process has to end
            stream.flush()  # type: ignore[union-attr]


def _proc(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


class _Process:
    def __init__(self, body: Callable[[], None]) -> None:
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                if os.getppid() == parent:
                    body()
                    status = 0
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else int(error.code is not None)
            finally:
                _flush()
                os._exit(status & 0xFF)
        self.ended = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        self.status: int | None = None

    def seconds(self) -> float:
        with contextlib.suppress(OSError):
            return time.clock_gettime((~self.pid << 3) | 2)
        return 0.0

    def threads(self) -> list[str]:
        with contextlib.suppress(OSError):
            return os.listdir(f"/proc/{self.pid}/task")
        return []

    def runs(self) -> bool:
        stats = (_proc(self.pid, f"task/{thread}/stat") for thread in self.threads())
        return any(stat.rpartition(b")")[2].split()[:1] == [b"R"] for stat in stats)

    def written(self) -> int | None:
        """Bytes that it has written so far, anywhere, including deleted files."""
        counts = (line.split() for line in _proc(self.pid, "io").splitlines() if line.startswith(b"wchar:"))
        return next((int(count) for _, count in counts), None)

    def poll(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def end(self) -> None:
        if not self.poll():
            for kill in (os.killpg, os.kill):  # its whole session, should "processes" not hold
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class _Keeper:
    def __init__(self, job: dict[str, Any], connection: Connection) -> None:
        self.job = job
        self.connection = connection
        # Of the tests: 0, an answer is awaited; 1, one has come; 2, an argument has been changed; 8 to 16, bytes read.
        self.shared = mmap.mmap(-1, 16)
        self.reported = bytearray()
        self.printed = bytearray()
        self.judged = bytearray()
        self.watched: dict[int, bytearray] = {connection.fileno(): bytearray()}
        self.home = tempfile.mkdtemp(prefix="python-tests-", dir=job["folder"])
        self.processes: list[_Process] = []

    def end(self) -> None:
        for process in self.processes:
            process.end()
        _remove(self.home)

    def run(self) -> dict[str, Any]:
        job = self.job
        (asks, asked), (answers, answered), (prints, printed), (reports, reported) = (os.pipe() for _ in range(4))
        stdin = tempfile.TemporaryFile(dir=self.home)  # where its path may be opened, too
        stdin.write(base64.b64decode(job["stdin"]))
        stdin.seek(0)

        def isolate(memory_mb: int, seconds: float, counted: bool) -> list[str]:
            return layers.isolate([self.home], memory_mb, seconds, os.getppid(), job["libraries"], counted)

        def solution() -> None:
            self.shared.close()
            standard = {} if job["module"] else {0: stdin.fileno(), 1: printed}
            requests, replies, out = self._keep_only(standard, (asks, answered, reported))
            held = isolate(job["memory_mb"], 2 * job["seconds"] + 5, True)
            os.write(out, json.dumps({"layers": held}).encode("ascii") + b"\n")
            if not set(job["require"]) <= set(held):
                return
            sys.path += job["libraries"]
            hostile.limit_stacks(job["memory_mb"] * 2**19)
            if job["module"]:
                os.close(out)
                hostile.hold(requests, replies)
                os._exit(0)
            os.closerange(requests, out)
            sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape")  # type: ignore[misc]
            sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="surrogateescape")  # type: ignore[misc]
            atexit._clear()
            try:
                hostile.run_program(job["code"], _reporting(out))
            finally:  # a program ends as Python does
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
                _flush()
                vars(sys.modules.get("__main__", layers)).clear()  # files that are not closed are flushed, too

        first = _Process(solution)
        second = None
        self.processes.append(first)
        self.watched |= {reports: self.reported, prints: self.printed}
        token = secrets.token_hex(16).encode("ascii")  # the solution's process has never had it, nor what follows
        if job["module"]:
            plan = json.loads(self.connection.recv_bytes())
            verdicts, judged = os.pipe()

            def tests() -> None:
                requests, replies, out = self._keep_only({}, (asked, answers, judged))
                isolate(job["memory_mb"] + 1024, 4 * job["seconds"] + 10, False)
                sys.path += job["libraries"]
                said = {**plan, "code": job["code"]}
                tests_process.judge(said, requests, replies, self.shared, _reporting(out, token))

            second = _Process(tests)
            self.processes.append(second)
            os.close(judged)
            self.watched[verdicts] = self.judged
        for descriptor in (asks, asked, answers, answered, printed, reported):
            os.close(descriptor)
        return self._watch_over(first, second, token)

    def _keep_only(self, standard: dict[int, int], keep: tuple[int, ...]) -> list[int]:
        """In a forked process: keep these descriptors, as 3 and up, and nothing else of the keeper."""
        high = [os.dup2(descriptor, 900 + number) for number, descriptor in enumerate(keep)]
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(standard.get(number, nothing), number)
        os.closerange(3, 900)
        moved = [os.dup2(descriptor, 3 + number, inheritable=False) for number, descriptor in enumerate(high)]
        os.closerange(3 + len(moved), 1 << 16)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.enable()
        os.chdir(self.home)
        os.environ.clear()
        os.environ.update(PATH="", LANG="C.UTF-8", PYTHONHASHSEED="0", HOME=self.home, TMPDIR=self.home)
        tempfile.tempdir = None
        return moved

    def _watch_over(self, first: _Process, second: _Process | None, token: bytes) -> dict[str, Any]:
        seconds = self.job["seconds"]
        ended = "exited"
        checked = last = time.monotonic()
        idle = [0.0, 0.0]  # of the tests, of the solution
        before = [process.seconds() for process in self.processes]
        deciding = second or first
        while ended == "exited":
            over = deciding.poll()
            busy = self._read(0 if over else _TICK, -1 if over else deciding.ended)
            if max(len(self.printed), len(self.reported)) > MAX_OUTPUT:
                ended = "output"
            elif over:
                if not busy:
                    break
                continue
            now = time.monotonic()
            if now - checked < _TICK / 2:
                continue
            checked = now
            clocks = [process.seconds() for process in self.processes]
            if not any(process.runs() for process in self.processes):
                idle[second is None or self.shared[0]] += max(0.0, now - last - sum(clocks) + sum(before))
            last = now
            before = clocks
            if clocks[0] + idle[1] / 2 > seconds:
                ended = "timeout"
            elif second is not None and clocks[1] + idle[0] / 2 > 2 * seconds + 1:
                ended = "timeout" if self.shared[0] or self.shared[1] else "tests"
            elif self._stores_too_much(first):
                ended = "storage"
            elif len(first.threads()) > MAX_THREADS:
                ended = "threads"
        spent = first.seconds() + idle[1] / 2
        if second is not None and ended == "exited" and b'"gone"' in self.judged:
            for _ in range(50):  # it has closed the conversation: how does it end?
                if first.poll():
                    break
                time.sleep(_TICK)
        first_ended = first.poll()
        known = first.written() is not None or first_ended
        first.end()
        status = first.status if first_ended or ended != "exited" else 0
        if first.status == -signal.SIGXCPU:
            ended = "timeout"
        held, *lines = bytes(self.reported[: 2 * MAX_OUTPUT]).split(b"\n")
        if second is not None:
            lines = [line[len(token) :] for line in bytes(self.judged).split(b"\n") if line.startswith(token)]
        [said] = _messages([held]) or [{}]
        return {
            "ended": ended,
            "status": status,
            "output": base64.b64encode(bytes(self.printed)).decode("ascii"),
            "layers": [layer for layer in said.get("layers", []) if layer != "files" or known],
            "messages": _messages(lines),
            "seconds": spent,
            "judge": None if second is None else second.status,
            "answered": bool(self.shared[1]),
            "changed": bool(self.shared[2]),
        }

    def _read(self, seconds: float, ended: int) -> bool:
        """Wait for what the processes write, or until one has ended; whether there was anything."""
        poller = select.poll()
        for descriptor in (*self.watched, *([ended] if ended >= 0 else [])):
            poller.register(descriptor, select.POLLIN)
        busy = False
        for descriptor, _ in poller.poll(seconds * 1000):
            if descriptor == self.connection.fileno():
                raise EOFError  # nobody waits for this any more
            if descriptor in self.watched:
                data = os.read(descriptor, 1 << 16)
                self.watched[descriptor] += data
                busy = True
                if not data:
                    del self.watched[descriptor]
        return busy

    def _stores_too_much(self, process: _Process) -> bool:
        written = process.written()
        if written is not None:
            (received,) = struct.unpack_from("=Q", self.shared, 8)
            if written - received - len(self.printed) - len(self.reported) > MAX_STORED + 2**20:
                return True
        # A file of the folder that is mapped takes space without a name or a write.
        mapped = self.home.encode() + b"/" in _proc(process.pid, "maps")
        return mapped or _folder_too_large(self.home)


def _messages(lines: list[bytes]) -> list[dict[str, Any]]:
    messages: list[Any] = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            messages.append(json.loads(line))
    return [message for message in messages if isinstance(message, dict)]


def _reporting(descriptor: int, token: bytes = b"") -> Callable[[dict[str, Any]], None]:
    def report(message: dict[str, Any]) -> None:
        data = token + json.dumps(message).encode("ascii") + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]

    return report


def _folder_too_large(home: str) -> bool:
    stored = 0
    count = 0
    folders = [home]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        stored += max(status.st_size, 512 * status.st_blocks)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if count >= MAX_FILES or stored > MAX_STORED:
                        return True
        except FileNotFoundError:
            continue
        except OSError:  # a path of more than 4,096 characters
            return True
    return False


def _remove(home: str) -> None:
    """Remove a folder of any depth, by moving what is two levels down up before removing it."""
    moved = 0
    while entries := list(os.scandir(home)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)
                moved += 1
                os.rename(inner.path, os.path.join(home, f"{moved}-{secrets.token_hex(4)}"))
            os.rmdir(entry.path)
    os.rmdir(home)
