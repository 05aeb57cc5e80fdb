"""One run at a time saves into a folder: a lock that ends with its holder, even if that is killed.

The first process of each machine holds `flock` on the file `_in_use` in the run's folder while it trains; if machines
share the folder, one of them holds it for all. The system releases it when the process ends, even by `kill -9`, so no
stale lock remains; the file itself may stay, but means nothing alone.

NFS passes such locks on to its server, so other machines see them, unless it is mounted with `nolock` or
`local_lock=flock`: then each machine sees only its own. If a file system has no locks (some FUSE and object stores),
the run warns and continues without.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from ...errors import CheckpointError

FILE = "_in_use"
"""Its name begins with an underscore, so transformers' uploads leave it out."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()

logger = logging.getLogger(__name__)


class FolderLock:
    """The lock of one run on its folder, as the first process of a machine holds it.

    Args:
        folder: The `output_dir`; created if missing.
        number: Of this run; the same on all its machines, so that they don't refuse each other.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.path, self.number = folder / FILE, number
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, unless another machine of this run has it.

        Raises:
            CheckpointError: Another run has it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if error.errno in _NO_LOCKS:
                    logger.warning(
                        "%s cannot be locked (%s): make sure yourself that no second run saves there.",
                        self.path.parent,
                        os.strerror(error.errno),
                    )
                    return
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                if self._is_of_this_run():
                    return
                continue
            if _is_same(descriptor, self.path):
                self._descriptor = descriptor
                _held.add(self)
                whose = {"run": self.number, "process": os.getpid(), "machine": socket.gethostname()}
                with suppress(OSError):  # a full disk is reported when saving
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(whose).encode(), 0)
            else:  # its last holder removed it between our two calls
                os.close(descriptor)

    def release(self) -> None:
        """Release the lock and remove the file, if this process holds it."""
        if self._descriptor is not None:
            with suppress(OSError):
                self.path.unlink()
            self.forget()

    def forget(self) -> None:
        """Close the lock's file; in a forked child this leaves the lock with the parent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_of_this_run(self) -> bool:
        """Whether another machine of this run has the lock; False if nobody has it any more.

        Raises:
            CheckpointError: Another run has it.
        """
        for _ in range(20):  # its holder may be about to write its name
            try:
                whose = json.loads(self.path.read_bytes())
                run, process, machine = whose["run"], whose["process"], whose["machine"]
            except FileNotFoundError:
                return False
            except (ValueError, KeyError, TypeError, OSError):
                time.sleep(0.05)
                continue
            if run == self.number:
                return True
            by = f"process {process} on {str(machine)[:60]!r}"
            break
        else:
            by = "another process"
        raise CheckpointError(
            f"{str(self.path.parent)!r} is in use: {by} trains and saves there, and two runs in one folder would "
            f"remove each other's checkpoints. Wait for it, stop it, or choose another output_dir."
        )


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _forget_all() -> None:
    for lock in [*_held]:
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
