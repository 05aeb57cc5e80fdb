"""A bar on stderr for generation and rewards that take long: only in a terminal, and only after two seconds.

It stands below the trainer's own bar and goes when the work is done. A thread of its own draws it: a terminal that has
gone, or takes no more output, costs the bar and never the training. Of several at once, as async rewards would have
them, one is shown.
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
from ...guard.printable import printable_name
from ...guard.progress import listen

AFTER_SECONDS = 2.0
_EVERY_SECONDS = 0.5
_SCREEN = threading.Lock()


class LiveConsole(Console):
    """A console whose reader may go: rich would end the process then, with the training in it."""

    def on_broken_pipe(self) -> None:
        """Leave the error to the caller."""
        raise


def bars_wanted(args: Any, is_main_process: bool) -> bool:
    """Whether somebody would see them: a terminal, on the main process, and bars are not switched off."""
    return (
        is_main_process
        and not getattr(args, "disable_tqdm", False)
        and sys.stderr is not None
        and not sys.stderr.closed
        and sys.stderr.isatty()
    )


@contextmanager
def generation_bar(completions: int, limit: int, reward: float | None, output_layer: Any) -> Iterator[None]:
    """A bar for generation: how many tokens the longest completion has by now, of those that it may have.

    A model that generates in this process computes its output layer once for each token, so the calls of that layer are
    counted. Sampling by vLLM or with continuous batching goes on elsewhere; there the bar has the time alone.

    Args:
        completions: How many are generated in this process.
        limit: Tokens that a completion may have.
        reward: Mean reward of the batch before, which is shown.
        output_layer: The module that makes logits; None where tokens cannot be counted.
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
    """The same reward function with a bar. Reward models pass through; async functions stay async, as TRL needs.

    Args:
        function: As TRL has it.
        name: Shown in front of the bar.
        count: Completions in the batch.
        before: The mean of the reward in the batch before, which is shown.
    """
    if not callable(function) or hasattr(function, "forward"):  # a `torch.nn.Module`, which TRL calls itself
        return function
    label = f"scoring with {printable_name(name)}" + ("" if before is None else f" ({before:.3f} before)")
    if is_async(function):

        async def shown_async(*arguments: Any, **columns: Any) -> Any:
            with _late_bar(label, count, "completions") as heard, listen(heard):
                return await function(*arguments, **columns)

        return shown_async

    def shown(*arguments: Any, **columns: Any) -> Any:
        with _late_bar(label, count, "completions") as heard, listen(heard):
            return function(*arguments, **columns)

    return shown


@contextmanager
def _late_bar(label: str, count: int, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar once the block has taken `AFTER_SECONDS`, and take it away after the block.

    Yields:
        Call it with what is done and with how much there is in all, whenever something is.
    """
    bar = _Bar(label, count, unit)
    thread = threading.Thread(target=bar.draw, name=f"bar: {label}", daemon=True)
    thread.start()
    try:
        yield bar.heard
    finally:
        bar.ended.set()
        thread.join(_EVERY_SECONDS * 4)  # a terminal that takes no more output is no reason to wait


class _Bar:
    def __init__(self, label: str, count: int, unit: str) -> None:
        self.ended = threading.Event()
        self._label, self._count, self._unit = label, count, unit
        self._began, self._done = time.monotonic(), 0
        self._total: int | None = None  # a bar at 0, where nothing is heard, would say that it hangs

    def heard(self, done: int, total: int) -> None:
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
    """A bar as wide as there is room for; nothing where the share is not known."""

    def __init__(self) -> None:
        super().__init__(Column(ratio=1))
        self._bar = BarColumn(bar_width=None)

    def render(self, task: Task) -> Any:
        return Text() if task.total is None else self._bar.render(task)
