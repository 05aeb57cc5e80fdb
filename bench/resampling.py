"""Does refilling the batch pay? Plain TRL, compact updates and `resample`, at equal generated tokens and equal updates.

    python -m bench.resampling run --output outputs/resampling [--jobs 2]
    python -m bench.resampling report --output outputs/resampling --docs docs

The tasks and their learning rates are those of `bench.study`, where the rate of plain TRL was tuned; all methods have
it. One training gives both comparisons: it is measured on the test split when it has generated the tokens, and when it
has made the updates. Every training is one line of `results.jsonl`; started again, `run` does only what is missing.
`report` writes a section of `study.md`, between markers, and the plot `images/resampling.png`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from bench.study import EVALUATION_SEEDS, TASKS, measure, model_of, prepare_worker, problems
from bench.study_report import estimate
from bench.tables import markdown, write_block
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

METHODS: dict[str, dict[str, Any]] = {
    "plain TRL": {},
    "compact": {"compact_updates": "exact"},
    "refill": {"compact_updates": "exact", "resample": {"filter": "signal", "max_rounds": 4}},
}
RATES = {"sorting": 2e-4, "word problems": 1e-4}
"""What `bench.study` chose for plain TRL. Rewards are right or wrong here, so that groups fall silent."""
TOKENS = {"sorting": 40_000, "word problems": 32_000}
UPDATES = {"sorting": 80, "word problems": 40}
AT = ("tokens", "updates")
ABOUT = """## Batches that are refilled

Plain TRL, `compact_updates: exact`, and that with `resample: {filter: signal, max_rounds: 4}`, at equal generated
completion tokens and at equal updates, on the two tasks above with rewards of 1 for a right answer and 0 for any other.
The learning rate is the one that was tuned for plain TRL above, for all. Intervals are 95 % by Student's t over the
seeds, and differences are paired by seed. "With signal" is the share of a batch's groups that teach something, in the
mean over the updates. Measured is one sample for each problem of the test split. Made by `python -m bench.resampling`.
"""


class Measures(TrainerCallback):
    """Measures at a number of generated tokens and at one of updates, and ends the training after both."""

    def __init__(self, task: str) -> None:
        self.task, self.found = task, dict[str, dict[str, float]]()
        self.generated, self.kept, self.trainer = 0, list[float](), None

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **rest: Any) -> None:
        if not logs or "completions/mean_length" not in logs:
            return
        # The mean over the rounds, each of as many completions.
        rounds = logs.get("groups/rounds", 1.0)
        self.generated += round(logs["completions/mean_length"] * rounds * TASKS[self.task].batch_size)
        self.kept.append(logs.get("groups/kept", 1.0 - logs["frac_reward_zero_std"]))
        reached = {"tokens": self.generated >= TOKENS[self.task], "updates": state.global_step >= UPDATES[self.task]}
        for at in AT:
            if reached[at] and at not in self.found:
                self.found[at] = self._measured(state.global_step)
        control.should_training_stop = len(self.found) == len(AT)

    def _measured(self, step: int) -> dict[str, float]:
        """The model as it is; the random numbers of the training stay as they were."""
        state, trainer = torch.get_rng_state(), self.trainer
        assert trainer is not None
        found = measure(self.task, "test", trainer.model, trainer.processing_class)
        trainer.model.train()
        torch.set_rng_state(state)
        signal = sum(self.kept) / len(self.kept)
        return {**found, "generated": self.generated, "steps": step, "with_signal": signal}


def work(task: str, method: str, seed: int, model: Path) -> dict[str, Any]:
    """One training: the line of `results.jsonl`."""
    started, settings = time.process_time(), TASKS[task]
    random.seed(seed)
    torch.manual_seed(seed)
    measures = Measures(task)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:  # noqa: PTH123
        arguments = GRPOExtConfig(
            output_dir=folder,
            seed=seed,
            learning_rate=RATES[task],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=settings.warmup_steps,
            max_steps=1_000_000,  # never reached: `measures` ends it
            per_device_train_batch_size=settings.batch_size,
            gradient_accumulation_steps=1,
            num_generations=settings.num_generations,
            max_completion_length=settings.max_completion_length,
            loss_type="dapo",
            beta=0.0,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **METHODS[method],
        )
        trainer = GRPOExtTrainer(
            str(model),
            settings.accuracy,
            arguments,
            train_dataset=Dataset.from_list(problems(task, "train", settings.train_problems, seed)),
            callbacks=[measures],
        )
        measures.trainer = trainer
        trainer.remove_callback(PrinterCallback)
        with contextlib.redirect_stdout(nowhere):
            trainer.train()
    seconds = round(time.process_time() - started, 2)
    return {"task": task, "method": method, "seed": seed, **measures.found, "seconds": seconds}


def run(folder: Path, tasks: Sequence[str], seeds: Sequence[int], jobs: int) -> None:
    """Run the missing trainings."""
    lines, file = read(folder), folder / "results.jsonl"
    done = {(line["task"], line["method"], line["seed"]) for line in lines}
    wanted = [(task, method, seed) for seed in seeds for task in tasks for method in METHODS]
    models = {task: model_of(task, folder) for task in tasks}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), prepare_worker) as pool:
        waiting = {pool.submit(work, *one, models[one[0]]): one for one in wanted if one not in done}
        for future in as_completed(waiting):
            try:
                line = future.result()
            except Exception:
                print(f"{waiting[future]} failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                continue
            with file.open("a") as to:
                to.write(json.dumps(line) + "\n")
            print(waiting[future], *(f"{at}: {line[at]['accuracy']:.3f}" for at in AT), line["seconds"], flush=True)


def read(folder: Path) -> list[dict[str, Any]]:
    file = folder / "results.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(lines: Sequence[Mapping[str, Any]], task: str) -> str:
    """One row for each method at equal tokens and at equal updates; differences to plain TRL are paired by seed."""
    heads = ["at equal", "method", "seeds", "accuracy", "difference to plain TRL", "updates", "tokens", "with signal"]
    rows = []
    for at in AT:
        by_method = {
            name: {x["seed"]: x[at] for x in lines if x["method"] == name and x["task"] == task} for name in METHODS
        }
        plain = by_method["plain TRL"]
        for name, found in by_method.items():
            paired = [found[seed]["accuracy"] - plain[seed]["accuracy"] for seed in sorted(found.keys() & plain.keys())]
            mean = {
                key: sum(x[key] for x in found.values()) / len(found) for key in ("steps", "generated", "with_signal")
            }
            rows.append(
                [
                    *(at, name, str(len(found)), _interval([x["accuracy"] for x in found.values()])),
                    "" if name == "plain TRL" else _interval(paired),
                    *(f"{mean['steps']:.0f}", f"{mean['generated']:,.0f}", f"{mean['with_signal']:.0%}"),
                ]
            )
    return markdown(heads, rows)


def _interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else ""
    found = estimate(values)
    return f"{found.mean:.3f} ± {found.half_width:.3f}"


def plot(path: Path, lines: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(tasks) * len(AT), figsize=(3.2 * len(tasks) * len(AT), 3), squeeze=False)
    for axis, (task, at) in zip(axes[0], ((task, at) for task in tasks for at in AT), strict=True):
        for place, name in enumerate(METHODS):
            values = [x[at]["accuracy"] for x in lines if x["task"] == task and x["method"] == name]
            axis.plot([place] * len(values), values, "o", color="0.6", markersize=4)
            if len(values) > 1:
                found = estimate(values)
                axis.errorbar([place], [found.mean], [found.half_width], fmt="s", color="C0", capsize=4)
        axis.set_xticks(range(len(METHODS)), [*METHODS])
        axis.set_title(f"{task}, equal {at}", fontsize=10)
    axes[0][0].set_ylabel("accuracy on the test split")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(folder: Path, docs: Path) -> None:
    """Write the tables and the plot."""
    lines = read(folder)
    tasks = [task for task in TASKS if any(line["task"] == task for line in lines)]
    parts = [ABOUT.strip(), *(f"**{task.capitalize()}**\n\n{table(lines, task)}" for task in tasks)]
    parts.append("![Accuracy of each training, means and 95 % intervals](images/resampling.png)")
    write_block(docs / "study.md", "resampling", "\n\n".join(parts))
    plot(docs / "images" / "resampling.png", lines, tasks)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--output", type=Path, default=Path("outputs/resampling"))
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, one thread each")
    parser.add_argument("--tasks", nargs="+", choices=tuple(RATES), default=tuple(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=EVALUATION_SEEDS)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where `report` finds study.md")
    options = parser.parse_args(words)
    if options.command == "report":
        report(options.output, options.docs)
    else:
        torch.set_num_threads(1)
        run(options.output, options.tasks, options.seeds, options.jobs)


if __name__ == "__main__":
    main()
