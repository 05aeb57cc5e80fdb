"""The recipes' trainer, and a training between two evaluations that works on every engine."""

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.launch.checkpoints import SafeCheckpoints, exit_status
from trl_grpo_ext.launch.engine import EngineCheck, ExpectedRun

from .processes import leave
from .progress import print_short_lines
from .quantised import keep_4_bit_trainable, keep_adapters_in_float32
from .results import first_evaluation


class RecipeTrainer(SafeCheckpoints, GRPOExtTrainer):
    """`GRPOExtTrainer` with complete checkpoints or none, which saves and stops on SIGTERM."""

    eval_temperature: float | None = None
    adapters_in_float32 = True  # see `train_and_score`; `doctor` asks

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """Evaluate as usual, at the temperature of evaluations."""
        with _sampling_at(self, self.eval_temperature):
            return super().evaluate(*arguments, **keywords)


@contextmanager
def _sampling_at(trainer: Any, temperature: float | None) -> Iterator[None]:
    """A context in which generation has another temperature; `None` for no change."""
    if temperature is None:
        yield
        return
    holder = trainer.vllm_generation if trainer.use_vllm else trainer.generation_config
    before = holder.temperature
    try:
        _set_temperature(trainer, holder, temperature)
        yield
    finally:
        _set_temperature(trainer, holder, before)


def _set_temperature(trainer: Any, holder: Any, temperature: float) -> None:
    holder.temperature = temperature
    if not trainer.use_vllm:
        trainer.generation_kwargs["temperature"] = temperature  # TRL lays them over the model's own


@dataclass(frozen=True)
class Scored:
    """A finished training."""

    before: dict[str, Any]
    after: dict[str, Any]
    seconds: float
    facts: dict[str, Any]


def train_and_score(trainer: RecipeTrainer, asked: ExpectedRun, *lines: str) -> Scored:
    """Train between two evaluations, check what was asked for, and save the model and the trainer's state."""
    keep_4_bit_trainable(trainer.model)
    if asked.bits:
        keep_adapters_in_float32(trainer.model)
    print_short_lines(trainer)
    engine = EngineCheck(trainer, asked)
    for line in lines:
        trainer.accelerator.print(line, flush=True)
    resumed = trainer.args.resume_from_checkpoint
    # The first evaluation runs inside: before that, ZeRO and FSDP have no model that can generate.
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=resumed)
    seconds = time.perf_counter() - started
    exit_if_stopped(trainer)
    before = first_evaluation(trainer.state.log_history)
    if resumed is None:
        seconds -= before.get("eval_runtime", 0.0)
    after = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    return Scored(before, after, seconds, engine.facts)


def exit_if_stopped(trainer: RecipeTrainer) -> None:
    """Exit if a signal ended the training; the checkpoint is saved, and nothing else is worth the time."""
    stopped_by = trainer.stopped_by_signal
    if stopped_by is None:
        return
    saved = Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")
    how = f"--resume_from_checkpoint {shlex.quote(str(saved))}"
    trainer.accelerator.print(f"{stopped_by.name}: saved {saved}; continue with {how}", flush=True)
    leave(trainer)
    sys.exit(exit_status(stopped_by))
