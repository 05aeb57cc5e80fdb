"""The recipes' trainer: ours, with checkpoints that survive."""

from __future__ import annotations

import sys

from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.safe_checkpoints import SafeCheckpoints, exit_status


class RecipeTrainer(SafeCheckpoints, GRPOExtTrainer):
    """`GRPOExtTrainer` whose checkpoints are whole or not there, and that saves and stops on SIGTERM."""


def end_if_stopped(trainer: RecipeTrainer) -> None:
    """End the program where a signal ended the training; the checkpoint is there, so nothing else is worth the time.

    Raises:
        SystemExit: With 128 plus the signal's number, as a shell reports it.
    """
    stopped_by = trainer.stopped_by_signal
    if stopped_by is None:
        return
    step, folder = trainer.state.global_step, trainer.args.output_dir
    trainer.accelerator.print(
        f"{stopped_by.name}: saved checkpoint-{step} in {folder}; go on with --resume_from_checkpoint true", flush=True
    )
    trainer.accelerator.end_training()
    sys.exit(exit_status(stopped_by))
