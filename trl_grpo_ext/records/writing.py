"""Atomic file writes, each beside its place and then renamed."""

import os
import threading
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write or replace a file in one step, with its folder if that is missing; text is encoded as UTF-8."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        unfinished.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
