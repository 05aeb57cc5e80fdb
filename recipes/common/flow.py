"""What every recipe does once it has settings and rows: train between two evaluations and report."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import set_seed
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.launch.engine import ExpectedRun

from .errors import RecipeError, loading_errors
from .problems import Row, whole_batches
from .processes import leave
from .results import held_out, print_places, print_table, save_metrics
from .settings import samples_per_problem
from .trainer import RecipeTrainer, train_and_score

History = Sequence[Mapping[str, Any]]
Scores = Mapping[str, float]


def train_and_report(
    args: GRPOExtConfig,
    model_args: ModelConfig,
    asked: ExpectedRun,
    rows: tuple[list[Row], list[Row]],
    *,
    curve: Callable[[Path, History, Scores, Scores], Path],
    what: str = "prompts",
    dataset: Callable[[list[Row]], Dataset] = Dataset.from_list,
    trainer_class: type[RecipeTrainer] = RecipeTrainer,
    table: Callable[[Mapping[str, Any]], Scores] = held_out,
    notes: Sequence[str] = (),
    eval_temperature: float | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Load, evaluate, train, evaluate, save; the last line of a recipe's `main`."""
    model = str(model_args.model_name_or_path)
    samples = samples_per_problem(args)
    train_rows = rows[0]
    processes = PartialState().num_processes
    if eval_temperature is not None and not (math.isfinite(eval_temperature) and eval_temperature > 0):
        raise RecipeError(f"--eval_temperature must be a positive number, got {eval_temperature!r}.")
    eval_rows = whole_batches(
        *rows,
        train_batch=args.generation_batch_size // args.num_generations,
        eval_batch=args.per_device_eval_batch_size * processes // samples,
    )
    set_seed(args.seed)  # adapters start equal on all ranks
    with loading_errors(model):
        trainer = trainer_class(
            model=model,
            args=args,
            train_dataset=dataset(train_rows),
            eval_dataset=dataset(eval_rows),
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    trainer.eval_temperature = eval_temperature
    counts = f"{len(train_rows)} training {what}, {len(eval_rows)} held out; {processes} process(es)"
    done = train_and_score(trainer, asked, *notes, counts)
    if trainer.is_world_process_zero():
        folder = Path(args.output_dir)
        history = trainer.state.log_history
        before = table(done.before)
        after = table(done.after)
        run = {
            "model": model,
            "eval_temperature": eval_temperature or args.temperature,
            **(facts or {}),
            "training_seconds": done.seconds,
            **done.facts,
        }
        print_table(before, after, f"{len(eval_rows)} held-out {what}, {samples} sample(s) each")
        print(f"step {trainer.state.global_step} reached in {done.seconds:.0f} s of training")
        metrics = save_metrics(folder, {"before": before, "after": after, "run": run}, history)
        print_places(folder, metrics=metrics, curve=curve(folder, history, before, after))
    leave(trainer)
