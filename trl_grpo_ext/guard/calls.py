"""Reward functions in any form, plain or async: call them, name them and check what they return."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ..errors import PluginOutputError

if TYPE_CHECKING:
    import asyncio

PASSED_BY_TRL = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
)
"""What TRL passes to every reward function besides the dataset's columns."""

_LARGEST = 3.4028235e38  # of float32, which TRL keeps rewards in


def is_model(reward: Any) -> bool:
    """Whether this is a `torch.nn.Module`. Does not import torch: before that, nothing can be one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(reward, torch.nn.Module)


def running_methods() -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """The methods that led to the caller, innermost first, each one's object and variables."""
    frame = sys._getframe(2)
    while frame is not None:
        if "self" in frame.f_locals:
            yield frame.f_locals["self"], frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]


def has_plugins(trainer: Any) -> bool:
    """Whether a trainer is one of ours, from the beginning of its construction on."""
    return hasattr(trainer, "_trl_grpo_ext")


def parameters_of(called: Any) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a callable; None if Python knows none, as of some extension types."""
    try:
        return inspect.signature(called).parameters
    except (TypeError, ValueError):
        return None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling this gives a coroutine: an async function, a partial of one, or an async `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def reward_name(reward: Any) -> str:
    """The name that TRL gives a reward and its metrics: a model's is the last part of where it came from."""
    if is_model(reward) and (path := getattr(getattr(reward, "config", None), "_name_or_path", "")):
        return str(path).rpartition("/")[2]
    while isinstance(reward, functools.partial):
        reward = reward.func
    return str(getattr(reward, "__name__", type(reward).__name__))


def call(function: Callable[..., Any], columns: Mapping[str, Any]) -> Any:
    """Call a reward function and wait for its result, from any thread; async ones run on one loop per process."""
    if not is_async(function):
        return function(**columns)
    import asyncio

    return asyncio.run_coroutine_threadsafe(function(**columns), reward_loop()).result()


def start_scoring(reward: Any, columns: Mapping[str, Any]) -> None:
    """Let a reward that can begin early do so; the call with the same columns follows."""
    if callable(start := getattr(reward, "start_scoring", None)):
        start(**columns)


def start_workers(reward: Any) -> None:
    """Let a reward that works in processes of its own start them."""
    if callable(start := getattr(reward, "start_workers", None)):
        start()


_LOCK = threading.Lock()
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}


def reward_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process that async rewards run on, in a thread of its own."""
    import asyncio

    with _LOCK:
        loop = _LOOPS.get(os.getpid())  # a forked child has no thread that would run its parent's loop
        if loop is None:
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="trl-grpo-ext-rewards", daemon=True).start()
        return loop


def select_rows(columns: Mapping[str, Any], count: int, rows: Sequence[int]) -> dict[str, Any]:
    """The same call for some of the `count` completions, without the loggers, which log whole batches."""
    return {
        name: [value[row] for row in rows]
        if isinstance(value, list | tuple) and len(value) == count and name != "trainer_state"
        else value
        for name, value in columns.items()
        if name not in ("log_extra", "log_metric")
    }


def check_scores(returned: Any, count: int, reward: str) -> list[float | None]:
    """Refuse what a reward function returned unless it is a number or None for each of `count` completions.

    Numbers keep their type (`Parts` their parts), except an array's elements. NaN passes, because TRL reads it as None;
    what is infinite in float32, which TRL keeps it in, does not.
    """
    values = returned
    if hasattr(returned, "tolist"):
        values = returned.tolist()  # an array
    elif isinstance(returned, Iterator):
        values = list(returned)
    if not isinstance(values, list | tuple) or len(values) != count or (values and isinstance(values[0], list)):
        what = f"{type(returned).__name__}, {returned!r:.80}"
        if isinstance(values, list | tuple):
            what = f"{len(values)} values for {count} completions"
        wanted = f"a list with a number or None for each of {count} completions"
        raise PluginOutputError(f"The reward {reward!r} returned {what}; it must return {wanted}.")
    return [_checked(value, row, reward) for row, value in enumerate(values)]


def _checked(value: Any, row: int, reward: str) -> float | None:
    if value is None:
        return None
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a number of an array, or a tensor without axes
    if isinstance(value, int | float | Fraction | Decimal):
        with contextlib.suppress(OverflowError):
            number = value if isinstance(value, float) else float(value)  # `Parts` stay `Parts`
            if not abs(number) > _LARGEST:
                return number
    what = f"{type(value).__name__}, {value!r:.80}, at row {row}"
    raise PluginOutputError(f"The reward {reward!r} returned {what}; it must be None or a number, finite in float32.")


def unique_names(names: Sequence[str]) -> list[str]:
    """Make names unique, for metrics: the first of a name keeps it, later ones get `_2`, `_3` and so on."""
    new: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        new.append(next(one for one in numbered if one not in {*names, *new}) if name in new else name)
    return new
