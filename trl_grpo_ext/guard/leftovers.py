"""Threads and child processes that a reward leaves running: named when the run is over, and not waited for.

Once Python waits for nothing else, the wait for threads is interrupted as Ctrl-C would, and the children are ended. So
the process keeps its exit status, and what others have registered with `atexit` still runs.
"""

import atexit
import concurrent.futures.thread
import logging
import multiprocessing
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds that a thread has to end by itself, once the main thread is done
_TICK = 0.5
_SIGNAL = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else None

_BEGUN: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Threads and processes, and the reward that ran when they began."""
_IS_READY = threading.Event()
_WAITED = threading.Event()  # Python has waited for the threads, or was interrupted


class _NoLongerError(BaseException):
    """Interrupts the wait for threads."""


@contextmanager
def noted(reward: str) -> Iterator[None]:
    """Note that what begins inside, thread or child process, is this reward's."""
    before = {*threading.enumerate(), *multiprocessing.active_children()}
    try:
        yield
    finally:
        for one in {*threading.enumerate(), *multiprocessing.active_children()} - before:
            _BEGUN.setdefault(one, reward)


def prepare() -> None:
    """Get ready for the end of this process if something was left running; only the main thread can."""
    if _BEGUN and not _IS_READY.is_set() and threading.current_thread() is threading.main_thread():
        _IS_READY.set()
        atexit.register(_end_children)
        if _SIGNAL is not None:
            signal.signal(_SIGNAL, _interrupt)
            threading.Thread(target=_end_wait, name="trl-grpo-ext-leftovers", daemon=True).start()


def _end_wait() -> None:
    """Once nothing but threads that rewards left keeps the process alive, name them and interrupt the wait for them."""
    main = threading.main_thread()
    while not _is_waited_for(main):
        time.sleep(_TICK)
    while not _WAITED.wait(_PATIENCE):
        # Python waits for the threads of a pool even if they are daemons.
        of_pools = getattr(concurrent.futures.thread, "_threads_queues", ())
        alive = [one for one in threading.enumerate() if one is not main and (not one.daemon or one in of_pools)]
        if alive and all(one in _BEGUN for one in alive) and main.ident is not None:
            _name("thread", alive)
            _ignore_interrupt(sys.unraisablehook)
            signal.pthread_kill(main.ident, _SIGNAL)  # type: ignore[arg-type]
            return


def _is_waited_for(main: threading.Thread) -> bool:
    """Whether the script is over, and the main thread waits for the others: its first call is in `threading`."""
    frame = sys._current_frames().get(main.ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == threading.__file__


def _end_children() -> None:
    """Runs when the threads have ended, and before `multiprocessing` waits for its children."""
    _WAITED.set()
    children = [one for one in multiprocessing.active_children() if one in _BEGUN and not one.daemon]
    _name("process", children)
    for child in children:
        child.terminate()
        child.join(1.0)
        child.kill()


def _name(kind: str, left: Sequence[Any]) -> None:
    said = "The run is over: the %s %r, which began while the reward %r ran, is not waited for. Let the reward end it."
    for one in left:
        logger.warning(said, kind, one.name, _BEGUN[one])


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    if not _WAITED.is_set():
        raise _NoLongerError


def _ignore_interrupt(shown: Callable[[Any], Any]) -> None:
    """Keep Python from printing the interrupt, as it does with Ctrl-C."""
    sys.unraisablehook = lambda raised: None if raised.exc_type is _NoLongerError else shown(raised)
