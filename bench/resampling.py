"""Does refilling the batch pay? Plain TRL, compact updates and `resample`, at equal generated tokens and equal updates.

    python -m bench.resampling run --output outputs/resampling [--jobs 2]
    python -m bench.resampling report --output outputs/resampling --docs docs

The tasks and their learning rates are those of `bench.study`, where the rate of plain TRL was tuned; all methods have
it. One training gives both comparisons: it is measured on the test split when it has generated the tokens, and when it
has made the updates. Every training is one line of `results.jsonl`; started again, `run` does only what is missing.
`report` writes a section of `evidence.md`, between markers, and the plot `images/resampling.png`.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from bench.runner import Results, run_missing
from bench.study import EVALUATION_SEEDS, TASKS, measure, model_of, problems, train_once
from bench.study_report import estimate
from bench.tables import markdown, write_block

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
tokens and at equal updates, on the same two tasks with rewards of 1 for a right answer and 0 for any other. All have
plain TRL's tuned learning rate. Five seeds; `python -m bench.resampling`.
"""


class Measures(TrainerCallback):
    """Measures at numbers of generated tokens and of updates, by the names of these points; the last ends the training.

    If the prompts are exhausted before, the model is measured as it is then.
    """

    def __init__(self, task: str, tokens: Mapping[str, int], updates: Mapping[str, int]) -> None:
        self.task = task
        self.found = dict[str, dict[str, float]]()
        self.tokens = tokens
        self.updates = updates
        self.generated = 0
        self.kept = list[float]()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **rest: Any) -> None:
        if not logs or "completions/mean_length" not in logs:
            return
        # The mean over the rounds, each of as many completions.
        rounds = logs.get("groups/rounds", 1.0)
        self.generated += round(logs["completions/mean_length"] * rounds * TASKS[self.task].batch_size)
        self.kept.append(logs.get("groups/kept", 1.0 - logs["frac_reward_zero_std"]))
        reached = [at for at, tokens in self.tokens.items() if self.generated >= tokens]
        reached += [at for at, updates in self.updates.items() if state.global_step >= updates]
        self._measure([at for at in reached if at not in self.found], state.global_step, rest)
        control.should_training_stop = len(self.found) == len(self.tokens) + len(self.updates)

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        points = [*self.tokens, *self.updates]
        self._measure([at for at in points if at not in self.found], state.global_step, rest)

    def _measure(self, points: Sequence[str], step: int, rest: Mapping[str, Any]) -> None:
        if points:
            self.found |= dict.fromkeys(points, self._measured(step, rest["model"], rest["processing_class"]))

    def _measured(self, step: int, model: Any, tokenizer: Any) -> dict[str, float]:
        """The model as it is; the random numbers of the training stay as they were."""
        state = torch.get_rng_state()
        found = measure(self.task, "test", model, tokenizer)
        model.train()
        torch.set_rng_state(state)
        signal = sum(self.kept) / len(self.kept)
        return {**found, "generated": self.generated, "steps": step, "with_signal": signal}


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    method: str
    seed: int


def work(run: Run, folder: Path) -> dict[str, Any]:
    """One training: the line of `results.jsonl`."""
    started = time.process_time()
    settings = TASKS[run.task]
    measures = Measures(run.task, {"tokens": TOKENS[run.task]}, {"updates": UPDATES[run.task]})
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        train_once(
            replace(settings, reward=settings.accuracy),
            problems(run.task, "train", settings.train_problems, run.seed),
            model_of(run.task, folder),
            run.seed,
            {"learning_rate": RATES[run.task], **METHODS[run.method]},
            callbacks=[measures],
        )
    accuracy = measures.found["tokens"]["accuracy"]
    seconds = round(time.process_time() - started, 2)
    return {**asdict(run), **measures.found, "accuracy": accuracy, "seconds": seconds}


def table(lines: Sequence[Mapping[str, Any]], task: str) -> str:
    """One row for each method at equal tokens and at equal updates; differences to plain TRL are paired by seed."""
    heads = ["at equal", "method", "accuracy", "difference to plain TRL", "tokens"]
    rows = []
    for at in AT:
        by_method = {
            name: {x["seed"]: x[at] for x in lines if x["method"] == name and x["task"] == task} for name in METHODS
        }
        plain = by_method["plain TRL"]
        for name, found in by_method.items():
            paired = [found[seed]["accuracy"] - plain[seed]["accuracy"] for seed in sorted(found.keys() & plain.keys())]
            tokens = sum(x["generated"] for x in found.values()) / len(found)
            rows.append(
                [
                    *(at, name, interval([x["accuracy"] for x in found.values()])),
                    "" if name == "plain TRL" else interval(paired),
                    f"{tokens:,.0f}",
                ]
            )
    return markdown(heads, rows)


def interval(values: Sequence[float]) -> str:
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


def report(lines: Sequence[Mapping[str, Any]], docs: Path) -> None:
    """Write the tables and the plot."""
    tasks = [task for task in TASKS if any(line["task"] == task for line in lines)]
    parts = [ABOUT.strip(), *(f"**{task.capitalize()}**\n\n{table(lines, task)}" for task in tasks)]
    parts.append("![Accuracy of each training, means and 95 % intervals](images/resampling.png)")
    write_block(docs / "evidence.md", "resampling", "\n\n".join(parts))
    plot(docs / "images" / "resampling.png", lines, tasks)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--output", type=Path, default=Path("outputs/resampling"))
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, one thread each")
    parser.add_argument("--tasks", nargs="+", choices=tuple(RATES), default=tuple(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=EVALUATION_SEEDS)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where `report` finds evidence.md")
    options = parser.parse_args(words)
    results = Results(options.output / "results.jsonl")
    if options.command == "report":
        report(results.lines, options.docs)
        return
    torch.set_num_threads(1)
    for task in options.tasks:
        model_of(task, options.output)  # made once, before the workers
    runs = [Run(task, method, seed) for seed in options.seeds for task in options.tasks for method in METHODS]
    run_missing(runs, results, options.jobs, partial(work, folder=options.output), "accuracy")


if __name__ == "__main__":
    main()
