"""A line on stderr for slow generation and rewards: only in a terminal, and only after two seconds.

It stands below the trainer's own bar and disappears when the work is done. A thread of its own draws it, so a closed or
blocked terminal stops the line and never the training. If several run at once, as with async rewards, one is shown.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.cells import set_cell_size

from ...guard.calls import is_async
from ...guard.progress import listen
from ...guard.untrusted import printable_name

AFTER_SECONDS = 2.0
_EVERY_SECONDS = 0.5
_SCREEN = threading.Lock()


def bars_wanted(args: Any, is_main_process: bool) -> bool:
    """Whether to show lines: in a terminal, on the main process, unless they are switched off."""
    shown = is_main_process and not getattr(args, "disable_tqdm", False) and sys.stderr is not None
    return shown and not sys.stderr.closed and sys.stderr.isatty()


@contextmanager
def generation_bar(completions: int, limit: int, reward: float | None, output_layer: Any) -> Iterator[None]:
    """A bar for generation: the longest completion's tokens so far, out of the limit.

    A model that generates in this process runs its output layer once per token, so the bar counts those calls. Without
    such a layer (vLLM, continuous batching) it shows only the time. `reward` is the mean of the batch before.
    """
    label = "generating" if reward is None else f"generating (reward {reward:.3f} before)"
    if output_layer is None:
        with _late_bar(label, completions, "completions"):
            yield
        return
    with _late_bar(f"{label}, {completions} completions", limit, "tokens") as heard:
        done = 0

        def count(*_: Any) -> None:
            nonlocal done
            done += 1
            heard(done, limit)

        handle = output_layer.register_forward_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()


def with_bar(function: Any, name: str, count: int, before: float | None = None) -> Any:
    """The same reward function with a bar. Reward models pass through; async functions stay async, as TRL needs."""
    if not callable(function) or hasattr(function, "forward"):  # a `torch.nn.Module`, which TRL calls itself
        return function
    label = f"scoring with {printable_name(name)}" + ("" if before is None else f" ({before:.3f} before)")

    @contextmanager
    def bar() -> Iterator[None]:
        with _late_bar(label, count, "completions") as heard, listen(heard):
            yield

    async def shown_async(*arguments: Any, **columns: Any) -> Any:
        with bar():
            return await function(*arguments, **columns)

    def shown(*arguments: Any, **columns: Any) -> Any:
        with bar():
            return function(*arguments, **columns)

    return shown_async if is_async(function) else shown


@contextmanager
def _late_bar(label: str, count: int, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar once the block has taken `AFTER_SECONDS`; yields a function of the work done and the total."""
    ended, began, done = threading.Event(), time.monotonic(), ""

    def update(number: int, total: int) -> None:
        nonlocal done
        # Without news a 0 would suggest a hang.
        done = f"{round(min(max(number / total, 0.0), 1.0) * count)}/" if total > 0 else ""

    def draw() -> None:
        if ended.wait(AFTER_SECONDS):
            return
        while not _SCREEN.acquire(blocking=False):
            if ended.wait(_EVERY_SECONDS):
                return
        try:
            sys.stderr.write("\n")  # the trainer's bar keeps its line
            while True:
                minutes, seconds = divmod(round(time.monotonic() - began), 60)
                text = f"{label}: {done}{count} {unit} {minutes}:{seconds:02}"
                room = shutil.get_terminal_size().columns - 1
                sys.stderr.write(f"\r\x1b[2K{set_cell_size(text, room).rstrip()}")
                sys.stderr.flush()
                if ended.wait(_EVERY_SECONDS):
                    break
            sys.stderr.write("\r\x1b[2K\x1b[1A")
            sys.stderr.flush()
        except (OSError, ValueError):  # the terminal has gone
            return
        finally:
            _SCREEN.release()

    thread = threading.Thread(target=draw, name=f"bar: {label}", daemon=True)
    thread.start()
    try:
        yield update
    finally:
        ended.set()
        thread.join(_EVERY_SECONDS * 4)  # don't wait for a blocked terminal
