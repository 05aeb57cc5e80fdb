"""How far a reward is with its batch, for whoever asks: a reward reports, the caller listens.

Where nobody listens, saying it costs a look-up and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["listen", "report_progress"]

_LISTENER: ContextVar[Callable[[int, int], None] | None] = ContextVar("trl_grpo_ext_scored", default=None)


def report_progress(done: int, total: int) -> None:
    """Say that so many of a batch's completions, or of the distinct ones among them, have been scored by now."""
    if (listener := _LISTENER.get()) is not None:
        listener(done, total)


@contextmanager
def listen(listener: Callable[[int, int], None] | None) -> Iterator[None]:
    """Hear what rewards inside say. None: nobody does, as in a reward that calls another."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
