"""Running Python that a model wrote: one process per run, with limits, watched from here.

The process (`child`) is a fresh interpreter with an empty environment and an empty directory of its own, in a
session of its own, with the standard library alone. Before it runs the code it gives up rights, in layers
(`layers`), each of which a kernel may lack; `isolation()` says which hold here:

- "files": Landlock (Linux 5.13). It can read Python's standard library and the libraries under /usr/lib and /lib, and
  read and write in its own directory, and that is all: no home directory, no data set, no /proc, no /tmp. It can
  execute no file.
- "network", "processes": a seccomp filter (x86-64 and ARM) that lets a list of system calls pass. It can open no
  socket of any family, start no process, signal, trace or change no process but itself, and change no owner, mode or
  mount. Capabilities are dropped, so it holds for root too. Threads are possible.
- "memory": a limit on its address space.

Files are also limited in size, number and sum, and so are open descriptors, processor time and what it may print.
Namespaces and cgroups are not used, because containers commonly forbid them; these layers need no rights at all.

What this is not: a boundary against an attacker with an exploit of the kernel or of the interpreter. It hides neither
the files under the library directories (installed packages among them), nor the existence, size and owner of others
(`stat` is free), nor the time, the machine's name and its number of cores. It shares the processor and its caches.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ...errors import RewardError
from ...guard.progress import scored

LAYERS = ("files", "network", "processes", "memory")
"""What a machine may be able to hold back."""

MAX_OUTPUT = 4 * 2**20
"""Bytes that a process may print, and bytes that it may report."""
_MAX_FILES, _MAX_STORED = 1000, 64 * 2**20
_START_SECONDS = 60.0  # an interpreter on a busy machine
_TICK = 0.05
_CHILD = Path(__file__).with_name("child.py")

T = TypeVar("T")


@dataclass
class Run:
    """What became of one process.

    Attributes:
        ended: "exited" by itself, or ended from here because of "timeout", "output" or "storage".
        status: Its exit status, negative for a signal.
        output: What it printed, where that was asked for.
        layers: Which of its rights it gave up before it ran the code.
        messages: What it reported.
        seconds: How long the code had run.
    """

    ended: Literal["exited", "timeout", "output", "storage"] = "exited"
    status: int = 0
    output: bytes = b""
    layers: tuple[str, ...] = ()
    messages: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


@functools.lru_cache(maxsize=8)
def isolation(memory_mb: int = 512) -> tuple[str, ...]:
    """Which layers hold on this machine, found out by a process that tries; remembered."""
    return run_python({}, seconds=5.0, memory_mb=memory_mb).layers


def run_all(tasks: Sequence[Callable[[threading.Event], T]], workers: int) -> list[T]:
    """Run tasks in so many threads, and return their results in order. Leaves no process, whatever happens.

    Args:
        tasks: They take an event that is set when they are to stop, for `run_python`.
        workers: How many run at a time.
    """
    stop = threading.Event()
    pool = ThreadPoolExecutor(max(1, min(workers, len(tasks))), thread_name_prefix="python-tests")
    try:
        results: list[T] = []
        for future in [pool.submit(task, stop) for task in tasks]:
            results.append(future.result())
            scored(len(results), len(tasks))
        return results
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def run_python(
    job: dict[str, Any],
    *,
    seconds: float,
    memory_mb: int,
    require: Sequence[str] = (),
    stdin: bytes | None = None,
    stop: threading.Event | None = None,
) -> Run:
    """Run one process and watch it.

    Args:
        job: `code` to run, with `tests` as a module, without as a program. Without `code` it only gives up its rights.
        seconds: Wall time for the code; the interpreter's start does not count.
        memory_mb: Memory beyond the interpreter's own.
        require: Layers that must hold; the code is not run where they don't.
        stdin: What a program reads. None for a module; then what it prints is thrown away.
        stop: Ends the run, as a timeout.

    Raises:
        RewardError: The process does not start, or a required layer does not hold.
    """
    token = secrets.token_hex(16)
    with ExitStack() as stack:
        home = tempfile.mkdtemp(prefix="python-tests-")
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        job_file, reports = stack.enter_context(tempfile.TemporaryFile()), os.pipe()
        stack.callback(os.close, reports[0])
        with ExitStack() as ours:
            ours.callback(os.close, reports[1])
            plan = {"token": token, "memory_mb": memory_mb, "seconds": seconds, "parent": os.getpid()}
            job_file.write(json.dumps({**job, **plan, "require": list(require)}).encode("ascii"))
            job_file.seek(0)
            given: Any = subprocess.DEVNULL
            if stdin is not None:
                given = ours.enter_context(tempfile.TemporaryFile())
                given.write(stdin)
                given.seek(0)
            passed = (job_file.fileno(), reports[1])
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", str(_CHILD), *map(str, passed)],
                stdin=given,
                stdout=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=home,
                env={"PATH": "", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                pass_fds=passed,
                start_new_session=True,
            )
            stack.callback(_end, process)
        run = _watched(process, reports[0], token.encode("ascii"), Path(home), seconds, stop)
    if not run.messages:
        if stop is not None and stop.is_set():
            return run
        raise RewardError(
            f"The process that runs Python code did not start ({sys.executable}, exit status {run.status}, "
            f"{run.ended}). Is the machine out of memory or of processes?"
        )
    first, *run.messages = run.messages
    run.layers = tuple(layer for layer in LAYERS if layer in first["layers"])
    missing = [layer for layer in require if layer not in run.layers]
    if missing:
        raise RewardError(
            f"The process that runs Python code could not give up {', '.join(missing)}, which is required. It could "
            "when the reward was made: has the reward moved to another machine?"
        )
    return run


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its whole session, should "processes" not hold
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _watched(
    process: subprocess.Popen[bytes],
    reports: int,
    token: bytes,
    home: Path,
    seconds: float,
    stop: threading.Event | None,
) -> Run:
    """Read what it prints and reports until it ends, or until it must be ended."""
    run, reported, started = Run(), bytearray(), None
    printed = bytearray()
    deadline = time.monotonic() + _START_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(reports, selectors.EVENT_READ, reported)
        if process.stdout is not None:
            selector.register(process.stdout.fileno(), selectors.EVENT_READ, printed)
        while True:
            over = process.poll() is not None
            for key, _ in selector.select(0 if over else min(_TICK, max(0.0, deadline - time.monotonic()))):
                data = os.read(key.fd, 1 << 16)
                key.data.extend(data)
                if not data:
                    selector.unregister(key.fd)
            if started is None and reported:  # its first report: now the code begins
                started = time.monotonic()
                deadline = started + seconds
            if max(len(reported), len(printed)) > MAX_OUTPUT:
                run.ended = "output"
            elif over:
                if selector.get_map() and any(selector.select(0)):
                    continue  # what it wrote before it ended
                break
            elif time.monotonic() >= deadline or (stop is not None and stop.is_set()):
                run.ended = "timeout"
            elif _stores_too_much(home):
                run.ended = "storage"
            if run.ended != "exited":
                break
            if not selector.get_map():  # it closed everything and lives on
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_TICK)
    _end(process)
    run.seconds = 0.0 if started is None else time.monotonic() - started
    run.status, run.output, run.messages = process.returncode, bytes(printed), _messages(reported, token)
    if run.status == -signal.SIGXCPU:
        run.ended = "timeout"
    return run


def _messages(reported: bytes | bytearray, token: bytes) -> list[dict[str, Any]]:
    """The lines that begin with the token; whatever else is there is the code's own."""
    messages = []
    for line in bytes(reported[: 2 * MAX_OUTPUT]).split(b"\n"):
        if line.startswith(token):
            with suppress(ValueError, RecursionError):
                message = json.loads(line[len(token) :])
                if isinstance(message, dict):
                    messages.append(message)
    return messages


def _stores_too_much(home: Path) -> bool:
    stored = 0
    with os.scandir(home) as entries:
        for number, entry in enumerate(entries):
            with suppress(FileNotFoundError):
                stored += entry.stat(follow_symlinks=False).st_size
            if number >= _MAX_FILES or stored > _MAX_STORED:
                return True
    return False
