"""Files that are never half there: written beside their place, and put there in one step."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file, text as UTF-8, in one step; one that is there is replaced.

    Raises:
        OSError: It cannot be written; nothing is left of it then.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        unfinished.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
