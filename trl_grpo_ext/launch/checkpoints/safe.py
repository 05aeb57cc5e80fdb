"""Checkpoints that survive `kill -9`, SIGTERM and a full disk, for any `transformers.Trainer`.

    class MyTrainer(SafeCheckpoints, GRPOExtTrainer): ...

    trainer.train(resume_from_checkpoint=last_complete_checkpoint(args.output_dir))
    if trainer.stopped_by_signal:
        sys.exit(exit_status(trainer.stopped_by_signal))

transformers writes into `output_dir/checkpoint-N`. A process killed while saving leaves a folder that transformers
takes for the newest checkpoint but cannot load. Here the trainer's own `_save_checkpoint` runs unchanged, in another
folder (`Staging`). All ranks meet four times:

    prepared    the folder is there
    written     every rank has written its part
    flushed     all of it is on the disk
    published   `checkpoint-N` is there; only now are older ones deleted, and uploads begin

While it is being written, a checkpoint is in `output_dir/_unfinished_checkpoint/NUMBER/checkpoint-N`, on the same file
system. Neither `get_last_checkpoint` nor `rotate_checkpoints` looks there, and transformers' uploads to the hub leave
out names that begin with an underscore. So at any moment `checkpoint-N` is absent, the earlier one, or complete.

A rank that fails on the way says so at the next meeting, and all raise the same `CheckpointError`. So that it gets
there, what it could not write (weights, optimizer, states) is remembered and not raised, and it goes on through all
calls in which the others wait for it. What fails inside such a call itself is raised at once on that rank, since a
meeting would wait for ranks that wait elsewhere; the launcher then ends them.

Not covered: `save_model` to `output_dir` itself; a checkpoint engine of DeepSpeed that goes on writing after its call
returns; and `save_total_limit: 1` with `load_best_model_at_end`, where transformers deletes the last checkpoint at the
end of the training in place (a kill there leaves half of it, which `last_complete_checkpoint` passes over).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from ...errors import CheckpointError, ConfigurationError
from ...guard.agreement import Agreement
from ...trainer import upstream
from .in_use import FolderLock
from .stop_signal import SaveOnSignal
from .whole import (
    REPLACED,
    STATE,
    UNFINISHED,
    checkpoint_problem,
    checkpoint_steps,
    last_complete_checkpoint,
    put_back,
)

_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""Errors of a write to a full disk: from Python, PyTorch's archive writer and safetensors."""

logger = logging.getLogger(__name__)

_NO_STEP = 2**62
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class SafeCheckpoints:
    """Put it before any subclass of `transformers.Trainer`; takes its arguments and one more.

    Args:
        *arguments: As in the trainer.
        stop_signals: Signals that save a checkpoint and end the training; see `stop_signal`. None with `()`.
        **keywords: As in the trainer.

    Raises:
        ConfigurationError: `enable_jit_checkpoint` is set, or a signal cannot be handled.
        UpstreamError: The wrapped methods of transformers have changed.
    """

    args: Any
    state: Any
    control: Any
    accelerator: Any
    model: Any
    _staging: Staging | None = None
    _push_later = False

    def __init__(
        self, *arguments: Any, stop_signals: Sequence[signal.Signals | int] = (signal.SIGTERM,), **keywords: Any
    ) -> None:
        upstream.check_class(Trainer, upstream.SAVING)
        self._stop = SaveOnSignal(stop_signals)
        super().__init__(*arguments, **keywords)
        if self.args.enable_jit_checkpoint:
            raise ConfigurationError(
                "enable_jit_checkpoint=True saves on SIGTERM without the other ranks; SafeCheckpoints coordinates "
                "them. Remove enable_jit_checkpoint."
            )
        self.add_callback(self._stop)  # type: ignore[attr-defined]
        self.add_callback(_SayFinished())  # type: ignore[attr-defined]

    @property
    def stopped_by_signal(self) -> signal.Signals | None:
        """The signal that ended the last `train`, the same on all ranks; None if it ran to its end.

        If set, skip the final evaluation and end the script with `exit_status`.
        """
        return self._stop.stopped_by

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Train after removing what a killed save left; the run locks its folder (see `in_use`).

        Resuming a finished run logs that and trains no step.

        Args:
            resume_from_checkpoint: As in the trainer; True means the newest checkpoint that is whole on all machines.
            *arguments: As in the trainer.
            **keywords: As in the trainer.

        Raises:
            CheckpointError: There is no such checkpoint, one could not be written on some rank, or another run uses the
                same folder.
        """
        lock = FolderLock(Path(self.args.output_dir), self._number_of_rank_0())
        try:
            with self._agree():
                if self.args.local_process_index == 0:
                    lock.acquire()
            with self._agree():
                if self.args.local_process_index == 0:
                    remove_leftovers(Path(self.args.output_dir))
            if resume_from_checkpoint is True:
                resume_from_checkpoint = self._agreed_checkpoint()
            return super().train(resume_from_checkpoint, *arguments, **keywords)  # type: ignore[misc]
        finally:
            lock.release()
            self._stop.restore(deliver=False)  # already done, unless an error was raised

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> None:
        """As in the trainer, but run no step if none is left: the trainer only checks after each step.

        When a finished run is resumed, transformers trains one step too many. Releases without this method, up to at
        least 5.2, still do.
        """
        if _is_finished(self.state):
            self.control.should_training_stop = True
            return
        super()._run_epoch(*arguments, **keywords)  # type: ignore[misc]

    def _load_from_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        """As in the trainer; parameters keep their types.

        TRL trains QLoRA's adapters in bfloat16, but PEFT (0.21) loads them in float32, so a resumed run would round
        differently.
        """
        types = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        super()._load_from_checkpoint(*arguments, **keywords)  # type: ignore[misc]
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != types.get(name, parameter.dtype):
                parameter.data = parameter.data.to(types[name])

    # ------------------------------------------------------------------ one save

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staging = Staging(
            Path(self._get_output_dir(trial)),
            name,
            number=self._number_of_rank_0(),
            rank=self.accelerator.process_index,
            leader=self.args.local_process_index == 0,
        )
        try:
            with self._agree(), staging.explain_errors():
                staging.prepare()
            staging.elect()
            self._staging, self._push_later = staging, False
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self._name_best(staging)
            except (*_WRITE_ERRORS, CheckpointException) as error:
                if isinstance(error, _OutOfStepError):
                    raise staging.error_of(error.__cause__ or error) from error.__cause__
                staging.fail(error)
            finally:
                self._staging = None
            with self._agree():
                if staging.failure is not None:
                    raise staging.failure
            with self._agree(), staging.explain_errors():
                staging.flush()
            with self._agree(), staging.explain_errors():
                # On other machines a part is all there should be: transformers writes the weights on the first alone,
                # also with save_on_each_node.
                if self.args.process_index == 0:
                    staging.check()
                staging.publish()
            if staging.publishes:
                self._rotate(staging)
        finally:
            staging.discard()
        if self._push_later:
            super()._push_from_checkpoint(str(staging.final))  # type: ignore[misc]

    def _get_output_dir(self, trial: Any) -> str:
        if self._staging is not None:
            return str(self._staging.folder)
        folder: str = super()._get_output_dir(trial)  # type: ignore[misc]
        return folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads run in the background, so they must wait until the checkpoint is in its final place."""
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]
        else:
            self._push_later = True

    def _name_best(self, staging: Staging) -> None:
        """Set the best checkpoint's final path: the trainer looked for it in the staging folder."""
        state, best = self.state, self.state.best_global_step
        if not best:
            return
        place = staging.run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best}"
        if best == state.global_step or place.is_dir():
            state.best_model_checkpoint = str(place)
            if self.args.should_save:
                state.save_to_json(str(staging.checkpoint / STATE))

    def _rotate(self, staging: Staging) -> None:
        """Delete the oldest checkpoints beyond `save_total_limit`, but neither this one nor the best."""
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        if limit is None or limit <= 0:
            return
        present = [Path(path) for path in sort_checkpoints(str(staging.run_dir), use_mtime=True)]
        protected = {staging.final, *([Path(best)] if best is not None else [])} & {*present}
        surplus = len(present) - max(limit, len(protected))
        for checkpoint in [path for path in present if path not in protected][: max(surplus, 0)]:
            staging.remove(checkpoint)

    # ------------------------------------------------------------------ what may fail on one rank alone

    def create_model_card(self, *arguments: Any, **keywords: Any) -> None:
        """As in the trainer; a failure while saving is raised when all ranks meet."""
        self._write_or_remember(super().create_model_card, *arguments, **keywords)  # type: ignore[misc]

    def save_model(self, *arguments: Any, **keywords: Any) -> None:
        """As in the trainer."""
        with self._in_step():
            super().save_model(*arguments, **keywords)  # type: ignore[misc]

    def _save(self, *arguments: Any, **keywords: Any) -> None:
        self._write_or_remember(super()._save, *arguments, **keywords)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._in_step(), self._remember_torch_save_errors():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _save_scaler(self, output_dir: str) -> None:
        self._write_or_remember(super()._save_scaler, output_dir)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        self._write_or_remember(super()._save_rng_state, output_dir)  # type: ignore[misc]

    def _write_or_remember(self, write: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """Write; with several ranks remember a failure while saving, because the others wait later."""
        staging = self._staging
        if staging is None or self.accelerator.num_processes == 1:
            write(*arguments, **keywords)
            return
        try:
            write(*arguments, **keywords)
        except _WRITE_ERRORS as error:
            staging.fail(error)

    @contextmanager
    def _remember_torch_save_errors(self) -> Iterator[None]:
        """The same for `torch.save`, which DeepSpeed and FSDP call between collectives."""
        save, staging = torch.save, self._staging
        if staging is None or self.accelerator.num_processes == 1:
            yield
            return

        def kept_save(obj: Any, f: Any, *arguments: Any, **keywords: Any) -> None:
            if isinstance(f, (str, Path)) and Path(f).is_relative_to(staging.folder):
                if staging.failure is None:  # else it is lost anyway
                    self._write_or_remember(save, obj, f, *arguments, **keywords)
            else:
                save(obj, f, *arguments, **keywords)

        torch.save = kept_save
        try:
            yield
        finally:
            torch.save = save

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Mark exceptions from methods in which ranks wait for each other; torch's own exception reaches all."""
        try:
            yield
        except _WRITE_ERRORS as error:
            if self._staging is None or self.accelerator.num_processes == 1:
                raise
            raise _OutOfStepError from error

    # ------------------------------------------------------------------ what ranks agree on

    @contextmanager
    def _agree(self) -> Iterator[None]:
        accelerator = self.accelerator
        with Agreement(
            accelerator.process_index, accelerator.num_processes, accelerator.gather, accelerator.device
        ).section():
            yield

    def _gather(self, number: int) -> list[int]:
        mine = torch.tensor([number], dtype=torch.int64, device=self.accelerator.device)
        numbers: list[int] = self.accelerator.gather(mine).tolist()
        return numbers

    def _number_of_rank_0(self) -> int:
        """A random number of rank 0, without touching seeded generators."""
        return self._gather(secrets.randbits(60))[0]

    def _agreed_checkpoint(self) -> str:
        """The newest checkpoint that is complete on every machine."""
        folder = self.args.output_dir
        step, leads = _NO_STEP, self.args.local_process_index == 0
        while True:
            found = None
            with self._agree():
                found = last_complete_checkpoint(folder, step) if leads else None
            mine = _NO_STEP if not leads else -1 if found is None else int(found.rpartition("-")[2])
            steps = [s for s in self._gather(mine) if s != _NO_STEP]
            step = min(steps)
            if step < 0:
                there = ", ".join(f"{PREFIX_CHECKPOINT_DIR}-{s}" for s in checkpoint_steps(folder)) or "nothing"
                raise CheckpointError(
                    f"resume_from_checkpoint=True found no checkpoint in {folder} that is complete on all machines; "
                    f"this one has {there}. Start without resume_from_checkpoint, or name a checkpoint."
                )
            if max(steps) == step:
                return str(Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-{step}")


def _is_finished(state: Any) -> bool:
    return bool(0 < state.max_steps <= state.global_step)


class _SayFinished(TrainerCallback):
    """Reports that a resumed run has nothing left to do."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if _is_finished(state) and state.is_world_process_zero:
            logger.warning(
                "The run in %s is finished: its checkpoint is at step %s of %s, so nothing is trained. Raise "
                "max_steps (or num_train_epochs) to continue, or remove resume_from_checkpoint to start over.",
                args.output_dir,
                state.global_step,
                state.max_steps,
            )


class _OutOfStepError(OSError):
    """A failure between collective calls; its cause is the original error."""


# ------------------------------------------------------------------------------------------- one save, on the disk


class Staging:
    """One save of one checkpoint, as one rank sees it.

    Among the machines' first processes that see the same folder, the lowest rank acts for all. So it does not matter
    whether machines share a disk.

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
        """Remove what killed saves left, and make the folder; each machine's first process does this."""
        if self.leader:
            remove_leftovers(self.run_dir, keep=self.folder.name)
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"writer-{self.rank}").touch()

    def elect(self) -> None:
        """Find out whether this process acts for its disk; called after all have prepared."""
        writers = [int(path.name.removeprefix("writer-")) for path in self.folder.glob("writer-*")]
        self.publishes = self.leader and min(writers, default=self.rank) == self.rank

    def flush(self) -> None:
        """Flush files and folders to disk, so that no power cut can undo the next step."""
        if self.publishes:
            for folder, _, files in os.walk(self.checkpoint):
                for file in files:
                    _sync(os.path.join(folder, file))  # noqa: PTH118 - `os.walk` gives strings
                _sync(folder)

    def check(self) -> None:
        """Check that the checkpoint is complete, in case something else changed the folder.

        Raises:
            CheckpointError: Something is missing or cut short.
        """
        if self.publishes and (problem := checkpoint_problem(self.checkpoint)):
            raise CheckpointError(
                f"{self.name} was written to {self.run_dir} but is incomplete: {problem}. It was not published, and "
                f"earlier checkpoints are unchanged. Does something else remove files there?"
            )

    def publish(self) -> None:
        """Move the checkpoint to its place in one step, even if one of that name exists."""
        if not self.publishes:
            return
        if not os.path.lexists(self.final):
            self.checkpoint.rename(self.final)
        elif not _exchange(self.checkpoint, self.final):
            # Not supported by this file system (NFS, say): a kill between these two lines is repaired later.
            replaced = self.run_dir / UNFINISHED / REPLACED
            replaced.mkdir(exist_ok=True)
            self.final.rename(replaced / self.name)
            self.checkpoint.rename(self.final)
        _sync(self.run_dir)

    def remove(self, checkpoint: Path) -> None:
        """Delete an older checkpoint; rename it first, so that no partial one stays under its name."""
        with suppress(OSError):
            checkpoint.rename(self.folder / f"old-{checkpoint.name}")
        shutil.rmtree(checkpoint, ignore_errors=True)

    def discard(self) -> None:
        """Remove everything unfinished, and what was replaced."""
        if self.leader and self.publishes is not False:
            remove_leftovers(self.run_dir)

    def fail(self, error: BaseException) -> None:
        """Remember a failure of this rank until all ranks meet, and free its space at once.

        Only files are removed, so that ranks can still write until they meet. Hidden files stay, because another rank
        is about to rename them and would fail too, and be blamed.
        """
        if self.failure is None:
            self.failure = self.error_of(error)
            for file in [*self.folder.rglob("*")]:
                if file.is_file() and not file.name.startswith(("writer-", ".")):
                    file.unlink(missing_ok=True)

    def error_of(self, error: BaseException) -> CheckpointError:
        """Make the error that says what was written, what is free and what to do."""
        if isinstance(error, CheckpointError):
            return error
        written, free = _size(self.folder), _free(self.run_dir)
        older = checkpoint_steps(self.run_dir) if self.run_dir.is_dir() else []
        before = (
            f"; checkpoint-{older[0]} takes {_bytes(_size(self.run_dir / f'checkpoint-{older[0]}'))}" if older else ""
        )
        kept = "Older checkpoints are unchanged" if older else "There is no older checkpoint"
        made = CheckpointError(
            f"{self.name} could not be written to {self.run_dir}: {_reason(error)}. {_bytes(written)} were written, "
            f"and {free} are free beside them{before}. {kept}, and this one's files were removed. Make "
            f"room there (quota and `ulimit -f` count too), set save_total_limit or save_only_model, or "
            "choose another output_dir. Then resume."
        )
        made.__cause__ = error
        return made

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turn an operating system's error into one that says what to do."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise self.error_of(error) from error


def remove_leftovers(run_dir: Path, keep: str = "") -> None:
    """Remove what killed saves left, after restoring a checkpoint that was being replaced.

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
    """Swap two folders in one step; False if the system cannot."""
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
