"""Calling a reward function whatever its form: function, partial, callable object; plain or async."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

# What TRL passes to every reward function beside the dataset's columns.
NOT_COLUMNS = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling this gives a coroutine: an async function, a partial of one, or an async `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def reward_name(function: Any) -> str:
    """The name that TRL gives a reward function, and so its metrics."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, with `_2`, `_3` behind those that occur again, so that no two rewards share a metric."""
    taken = {*names}
    unique: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in unique or (number > 1 and candidate in taken):
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def call(function: Callable[..., Any], columns: Mapping[str, Any]) -> Any:
    """Call a reward function and wait for what it returns, from any thread; async ones run on a loop of our own.

    The loop is one per process and lives on, because sessions and locks that a function keeps belong to a loop.
    """
    if not is_async(function):
        return function(**columns)
    return run_async(function(**columns))


def run_async(coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
    """Run a coroutine on this process's loop and wait for it.

    Raises:
        TimeoutError: It took longer than `timeout` seconds. It is cancelled, which a coroutine that blocks ignores.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result(timeout)
    except TimeoutError:
        future.cancel()
        raise


def rows_of(columns: Mapping[str, Any], count: int, rows: slice) -> dict[str, Any]:
    """The same call for some of the `count` completions: every list with one entry per completion is cut.

    `log_extra` and `log_metric` are left out: what they log belongs to a whole batch.
    """
    cut: dict[str, Any] = {}
    for name, value in columns.items():
        if name in ("log_extra", "log_metric"):
            continue
        per_completion = isinstance(value, list | tuple) and len(value) == count and name != "trainer_state"
        cut[name] = value[rows] if per_completion else value
    return cut


_LOCK = threading.Lock()
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}


def _loop() -> asyncio.AbstractEventLoop:
    with _LOCK:
        loop = _LOOPS.get(os.getpid())  # a forked child has no thread that would run its parent's loop
        if loop is None:
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="trl-grpo-ext-rewards", daemon=True).start()
        return loop
