"""Does a hook or an aggregation learn faster than plain TRL? Ten methods, two tasks, equal generated tokens.

    python -m bench.study run --output outputs/study [--jobs 2]
    python -m bench.study report --output outputs/study --docs docs

`run` first tunes each method's learning rate on the tuning seeds and the validation split, then trains at the chosen
rate on the evaluation seeds and measures on the test split. Every finished training is one line of `results.jsonl`;
started again, `run` does only what is missing. `report` writes the table between the markers of
`evidence.md` and the plot `images/study.png`. What is compared is in `TASKS` and `METHODS` below.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench import sorting, study_report
from bench.runner import QUIET, Results, run_missing
from bench.tables import machine
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.rewards.gsm8k_accuracy import gsm8k_accuracy

from embedded.word_problems import make_problems  # isort: skip (`sorting` puts the recipes on the path)

PLAIN = "plain TRL"
START = "before training"
TUNING_SEEDS = (101, 102)
EVALUATION_SEEDS = (1, 2, 3, 4, 5)
PACKAGES = ("trl-grpo-ext", "trl", "transformers", "torch", "accelerate")
EMBEDDED_MODEL = Path(__file__).resolve().parents[1] / "recipes" / "embedded" / "model"

Rewards = Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """A model, problems, a reward to train on, and what is measured."""

    reward: Rewards
    accuracy: Rewards
    methods: tuple[str, ...]
    token_budget: int
    learning_rates: tuple[float, ...]
    tuning_seeds: tuple[int, ...]
    batch_size: int
    num_generations: int
    max_completion_length: int
    held_out: int
    train_problems: int = 4096
    warmup_steps: int = 3

    def settings(self) -> dict[str, Any]:
        """What must be the same in all runs of one output folder, as JSON values."""
        values = asdict(replace(self, reward=str, accuracy=str))
        return {**values, "reward": self.reward.__name__, "accuracy": self.accuracy.__name__}


METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    **{
        name: {"advantage_hooks": [name]}
        for name in ("leave_one_out", "max_only", "entropy_shaping", "low_probability", "prefix_tree")
    },
    # A step is one digit: each gets its own reward, without those of the digits after it.
    "process_rewards": {
        "advantage_hooks": [{"name": "process_rewards", "form": "sum", "gamma": 0.0, "baseline": "none"}]
    },
    "seq_mean_token_mean": {"loss_aggregation": "seq_mean_token_mean"},
    "constant_length": {"loss_aggregation": "constant_length"},
    "length_power": {"loss_aggregation": "length_power"},
    "sign_balanced": {"loss_aggregation": "sign_balanced"},
}
"""What each method sets besides TRL's defaults. Parameters not given are the plugins' defaults."""

KINDS = {
    name: "plain" if not chosen else "hook" if "advantage_hooks" in chosen else "aggregation"
    for name, chosen in METHODS.items()
}

_AGGREGATIONS = tuple(name for name, kind in KINDS.items() if kind == "aggregation")
_HOOKS = ("leave_one_out", "entropy_shaping", "low_probability", "prefix_tree")

TASKS: dict[str, Task] = {
    "sorting": Task(
        reward=sorting.positions,
        accuracy=sorting.exact,
        methods=(PLAIN, *_HOOKS, "process_rewards", *_AGGREGATIONS),
        token_budget=20_000,
        learning_rates=(6e-5, 2e-4, 6e-4),
        tuning_seeds=TUNING_SEEDS,
        batch_size=64,
        num_generations=8,
        max_completion_length=sorting.LONGEST_COMPLETION,
        held_out=1000,
    ),
    "word problems": Task(
        reward=gsm8k_accuracy,
        accuracy=gsm8k_accuracy,
        methods=(PLAIN, *_HOOKS, "max_only", *_AGGREGATIONS),
        token_budget=16_000,
        learning_rates=(3e-5, 1e-4, 3e-4, 1e-3),
        tuning_seeds=TUNING_SEEDS,
        batch_size=32,
        num_generations=8,
        max_completion_length=56,
        held_out=256,
    ),
}


@dataclass(frozen=True)
class Run:
    """One training, or the measurement of the model that all of a task's trainings start from."""

    task: str
    method: str
    stage: str
    """`tuning` measures on the validation split, `evaluation` on the test split."""
    learning_rate: float
    seed: int


# ------------------------------------------------------------------------------------------------------------ tasks


def problems(task: str, split: str, size: int, seed: int) -> list[dict[str, str]]:
    """Rows of `prompt` and `answer`. The validation and the test split don't depend on the seed."""
    if task == "sorting":
        return sorting.problems(split, size, seed if split == "train" else 0)  # type: ignore[arg-type]
    if split == "train":
        rows = make_problems("train", size, seed)
    else:  # distinct problems of one draw: the first half validates, the second half tests
        rows = make_problems("heldout", 2 * size, 0)
        rows = rows[:size] if split == "validation" else rows[size:]
    return [{"prompt": f"Question: {row['question']}\nAnswer:", "answer": row["answer"]} for row in rows]


def model_of(task: str, folder: Path) -> Path:
    """The folder of the model that the task's trainings start from, made there where it must be made."""
    if task != "sorting":
        return EMBEDDED_MODEL
    return sorting.warm_up(folder / "sorting_model", steps=240, slips=0.3, batch_size=64, learning_rate=1e-3, seed=0)


@torch.no_grad()
def measure(task: str, split: str, model: Any, tokenizer: Any, longest: int | None = None) -> dict[str, float | None]:
    """Accuracy, mean reward and mean length of one sample at temperature 1 for each problem of a held-out split.

    Lengths are in tokens, with the end; those of right and of wrong completions are None if there are none.
    """
    settings = TASKS[task]
    # Prompts of one length together need no padding, and the order does not matter.
    rows = sorted(problems(task, split, settings.held_out, 0), key=lambda row: len(row["prompt"]))
    torch.manual_seed(0)
    model.eval()
    texts: list[str] = []
    lengths: list[int] = []
    for start in range(0, len(rows), 256):
        prompts = [row["prompt"] for row in rows[start : start + 256]]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        ids = model.generate(
            **batch,
            max_new_tokens=longest or settings.max_completion_length,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        ids = ids[:, batch["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
        ended = (ids == tokenizer.eos_token_id).cumsum(dim=1)
        lengths += ((ended == 0).sum(dim=1) + (ended[:, -1] > 0)).tolist()  # what follows the end is padding
    columns: Any = {"completions": texts, "answer": [row["answer"] for row in rows]}
    rewards = settings.reward(**columns)
    right = settings.accuracy(**columns)
    return {
        "accuracy": right.count(1.0) / len(rows),
        "reward": sum(map(float, rewards)) / len(rows),
        "length": sum(lengths) / len(rows),
        "length_right": mean_or_none([n for n, score in zip(lengths, right, strict=True) if score == 1.0]),
        "length_wrong": mean_or_none([n for n, score in zip(lengths, right, strict=True) if score != 1.0]),
    }


def mean_or_none(values: Sequence[float]) -> float | None:
    """None if there is no value: JSON has no NaN."""
    return statistics.fmean(values) if values else None


# --------------------------------------------------------------------------------------------------------- training


class TokenBudget(TrainerCallback):
    """Ends the training with the generation batch that reaches a number of completion tokens, padding not counted."""

    def __init__(self, tokens: int, batch_size: int) -> None:
        self.tokens = tokens
        self.batch_size = batch_size
        self.generated = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **rest: Any) -> None:
        # With a log at every step, and a step for every generation batch, this mean is over one batch.
        if logs and "completions/mean_length" in logs:
            self.generated += round(logs["completions/mean_length"] * self.batch_size)
            control.should_training_stop = self.generated >= self.tokens


def train_once(
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    model: Any,
    seed: int,
    chosen: Mapping[str, Any],
    *,
    callbacks: Sequence[Any] = (),
    watching: Sequence[Any] = (),
    plain: bool = False,
) -> Any:
    """Train a model, or the one in a folder, deterministic in the arguments alone; return the trainer."""
    random.seed(seed)
    torch.manual_seed(seed)
    chosen = dict(chosen)
    keywords = {}
    if watching:
        keywords["advantage_hooks"] = [*(chosen.pop("advantage_hooks", None) or []), *watching]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder,
            "seed": seed,
            "lr_scheduler_type": "constant_with_warmup",  # a decay needs the number of steps, which a callback decides
            "warmup_steps": task.warmup_steps,
            "max_steps": 1_000_000,  # never reached: a callback ends it
            "per_device_train_batch_size": task.batch_size,
            "gradient_accumulation_steps": 1,
            "num_generations": task.num_generations,
            "max_completion_length": task.max_completion_length,
            "loss_type": "dapo",
            "beta": 0.0,
            "temperature": 1.0,
            **QUIET,
            "logging_steps": 1,
        }
        trainer = (GRPOTrainer if plain else GRPOExtTrainer)(
            str(model) if isinstance(model, Path) else model,
            task.reward,
            (GRPOConfig if plain else GRPOExtConfig)(**{**settings, **chosen}),
            train_dataset=Dataset.from_list([dict(row) for row in rows]),
            callbacks=list(callbacks),
            **keywords,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer


def train(run: Run, model: Path, *, task: Task | None = None, save_to: Path | None = None) -> dict[str, Any]:
    """Train once and measure. With `save_to` the policy is saved there; `task` stands in for the run's own."""
    task = task or TASKS[run.task]
    budget = TokenBudget(task.token_budget, task.batch_size)
    rows = problems(run.task, "train", task.train_problems, run.seed)
    chosen = {"learning_rate": run.learning_rate, **METHODS[run.method]}
    trainer = train_once(task, rows, model, run.seed, chosen, callbacks=[budget], plain=run.method == PLAIN)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    if save_to is not None:
        trainer.save_model(str(save_to))
    split = "validation" if run.stage == "tuning" else "test"
    measured = measure(run.task, split, trainer.model, trainer.processing_class)
    steps = trainer.state.global_step
    return {**measured, "tokens": budget.generated, "steps": steps, "last_loss": losses[-1] if losses else None}


def work(run: Run, model: Path) -> dict[str, Any]:
    """One run in a worker process: the line of `results.jsonl`."""
    started = time.process_time()  # other work on the machine does not count
    if run.method == START:
        tokenizer = AutoTokenizer.from_pretrained(model)
        result: dict[str, Any] = measure(run.task, "test", AutoModelForCausalLM.from_pretrained(model), tokenizer)
    else:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
            result = train(run, model)
    return {**asdict(run), **result, "seconds": round(time.process_time() - started, 2)}


# -------------------------------------------------------------------------------------------------------------- plan


def tuning_runs(task: str) -> list[Run]:
    """Every method at every rate on the tuning seeds."""
    settings = TASKS[task]
    return [
        Run(task, method, "tuning", rate, seed)
        for seed in settings.tuning_seeds
        for method in settings.methods
        for rate in settings.learning_rates
    ]


def chosen_rates(task: str, results: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The rate with the highest mean validation accuracy of each method; of equals the smaller.

    Methods whose tuning is not complete are left out.
    """
    settings = TASKS[task]
    tuned = [r for r in results if r["task"] == task and r["stage"] == "tuning"]
    chosen = {}
    for method in settings.methods:
        values = {
            rate: [r["accuracy"] for r in tuned if r["method"] == method and r["learning_rate"] == rate]
            for rate in settings.learning_rates
        }
        if all(len(found) == len(settings.tuning_seeds) for found in values.values()):
            chosen[method] = max(sorted(values), key=lambda rate: sum(values[rate]))
    return chosen


def given_rates(task: str, results: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The rate of each method's evaluation, where `--rate` gave one in the place of tuning."""
    found = {r["method"]: r["learning_rate"] for r in results if r["task"] == task and r["stage"] == "evaluation"}
    return {method: found[method] for method in TASKS[task].methods if method in found}


def evaluation_runs(task: str, rates: Mapping[str, float]) -> list[Run]:
    """The model before training, and every method that has a rate on the evaluation seeds, seed by seed."""
    runs = [Run(task, method, "evaluation", rate, seed) for seed in EVALUATION_SEEDS for method, rate in rates.items()]
    return [Run(task, START, "evaluation", 0.0, 0), *runs]


def check_settings(folder: Path) -> None:
    """Write the study's settings down, or stop where the folder holds results of other ones."""
    settings = {
        "tasks": {name: task.settings() for name, task in TASKS.items()},
        "methods": METHODS,
        "evaluation_seeds": EVALUATION_SEEDS,
        "versions": versions(),
        "machine": machine(),
    }
    text = json.dumps(settings, indent=1, sort_keys=True)
    path = folder / "settings.json"
    if path.exists() and path.read_text() != text:
        raise SystemExit(f"error: {path} says that the results there were made with other settings or versions.")
    path.write_text(text)


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {name: version(name) for name in PACKAGES}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--output", type=Path, default=Path("outputs/study"), help="folder of the results")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, one thread each")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=tuple(METHODS))
    parser.add_argument("--rate", type=float, help="learning rate of all methods, in the place of tuning each one's")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where `report` finds evidence.md")
    options = parser.parse_args(words)

    results = Results(options.output / "results.jsonl")
    if options.command == "report":
        settings = json.loads((options.output / "settings.json").read_text())
        rates = {task: chosen_rates(task, results.lines) or given_rates(task, results.lines) for task in options.tasks}
        study_report.write(options.docs, results.lines, rates, KINDS, settings, START)
        return
    check_settings(options.output)
    torch.set_num_threads(1)
    for task in options.tasks:
        one = partial(work, model=model_of(task, options.output))
        methods = [method for method in TASKS[task].methods if method in options.methods]
        if options.rate is None:
            runs = [run for run in tuning_runs(task) if run.method in methods]
            run_missing(runs, results, options.jobs, one, "accuracy")
        rates = chosen_rates(task, results.lines) if options.rate is None else dict.fromkeys(methods, options.rate)
        runs = [run for run in evaluation_runs(task, rates) if run.method in (*methods, START)]
        run_missing(runs, results, options.jobs, one, "accuracy")


if __name__ == "__main__":
    main()
