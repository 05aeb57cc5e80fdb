"""One run at a time saves into a folder: a lock that ends with its holder, even if that is killed.

The first process of a run holds a POSIX lock on `_in_use` in the run's folder while it trains. The system releases it
when the process ends, and no forked child has it. NFS passes it on, unless it is mounted with `nolock` or
`local_lock`; where a file system has no locks, the run warns and goes on without.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from ...errors import CheckpointError

FILE = "_in_use"
"""Its name begins with an underscore, so transformers' uploads leave it out."""

logger = logging.getLogger(__name__)


class FolderLock:
    """The lock of one run on its folder, which is created if it is missing."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock; a `CheckpointError` if another process has it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                by = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                os.close(descriptor)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise CheckpointError(
                        f"{str(self.path.parent)!r} is in use: {by} trains and saves there, and would remove this "
                        "run's checkpoints. Wait for it, stop it, or choose another output_dir."
                    ) from None
                logger.warning("%s takes no lock (%s): start no second run there.", self.path.parent, error)
                return
            with suppress(FileNotFoundError):  # its last holder removed it between our two calls
                if os.path.samestat(self.path.stat(), os.fstat(descriptor)):
                    break
            os.close(descriptor)
        self._descriptor = descriptor
        with suppress(OSError):  # a full disk is reported when saving
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()[:60]!r}".encode(), 0)

    def release(self) -> None:
        """Remove the file and release the lock, if this process holds it."""
        if self._descriptor is not None:
            with suppress(OSError):
                self.path.unlink()
            os.close(self._descriptor)
            self._descriptor = None
