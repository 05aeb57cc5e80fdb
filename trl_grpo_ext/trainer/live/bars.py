"""A bar on stderr for slow generation and rewards: only in a terminal, and only after two seconds.

It stands below the trainer's own bar and disappears when the work is done. A thread of its own draws it, so a closed or
blocked terminal stops the bar and never the training. If several run at once, as with async rewards, one is shown.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from ...guard.calls import is_async
from ...guard.progress import listen
from ...guard.untrusted import printable_name

AFTER_SECONDS = 2.0
_EVERY_SECONDS = 0.5
_SCREEN = threading.Lock()


class LiveConsole(Console):
    """A console that survives a closed terminal, on which rich would end the process and the training."""

    def on_broken_pipe(self) -> None:
        """Leave the error to the caller."""
        raise


def bars_wanted(args: Any, is_main_process: bool) -> bool:
    """Whether to show bars: in a terminal, on the main process, unless they are switched off."""
    return (
        is_main_process
        and not getattr(args, "disable_tqdm", False)
        and sys.stderr is not None
        and not sys.stderr.closed
        and sys.stderr.isatty()
    )


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
    bar = _Bar(label, count, unit)
    thread = threading.Thread(target=bar.draw, name=f"bar: {label}", daemon=True)
    thread.start()
    try:
        yield bar.update
    finally:
        bar.ended.set()
        thread.join(_EVERY_SECONDS * 4)  # don't wait for a blocked terminal


class _Bar:
    def __init__(self, label: str, count: int, unit: str) -> None:
        self.ended = threading.Event()
        self._label, self._count, self._unit = label, count, unit
        self._began, self._done = time.monotonic(), 0
        self._total: int | None = None  # without news a bar at 0 would suggest a hang

    def update(self, done: int, total: int) -> None:
        self._done = round(min(max(done / total, 0.0), 1.0) * self._count) if total > 0 else 0
        self._total = self._count if total > 0 else None

    def draw(self) -> None:
        if self.ended.wait(AFTER_SECONDS):
            return
        while not _SCREEN.acquire(blocking=False):
            if self.ended.wait(_EVERY_SECONDS):
                return
        try:
            self._draw(LiveConsole(file=sys.stderr))
        except (OSError, ValueError):  # the terminal has gone
            return
        finally:
            _SCREEN.release()

    def _draw(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), _Share(), TimeElapsedColumn())
        quiet: Any = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
        console.file.write("\n")  # the trainer's bar keeps its line
        with Progress(*columns, console=console, transient=True, expand=True, **quiet) as progress:
            console.show_cursor()  # so that a training that is killed leaves none that is hidden
            task = None
            while True:
                counted = f"{self._count}" if self._total is None else f"{self._done}/{self._count}"
                text = f"{self._label}: {counted} {self._unit}"
                if task is None:
                    task = progress.add_task(text, total=self._total)
                    progress.tasks[0].start_time = self._began
                progress.update(task, description=text, completed=self._done, total=self._total, refresh=True)
                if self.ended.wait(_EVERY_SECONDS):
                    break
        console.control(Control.move(0, -1))


class _Share(ProgressColumn):
    """A bar as wide as there is room for; nothing if the share is unknown."""

    def __init__(self) -> None:
        super().__init__(Column(ratio=1))
        self._bar = BarColumn(bar_width=None)

    def render(self, task: Task) -> Any:
        return Text() if task.total is None else self._bar.render(task)
