"""A reward's progress with its batch: the reward reports, the caller may listen.

Without a listener a report costs one look-up and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["listen", "report_progress"]

_LISTENER: ContextVar[Callable[[int, int], None] | None] = ContextVar("trl_grpo_ext_scored", default=None)


def report_progress(done: int, total: int) -> None:
    """Report how many of a batch's completions, or of the distinct ones among them, have been scored."""
    if (listener := _LISTENER.get()) is not None:
        listener(done, total)


@contextmanager
def listen(listener: Callable[[int, int], None] | None) -> Iterator[None]:
    """Pass reports from rewards called inside to `listener`; None drops them, as a reward that calls others does."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
