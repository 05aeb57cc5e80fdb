"""Checkpoints that survive `kill -9`, SIGTERM and a full disk, for any `transformers.Trainer`.

transformers writes into `output_dir/checkpoint-N`; killed there, it leaves a folder that it takes for the newest
checkpoint but cannot load. Here the trainer's own `_save_checkpoint` runs unchanged in
`output_dir/_unfinished_checkpoint/checkpoint-N`, where nothing looks, and all ranks meet three times:

    prepared    the folder is there
    written     every rank has written its part
    published   it is flushed, and `checkpoint-N` is there; only now are older ones deleted, and uploads begin

So at any moment `checkpoint-N` is absent, the earlier one, or complete. Not covered: `save_model` to `output_dir`
itself, and a checkpoint engine of DeepSpeed that writes on after its call returns.
"""

import errno
import logging
import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ...errors import CheckpointError, ConfigurationError
from ...guard.agreement import Agreement
from ...records import checkpoint_state
from ...records.checkpoint_state import STATE, UNFINISHED, checkpoint_problem
from ...trainer.upstream import contract
from .stop_signal import SaveOnSignal

_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, CheckpointException)  # of a full disk

logger = logging.getLogger(__name__)


class SafeCheckpoints:
    """Put it before any subclass of `transformers.Trainer`; takes its arguments and one more.

    `stop_signals` save a checkpoint and end the training; there are none with `()`.

    Raises:
        ConfigurationError: `enable_jit_checkpoint` is set.
        UpstreamError: The wrapped methods of transformers have changed.
    """

    args: Any
    state: Any
    control: Any
    accelerator: Any
    model: Any
    _staging: Path | None = None

    def __init__(
        self, *arguments: Any, stop_signals: Sequence[signal.Signals | int] = (signal.SIGTERM,), **keywords: Any
    ) -> None:
        contract.check_class(Trainer, contract.SAVING)
        self._stop = SaveOnSignal(stop_signals)
        super().__init__(*arguments, **keywords)
        if self.args.enable_jit_checkpoint:
            raise ConfigurationError("enable_jit_checkpoint saves without the other ranks: remove it.")
        self.add_callback(self._stop)  # type: ignore[attr-defined]

    @property
    def stopped_by_signal(self) -> signal.Signals | None:
        """The signal that ended the last `train`, the same on all ranks; None if it ran to its end.

        If set, skip the final evaluation and end the script with `exit_status`.
        """
        return self._stop.stopped_by

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Train after removing what a killed save left.

        `resume_from_checkpoint` is as in the trainer; True means the newest checkpoint that is whole on all machines.
        Resuming a finished run trains no step. What transformers does not find in the checkpoint and goes on without
        (one saved with `save_only_model`, or by another number of processes) is a warning.

        Raises:
            CheckpointError: There is no such checkpoint, it is not whole, or this rank could not write one.
            EngineError: Another rank could not write one, and has ended.
        """
        folder = Path(self.args.output_dir)
        try:
            with self._agree():
                if self.args.local_process_index == 0:
                    _remove_leftovers(folder)
            if resume_from_checkpoint is True:
                resume_from_checkpoint = self._newest_checkpoint(folder)
            if resume_from_checkpoint:
                checkpoint = Path(resume_from_checkpoint)
                with self._agree():  # a folder of weights alone is not judged
                    if self.args.local_process_index == 0:
                        checkpoint_state.check_resumed(checkpoint, all_checksums=True)
                lacking = checkpoint_state.missing_state(checkpoint, self.args.process_index, self.args.world_size)
                if lacking and (checkpoint / STATE).is_file():
                    logger.warning("%s has no %s: the resumed run differs from one that went on.", checkpoint, lacking)
            return super().train(resume_from_checkpoint, *arguments, **keywords)  # type: ignore[misc]
        finally:
            self._stop.restore(deliver=False)  # already done, unless an error was raised

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> None:
        """As in the trainer, but no step if none is left: transformers (5.2 and before) trains one too many."""
        if 0 < self.state.max_steps <= self.state.global_step:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*arguments, **keywords)  # type: ignore[misc]

    def _load_from_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        """As in the trainer; parameters keep their types: TRL trains QLoRA's in bfloat16, PEFT loads float32."""
        types = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        super()._load_from_checkpoint(*arguments, **keywords)  # type: ignore[misc]
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != types.get(name, parameter.dtype):
                parameter.data = parameter.data.to(types[name])

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staging = run_dir / UNFINISHED
        leader = self.args.should_save  # of this disk
        try:
            with self._agree():
                if leader:
                    _remove_leftovers(run_dir)
                    staging.mkdir(parents=True)
            self._staging = staging
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self._name_best(run_dir, staging / name)
            except _WRITE_ERRORS as error:
                reason = str(error).strip().partition("\n")[0].rstrip(".")  # PyTorch adds a stack of its C++ code
                what = f"{name} could not be written to {run_dir}: {type(error).__name__}: {reason or 'no message'}"
                raise CheckpointError(f"{what}. Make room there, or choose another output_dir; then resume.") from error
            finally:
                self._staging = None
            with self._agree():  # every rank has written
                pass
            with self._agree():
                if leader:  # the first machine's is checked; elsewhere a part without weights is all there should be
                    _publish(staging / name, run_dir, check=self.args.process_index == 0)
            if leader:
                best = self.state.best_model_checkpoint
                rotate_checkpoints(str(run_dir), self.args.save_total_limit, best, use_mtime=True)
        finally:
            if leader:
                _remove_leftovers(run_dir)
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(run_dir / name))  # type: ignore[misc]

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or super()._get_output_dir(trial))  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads run in the background, so they must wait until the checkpoint is in its final place."""
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _name_best(self, run_dir: Path, staged: Path) -> None:
        """Set the best checkpoint's final path: the trainer looked for it in the staging folder."""
        state = self.state
        best = state.best_global_step
        place = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best}"
        if best and (best == state.global_step or place.is_dir()):
            state.best_model_checkpoint = str(place)
            if self.args.should_save:
                state.save_to_json(str(staged / STATE))

    def _agree(self) -> AbstractContextManager[None]:
        ranks = self.accelerator
        return Agreement(ranks.process_index, ranks.num_processes, ranks.gather).section()

    def _newest_checkpoint(self, folder: Path) -> str:
        """The newest complete checkpoint that the first process sees, on all ranks."""
        step = 0
        with self._agree():
            if self.args.process_index == 0:
                found = checkpoint_state.last_complete_checkpoint(folder)
                if found is None:
                    there = [f"{PREFIX_CHECKPOINT_DIR}-{step}" for step in checkpoint_state.checkpoint_steps(folder)]
                    has = ", ".join(there) or "none at all"
                    raise CheckpointError(f"There is no complete checkpoint to resume from in {folder}; it has {has}.")
                step = int(found.rpartition("-")[2])
        mine = torch.tensor([step], device=self.accelerator.device)
        return str(folder / f"{PREFIX_CHECKPOINT_DIR}-{self.accelerator.gather(mine).max()}")


def _publish(staged: Path, run_dir: Path, *, check: bool) -> None:
    """Move a checkpoint to its place, even if one of that name exists, once it is flushed and, if asked, checked."""
    for path in [*staged.rglob("*"), staged]:
        _sync(path)
    if check and (problem := checkpoint_problem(staged)):
        raise CheckpointError(f"{staged.name} in {run_dir} is incomplete, and was not published: {problem}.")
    final = run_dir / staged.name
    if os.path.lexists(final):  # a kill between these renames is repaired by `put_back`
        replaced = staged.parent / checkpoint_state.REPLACED
        replaced.mkdir(exist_ok=True)
        final.rename(replaced / staged.name)
    staged.rename(final)
    _sync(run_dir)


def _remove_leftovers(run_dir: Path) -> None:
    """Remove what killed saves left, after restoring a checkpoint that was being replaced."""
    checkpoint_state.put_back(run_dir)
    shutil.rmtree(run_dir / UNFINISHED, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system on which folders need no flushing
            raise
    finally:
        os.close(descriptor)
