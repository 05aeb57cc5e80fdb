"""A bar on stderr for work that takes long: only in a terminal, and only after two seconds.

It is drawn by a thread of its own, whatever the work does meanwhile, and goes when the work is done, so it stays out of
the way of the trainer's bar.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

AFTER_SECONDS = 2.0
_EVERY_SECONDS = 0.5
_KNOWN = "{desc}: {n_fmt}/{total_fmt} {unit} |{bar}| {elapsed}"
_UNKNOWN = "{desc}: {total_fmt} {unit}, {elapsed}"


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
def late_bar(label: str, count: int, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar once the block has taken `AFTER_SECONDS`, and take it away behind the block.

    Args:
        label: In front of it.
        count: Of what there is to do.
        unit: What is counted.

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
        self._share: float | None = None

    def heard(self, done: int, total: int) -> None:
        self._share = min(max(done / total, 0.0), 1.0) if total > 0 else None

    def draw(self) -> None:
        if self.ended.wait(AFTER_SECONDS):
            return
        try:
            # Where nothing is heard of how far it is, only the time is shown: a bar at 0 would say it hangs.
            looks = {"leave": False, "file": sys.stderr, "dynamic_ncols": True}
            bar = tqdm(total=self._count, desc=self._label, unit=self._unit, **looks)
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
