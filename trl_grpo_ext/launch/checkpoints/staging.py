"""A checkpoint is written beside its place, flushed to disk, and then put there in one step.

While it is written it lies in `output_dir/_unfinished_checkpoint/NUMBER/checkpoint-N`, on the same file system. Neither
`get_last_checkpoint` nor `rotate_checkpoints` looks there, and transformers' uploads to the hub leave out names that
begin with an underscore. So at any moment `checkpoint-N` is absent, the earlier one, or whole.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import CheckpointError
from .checking import REPLACED, UNFINISHED, checkpoint_steps, put_back

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class Staging:
    """One save of one checkpoint, as one rank sees it.

    Of the first processes of the machines, the one with the lowest rank that sees the same folder acts for all that see
    it, so it does not matter whether machines share their disk.

    Args:
        run_dir: Where `checkpoint-N` goes.
        name: `checkpoint-N`.
        number: Of this save, the same on all ranks and new each time.
        rank: Of this process, over all machines.
        leader: Whether this is the first process of its machine.
    """

    def __init__(self, run_dir: Path, name: str, *, number: int, rank: int, leader: bool) -> None:
        self.run_dir, self.name, self.rank, self.leader = run_dir, name, rank, leader
        self.folder = run_dir / UNFINISHED / str(number)
        self.checkpoint = self.folder / name
        self.final = run_dir / name
        self.failure: CheckpointError | None = None
        self.publishes: bool | None = None

    def prepare(self) -> None:
        """Remove what earlier, killed saves left, and make the folder; the machines' first processes do this."""
        if self.leader:
            remove_leftovers(self.run_dir, keep=self.folder.name)
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"writer-{self.rank}").touch()

    def elect(self) -> None:
        """Find out whether this process acts for this disk; after all have prepared."""
        writers = [int(path.name.removeprefix("writer-")) for path in self.folder.glob("writer-*")]
        self.publishes = self.leader and min(writers, default=self.rank) == self.rank

    def flush(self) -> None:
        """Wait until files and folders are on the disk, so that no power cut can undo what comes next."""
        if self.publishes:
            for folder, _, files in os.walk(self.checkpoint):
                for file in files:
                    _sync(os.path.join(folder, file))  # noqa: PTH118 - `os.walk` gives strings
                _sync(folder)

    def publish(self) -> None:
        """Put the checkpoint at its place in one step, also where one of that name is there already."""
        if not self.publishes:
            return
        if not os.path.lexists(self.final):
            self.checkpoint.rename(self.final)
        elif not _exchange(self.checkpoint, self.final):
            # No such call on this file system (NFS, say): a kill between these two lines is made good later.
            replaced = self.run_dir / UNFINISHED / REPLACED
            replaced.mkdir(exist_ok=True)
            self.final.rename(replaced / self.name)
            self.checkpoint.rename(self.final)
        _sync(self.run_dir)

    def take_away(self, checkpoint: Path) -> None:
        """Delete an older checkpoint: first out of sight, so that no half of it stays under its name."""
        with suppress(OSError):
            checkpoint.rename(self.folder / f"old-{checkpoint.name}")
        shutil.rmtree(checkpoint, ignore_errors=True)

    def discard(self) -> None:
        """Remove everything unfinished, and what was replaced."""
        if self.leader and self.publishes is not False:
            remove_leftovers(self.run_dir)

    def fail(self, error: BaseException) -> None:
        """Keep a failure of this rank for when all ranks meet, and give its space back at once.

        Only files go, not folders: what the ranks still write on the way to their meeting, they can. And no hidden
        ones, which another rank is about to rename into place: it would fail, too, and be named as the culprit.
        """
        if self.failure is None:
            self.failure = self.error_of(error)
            for file in [*self.folder.rglob("*")]:
                if file.is_file() and not file.name.startswith(("writer-", ".")):
                    file.unlink(missing_ok=True)

    def error_of(self, error: BaseException) -> CheckpointError:
        """Say what was written, what is free, and what to do."""
        if isinstance(error, CheckpointError):
            return error
        written, free = _size(self.folder), _free(self.run_dir)
        older = checkpoint_steps(self.run_dir) if self.run_dir.is_dir() else []
        before = (
            f"; checkpoint-{older[0]} takes {_bytes(_size(self.run_dir / f'checkpoint-{older[0]}'))}" if older else ""
        )
        kept = "Older checkpoints are as they were" if older else "There is no older checkpoint"
        made = CheckpointError(
            f"{self.name} could not be written to {self.run_dir}: {_reason(error)}. {_bytes(written)} were written "
            f"until then, and {free} are free beside them{before}. {kept}, and what was written of this one is "
            "removed. Make room there (quota and `ulimit -f` count too), set save_total_limit or save_only_model, or "
            "choose another output_dir. Then resume."
        )
        made.__cause__ = error
        return made

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Make an operating system's error inside one that says what to do."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise self.error_of(error) from error


def remove_leftovers(run_dir: Path, keep: str = "") -> None:
    """Remove what killed saves left, after putting back a checkpoint that was about to be replaced.

    Several processes may do this at once.

    Args:
        run_dir: The folder of the checkpoints.
        keep: The number of a save that has begun.
    """
    put_back(run_dir)
    unfinished = run_dir / UNFINISHED
    for path in [*unfinished.glob("*")]:
        if path.name != keep:
            shutil.rmtree(path, ignore_errors=True)
    if not keep:
        with suppress(OSError):
            unfinished.rmdir()


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step; False where the system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system on which folders need no flushing
            raise
    finally:
        os.close(descriptor)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another rank may be removing it
            total += path.stat().st_size if path.is_file() else 0
    return total


def _free(folder: Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return _bytes(shutil.disk_usage(folder).free)
    except OSError as error:
        return f"an unknown number of bytes ({error})"


def _bytes(number: int) -> str:
    return f"{number / 1e9:,.2f} GB" if number >= 1e9 else f"{number / 1e6:,.2f} MB"


def _reason(error: BaseException) -> str:
    """The first line, without full stop: PyTorch adds a stack of its C++ code."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no message'}"
