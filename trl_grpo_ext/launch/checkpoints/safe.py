"""Checkpoints that survive `kill -9`, SIGTERM and a full disk, for any `transformers.Trainer`.

    class MyTrainer(SafeCheckpoints, GRPOExtTrainer): ...

    trainer.train(resume_from_checkpoint=last_complete_checkpoint(args.output_dir))
    if trainer.stopped_by_signal:
        sys.exit(exit_status(trainer.stopped_by_signal))

transformers writes into `output_dir/checkpoint-N`, and a process that is killed there leaves a folder that it takes for
the newest checkpoint and cannot load. Here the trainer's own `_save_checkpoint` runs as it is, given another folder
(`Staging`). All ranks meet four times:

    prepared    the folder is there
    written     every rank has written its part
    flushed     all of it is on the disk
    published   `checkpoint-N` is there; only now are older ones deleted, and uploads begin

While it is written a checkpoint lies in `output_dir/_unfinished_checkpoint/NUMBER/checkpoint-N`, on the same file
system. Neither `get_last_checkpoint` nor `rotate_checkpoints` looks there, and transformers' uploads to the hub leave
out names that begin with an underscore. So at any moment `checkpoint-N` is absent, the earlier one, or whole.

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
"""What writing raises on a full disk: Python, PyTorch's archive writer, safetensors."""

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
        UpstreamError: The methods of transformers that are wrapped here have changed.
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
                "enable_jit_checkpoint=True saves on SIGTERM without asking the other ranks; SafeCheckpoints does it "
                "with them. Remove enable_jit_checkpoint."
            )
        self.add_callback(self._stop)  # type: ignore[attr-defined]
        self.add_callback(_SayFinished())  # type: ignore[attr-defined]

    @property
    def stopped_by_signal(self) -> signal.Signals | None:
        """The signal that ended the last `train`, the same on all ranks; None if it ran to its end.

        Skip the final evaluation then, and end the script with `exit_status`.
        """
        return self._stop.stopped_by

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Train as the trainer does, after removing what a killed save left; alone in its folder (see `in_use`).

        A run that is resumed where it had ended is finished: that is logged, and no step is trained.

        Args:
            resume_from_checkpoint: As in the trainer; True means the newest checkpoint that is whole on all machines.
            *arguments: As in the trainer.
            **keywords: As in the trainer.

        Raises:
            CheckpointError: There is no such checkpoint; one could not be written, on this rank or on another; or
                another run is at work in the same folder.
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
            self._stop.restore(deliver=False)  # done already, unless an error is on its way

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> None:
        """As in the trainer, which looks after each step whether it was the last one: there may be none to do.

        transformers trains one step more whenever a run that has done all of them is resumed. Releases that have no
        such method, up to 5.2 at least, still do.
        """
        if _is_finished(self.state):
            self.control.should_training_stop = True
            return
        super()._run_epoch(*arguments, **keywords)  # type: ignore[misc]

    def _load_from_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        """As in the trainer; parameters keep their types.

        TRL trains the adapters of QLoRA in bfloat16. PEFT loads them in float32 (0.21), and the resumed run would round
        otherwise than the one that was interrupted.
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
        """An upload goes on in the background, so it must wait for the final place."""
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]
        else:
            self._push_later = True

    def _name_best(self, staging: Staging) -> None:
        """Where the best checkpoint will be, or is: the trainer looked for it in the folder it was given."""
        state, best = self.state, self.state.best_global_step
        if not best:
            return
        place = staging.run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best}"
        if best == state.global_step or place.is_dir():
            state.best_model_checkpoint = str(place)
            if self.args.should_save:
                state.save_to_json(str(staging.checkpoint / STATE))

    def _rotate(self, staging: Staging) -> None:
        """Delete the oldest beyond `save_total_limit`, but neither this one nor the best."""
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
        """As in the trainer; a failure while saving waits until all ranks meet."""
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
        """Write; on several ranks a failure while saving is remembered, because others wait further on."""
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
        """The same for `torch.save`, with which DeepSpeed and FSDP write between calls that all ranks take part in."""
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
        """Mark what escapes from a method in which ranks wait for each other; torch's own exception reaches all."""
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
        """A random number that leaves all seeded generators alone."""
        return self._gather(secrets.randbits(60))[0]

    def _agreed_checkpoint(self) -> str:
        """The newest checkpoint that is whole on every machine."""
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
                    f"resume_from_checkpoint=True found no checkpoint in {folder} that is whole on all machines; this "
                    f"one has {there}. Start without resume_from_checkpoint, or name a checkpoint."
                )
            if max(steps) == step:
                return str(Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-{step}")


def _is_finished(state: Any) -> bool:
    return bool(0 < state.max_steps <= state.global_step)


class _SayFinished(TrainerCallback):
    """Says that a run which is resumed has nothing left to do."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if _is_finished(state) and state.is_world_process_zero:
            logger.warning(
                "The run in %s is finished: its checkpoint is at step %s of %s, so nothing is trained. Raise max_steps "
                "(or num_train_epochs) to go on, or leave resume_from_checkpoint away to begin again.",
                args.output_dir,
                state.global_step,
                state.max_steps,
            )


class _OutOfStepError(OSError):
    """A failure in the middle of calls that the ranks make together; its cause is the failure."""


# ------------------------------------------------------------------------------------------- one save, on the disk


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

    def check(self) -> None:
        """Make sure that all is there and whole, whatever else has been at work in the folder.

        Raises:
            CheckpointError: Something is missing or cut short.
        """
        if self.publishes and (problem := checkpoint_problem(self.checkpoint)):
            raise CheckpointError(
                f"{self.name} was written to {self.run_dir} and is not whole: {problem}. It was not published, and "
                "what was there before is as it was. Does something else remove files there?"
            )

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

    def remove(self, checkpoint: Path) -> None:
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
    def explain_errors(self) -> Iterator[None]:
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
