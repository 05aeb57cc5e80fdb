"""Run Python that a model wrote, in processes with limits.

A server (`keeper`) forks a job's processes: one that holds the code (`hostile`), one that runs the tests
(`tests_process`), and a keeper that watches over both. Before any code runs, each gives up rights in `layers`; "files"
does not hold where what is written cannot be counted (/proc/PID/io). Limited are also what it writes, files,
descriptors, threads, output, and time: its own processor time, and half of the time in which nothing of the job runs or
waits for a core. This is no boundary against an exploit of the kernel.
"""

import base64
import functools
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

from ...errors import RewardError

LAYERS = ("files", "network", "processes", "memory")  # the layers that a machine may support

# `_sandbox` as a package of its own: what is forked has nothing of this package in it.
_SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
from _sandbox.keeper import serve
sys.path.pop(0)
serve(int(sys.argv[2]), sys.argv[3:])
"""
_TICK = 0.05
_ENVIRONMENT = {"PATH": "", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_ENVIRONMENT |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

T = TypeVar("T")


@dataclass
class Run:
    ended: str = "exited"  # or it had too much: "timeout", "output", "storage", "threads"; "tests": these took the time
    status: int = 0  # exit status of the code's process, negative for a signal
    output: bytes = b""  # what a program printed
    layers: tuple[str, ...] = ()  # that held before it ran the code
    messages: list[dict[str, Any]] = field(default_factory=list)  # of the tests' process, or of a program
    seconds: float = 0.0  # processor time of the code, plus half the time that it slept
    judge: int | None = None  # exit status of the tests' process
    answered: bool = False  # whether the tests have had an answer of the code
    changed: bool = False  # whether the code has changed an argument


@functools.lru_cache(maxsize=8)
def isolation(memory_mb: int = 512) -> tuple[str, ...]:
    """The layers that hold on this machine, as tried by a process; cached."""
    return run_python("", seconds=5.0, memory_mb=memory_mb).layers


def run_all(tasks: Sequence[Callable[[threading.Event], T]], workers: int) -> list[T]:
    """Run tasks, so many at a time, and return their results in order; each takes an event that is set to stop it."""
    stop = threading.Event()
    pool = ThreadPoolExecutor(max(1, min(workers, len(tasks))), thread_name_prefix="python-tests")
    try:
        return [future.result() for future in [pool.submit(task, stop) for task in tasks]]
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def run_python(
    code: str,
    plan: dict[str, Any] | None = None,
    *,
    seconds: float,
    memory_mb: int,
    require: Sequence[str] = (),
    stdin: bytes = b"",
    stop: threading.Event | None = None,
) -> Run:
    """Run code as a program, or hold it in one process and run tests (`forms_of_tests.Plan`) of it in another.

    `seconds` is processor time, and `stop` ends the run as a timeout. A `RewardError` says that the processes do not
    start, or a required layer does not hold; the code is not run then.
    """
    paths = sysconfig.get_paths()
    libraries = [path for path in dict.fromkeys((paths["purelib"], paths["platlib"])) if Path(path).is_dir()]
    folder = str(Path(tempfile.gettempdir()).resolve())
    job = {"code": code, "stdin": base64.b64encode(stdin).decode("ascii"), "module": plan is not None, "folder": folder}
    job |= {"seconds": seconds, "memory_mb": memory_mb, "require": list(require), "libraries": libraries}
    wanted = b"n" if "numpy" in f"{code} {json.dumps(plan)}" else b"-"
    with _SERVER.connect(libraries, wanted) as connection:
        deadline = time.monotonic() + 300.0 + 100.0 * seconds  # on the wall, of a machine that may be very busy
        answer = None
        with suppress(EOFError, OSError):  # the keeper may die
            for part in [job] if plan is None else [job, plan]:
                connection.send_bytes(json.dumps(part).encode("ascii"))
            while answer is None and time.monotonic() < deadline and not (stop is not None and stop.is_set()):
                if connection.poll(_TICK):
                    answer = json.loads(connection.recv_bytes())
    if answer is None:
        if stop is not None and stop.is_set():
            return Run(ended="timeout")
        raise RewardError(f"The processes that run Python code did not start ({sys.executable}): out of memory?")
    held = tuple(layer for layer in LAYERS if layer in answer["layers"])
    run = Run(**{**answer, "output": base64.b64decode(answer["output"]), "layers": held})
    missing = [layer for layer in require if layer not in run.layers]
    if missing:
        raise RewardError(f"The process that runs Python code could not give up {', '.join(missing)} on this machine.")
    return run


class _Server:
    """The server process: started with the first job, ended with this process. A forked copy starts its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None

    def connect(self, libraries: Sequence[str], wanted: bytes) -> Connection:
        with self.lock:
            for _ in range(2):
                if self.process is None or self.process.poll() is not None or self.control is None:
                    self._start(libraries)
                ours, theirs = Pipe()
                with theirs:
                    try:
                        socket.send_fds(self.control, [wanted], [theirs.fileno()])  # type: ignore[arg-type]
                        return ours
                    except OSError:  # it has died
                        ours.close()
                        self.close()
        raise RewardError(f"The server that runs Python code ({sys.executable}) ends at once.")

    def _start(self, libraries: Sequence[str]) -> None:
        self.close()
        self.control, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _SERVE, str(Path(__file__).parents[1])]
        settings: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        settings |= {"cwd": "/", "env": _ENVIRONMENT, "pass_fds": [theirs.fileno()], "start_new_session": True}
        with theirs:
            try:
                self.process = subprocess.Popen([*command, str(theirs.fileno()), *libraries], **settings)
            except OSError as error:
                self.close()
                raise RewardError(f"The server that runs Python code could not be started: {error}") from error

    def close(self) -> None:
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()
        self.process = None
        self.control = None

    def forget(self) -> None:
        if self.control is not None:
            self.control.close()
        self.__init__()  # type: ignore[misc]


_SERVER = _Server()
os.register_at_fork(after_in_child=_SERVER.forget)
