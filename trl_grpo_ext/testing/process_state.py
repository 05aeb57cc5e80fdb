"""The global state of a process, which a call of a reward must leave as it was."""

from __future__ import annotations

import hashlib
import locale
import os
import random
import signal
import sys
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


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
