"""A bar on stderr for a reward function that takes long: how many completions it has scored, or since when it works.

Only in a terminal, and only after two seconds. A bar is drawn by a thread of its own, whatever the function does
meanwhile, and goes when the function returns, so it stays out of the way of the trainer's bar.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from ..guard.calls import is_async
from ..guard.progress import listening
from .printable import printable_name

AFTER_SECONDS = 2.0
_EVERY_SECONDS = 0.5


def bars_wanted(args: Any, is_main_process: bool) -> bool:
    """Whether somebody would see them: a terminal, on the main process, and bars are not switched off."""
    return (
        is_main_process
        and not getattr(args, "disable_tqdm", False)
        and sys.stderr is not None
        and not sys.stderr.closed
        and sys.stderr.isatty()
    )


def with_bar(function: Any, name: str, count: int) -> Any:
    """The same reward function with a bar. Reward models pass through; async functions stay async, as TRL needs.

    Args:
        function: As TRL has it.
        name: Shown in front of the bar.
        count: Completions in the batch.
    """
    if not callable(function) or hasattr(function, "forward"):  # a `torch.nn.Module`, which TRL calls itself
        return function
    if is_async(function):

        async def shown_async(*arguments: Any, **columns: Any) -> Any:
            with reward_bar(name, count):
                return await function(*arguments, **columns)

        return shown_async

    def shown(*arguments: Any, **columns: Any) -> Any:
        with reward_bar(name, count):
            return function(*arguments, **columns)

    return shown


@contextmanager
def reward_bar(name: str, count: int) -> Iterator[None]:
    """Show a bar once the block has taken `AFTER_SECONDS`, and take it away behind the block."""
    bar = _Bar(f"scoring with {printable_name(name)}", count)
    thread = threading.Thread(target=bar.draw, name=f"bar of {printable_name(name)}", daemon=True)
    thread.start()
    try:
        with listening(bar.heard):
            yield
    finally:
        bar.ended.set()
        thread.join(_EVERY_SECONDS * 4)  # a terminal that takes no more output is no reason to wait


class _Bar:
    def __init__(self, label: str, count: int) -> None:
        self.ended = threading.Event()
        self._label, self._count = label, count
        self._share: float | None = None

    def heard(self, done: int, total: int) -> None:
        self._share = min(max(done / total, 0.0), 1.0) if total > 0 else None

    def draw(self) -> None:
        if self.ended.wait(AFTER_SECONDS):
            return
        try:
            # Where nothing is heard of how far it is, only the time is shown: a bar at 0 would say it hangs.
            bar = tqdm(total=self._count, desc=self._label, leave=False, file=sys.stderr, dynamic_ncols=True)
            try:
                self._refresh(bar)
                while not self.ended.wait(_EVERY_SECONDS):
                    self._refresh(bar)
            finally:
                bar.close()
        except (OSError, ValueError):  # the terminal has gone
            return

    def _refresh(self, bar: Any) -> None:
        bar.bar_format = _KNOWN if self._share is not None else _UNKNOWN
        bar.n = round((self._share or 0.0) * self._count)
        bar.refresh()


_KNOWN = "{desc}: {n_fmt}/{total_fmt} completions |{bar}| {elapsed}"
_UNKNOWN = "{desc}: {total_fmt} completions, {elapsed}"
