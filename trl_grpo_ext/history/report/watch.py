"""Writing a report again whenever its runs have written something, until somebody stops it."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ...errors import ConfigurationError

Signature = dict[str, tuple[int, int]]
"""By path, time of the last change in nanoseconds and size in bytes."""

_FILES = (
    "trainer_state.json",
    "trl_grpo_ext_log.jsonl",
    "trl_grpo_ext_plugins.json",
    "trl_grpo_ext_settings.json",
    "checkpoint-*/trainer_state.json",
    "token_records/*.parquet",
    "completions/*.parquet",
)
"""What a training writes and a report shows. The report itself, written into the same folder, is not among them."""


def watch(
    folders: Sequence[str | Path],
    write: Callable[[], object],
    every: float = 5.0,
    stop: threading.Event | None = None,
    say: Callable[[str], object] = lambda line: print(line, file=sys.stderr, flush=True),
) -> int:
    """Write a report, and again whenever the runs' files have changed since; return 0, the exit status, at Ctrl-C.

    What a training is writing at that moment may be half there; `write` leaves it out, and the next change brings it.
    Where there is no run yet, or the report cannot be written this time, `say` gets one line, and it is tried again.
    """
    if isinstance(every, bool) or not isinstance(every, int | float) or not 0 < every < 86400:
        raise ConfigurationError(f"--watch must be a number of seconds above 0 and under a day, got {every!r}.")
    stop = stop or threading.Event()
    shown, complaint = None, ""
    try:
        while True:
            # Taken before reading: what changes while the report is written makes another one.
            if (now := signature(folders)) != shown:
                try:
                    write()
                    complaint, shown = "", now
                except (ConfigurationError, OSError) as error:
                    if str(error) != complaint:
                        complaint = str(error)
                        say(f"not written this time, will try again: {complaint}")
            if stop.wait(every):
                return 0
    except KeyboardInterrupt:
        return 0


def signature(folders: Iterable[str | Path]) -> Signature:
    """What the runs' files look like now; a file that goes away meanwhile is left out."""
    found: Signature = {}
    for folder, pattern in itertools.product(folders, _FILES):
        with suppress(OSError):  # a checkpoint that is being replaced, say
            stats = {str(file): file.stat() for file in Path(folder).glob(pattern)}
            found |= {name: (stat.st_mtime_ns, stat.st_size) for name, stat in stats.items()}
    return found
