"""What a reward must leave as it was: random generators, environment, signal handlers; threads and child processes."""

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

import torch


def global_state() -> dict[str, Any]:
    """Everything of a process that others rely on, by what it is called."""
    state: dict[str, Any] = {
        "the state of `random`": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "torch's random generator": hashlib.sha256(bytes(torch.random.get_rng_state().tolist())).hexdigest(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "the working directory": _working_directory(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the recursion limit": sys.getrecursionlimit(),
        "the limit on digits of int": sys.get_int_max_str_digits(),
        "standard output": id(sys.stdout),
        "standard error": id(sys.stderr),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy's random generator"] = hashlib.sha256(repr(numpy.random.get_state()[1:]).encode()).hexdigest()
        state["numpy's error settings"] = tuple(sorted(numpy.geterr().items()))
    state |= {f"the environment variable {name}": value for name, value in os.environ.items()}
    for number in signal.valid_signals():
        state[f"the handler of {_signal_name(number)}"] = signal.getsignal(number)
    return state


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What has changed, in words."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    # numpy that was imported meanwhile is no change of its generator.
    return [name for name in names if not (name.startswith("numpy") and name not in before)]


def helpers() -> tuple[int, int]:
    """How many threads and child processes this process has."""
    return threading.active_count(), len(_children())


def settled(wanted: tuple[int, int], seconds: float = 1.0) -> tuple[int, int]:
    """The same, after those that are just ending have had some time to be gone."""
    until = time.monotonic() + seconds
    now = helpers()
    while (now[0] > wanted[0] or now[1] > wanted[1]) and time.monotonic() < until:
        time.sleep(0.01)
        now = helpers()
    return now


def _children() -> set[int]:
    children = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    for file in Path("/proc/self/task").glob("*/children"):  # Linux; those that were forked past multiprocessing
        try:
            children |= {int(number) for number in file.read_text().split()}
        except OSError:  # the thread is gone
            continue
    return children


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return "gone"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
