"""The recipes' trainer, and a training between two evaluations that works on every engine."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.launch.checkpoints import SafeCheckpoints, exit_status
from trl_grpo_ext.launch.engine import Asked, EngineCheck

from .processes import leave
from .quantised import keep_4_bit_trainable, keep_adapters_in_float32
from .results import first_evaluation


class RecipeTrainer(SafeCheckpoints, GRPOExtTrainer):
    """`GRPOExtTrainer` whose checkpoints are whole or not there, and that saves and stops on SIGTERM."""


@dataclass(frozen=True)
class Scored:
    """A finished training.

    Attributes:
        before: The metrics of the evaluation before the first step; empty if a resumed run never had one.
        after: Those of the evaluation at the end.
        seconds: Of the training alone.
        facts: What ran, as `EngineCheck` found it.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    seconds: float
    facts: dict[str, Any]


def train_and_score(trainer: RecipeTrainer, asked: Asked, *lines: str) -> Scored:
    """Train between two evaluations, held to what was asked for, and save the model and the trainer's state.

    Args:
        trainer: Just constructed, with arguments from `check_setup`.
        asked: What it has to be.
        lines: To print before.

    Raises:
        EngineError: It is something else.
        SystemExit: A signal ended it; a checkpoint was saved.
    """
    keep_4_bit_trainable(trainer.model)
    if asked.bits:
        keep_adapters_in_float32(trainer.model)
    engine = EngineCheck(trainer, asked)
    for line in lines:
        trainer.accelerator.print(line, flush=True)
    resumed = trainer.args.resume_from_checkpoint
    # The first evaluation takes place inside: before that, ZeRO and FSDP have no model that could generate.
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=resumed)
    seconds = time.perf_counter() - started
    end_if_stopped(trainer)
    before = first_evaluation(trainer.state.log_history)
    if resumed is None:
        seconds -= before.get("eval_runtime", 0.0)
    after = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    return Scored(before, after, seconds, engine.facts)


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
    leave(trainer.accelerator)
    sys.exit(exit_status(stopped_by))
