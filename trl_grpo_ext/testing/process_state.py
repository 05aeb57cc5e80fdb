"""What a call of a reward may change in its process: global state, threads, child processes."""

from __future__ import annotations

import hashlib
import locale
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def global_state() -> dict[str, Any]:
    """The global state of the process that others rely on, by name."""
    state: dict[str, Any] = {
        "the state of `random`": _digest(random.getstate()),
        "the working directory": Path().stat()[1:3],  # inode and device, also of one that was deleted
        "the locale": locale.setlocale(locale.LC_ALL),
        "the recursion limit": sys.getrecursionlimit(),
        "the limit on digits of int": sys.get_int_max_str_digits(),
        "standard output": id(sys.stdout),
        "standard error": id(sys.stderr),
    }
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "random"):
        state |= {
            "torch's random generator": _digest(torch.random.get_rng_state().tolist()),
            "torch's default dtype": torch.get_default_dtype(),
            "torch's grad mode": torch.is_grad_enabled(),
            "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "torch's number of threads": torch.get_num_threads(),
        }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy's random generator"] = _digest(numpy.random.get_state()[1:])
        state["numpy's error settings"] = tuple(sorted(numpy.geterr().items()))
    state |= {f"the environment variable {name}": value for name, value in os.environ.items()}
    for number in signal.valid_signals():
        name = number.name if isinstance(number, signal.Signals) else f"signal {number}"
        state[f"the handler of {name}"] = signal.getsignal(number)
    return state


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The changes, in words."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    # A library that was imported meanwhile has not changed its generator, and torch names its compiler's cache.
    imports = ("numpy", "torch", "the environment variable TORCHINDUCTOR_")
    return [name for name in names if not (name.startswith(imports) and name not in before)]


def running() -> tuple[int, int]:
    """The numbers of threads and child processes of this process."""
    return threading.active_count(), len(_children())


def running_after_waiting(wanted: tuple[int, int], seconds: float = 1.0) -> tuple[int, int]:
    """The same, after waiting a little for those beyond the wanted numbers that are just ending."""
    until = time.monotonic() + seconds
    now = running()
    while (now[0] > wanted[0] or now[1] > wanted[1]) and time.monotonic() < until:
        time.sleep(0.01)
        now = running()
    return now


def _children() -> set[int]:
    children = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    for file in Path("/proc/self/task").glob("*/children"):  # Linux; those that were forked past multiprocessing
        try:
            children |= {int(number) for number in file.read_text().split()}
        except OSError:  # the thread is gone
            continue
    return children


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
