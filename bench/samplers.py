"""Does it pay to choose the prompts? Three samplers, with and without `resample`, at equal tokens and equal time.

    python -m bench.samplers [--tasks tiny real] [--seeds 1 2 3 4 5]    # runs what is missing, then prints the table
    python -m bench.samplers --docs docs/evidence.md                    # also writes it there

Both tasks have a small pool of prompts, of which about half carry no signal at the start, as in a later epoch.
`tiny`: the recipes' word problems, and their model after a training on others, which solves most of them. `real`:
SmolLM2-135M after the supervised start of `bench.evidence` is asked for one of 1, 2, or of 8 to 24 facts. Rewards are
1 and 0. Held out is the chance of a right answer on new problems: sampled for `tiny`, the probability for `real`.

A training is measured when it has generated its tokens and when it has used its seconds of one core (sampling, rewards
and updates; measurements are not counted), and is one line of `bench/runs/samplers.jsonl`.
"""

import argparse
import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from bench import color_facts, evidence
from bench.resampling import RATES, interval
from bench.runner import Results, run_missing
from bench.study import EMBEDDED_MODEL, TASKS, Task, TokenBudget, measure, problems, train_once
from bench.tables import machine, markdown, versions, write_block

SAMPLERS = ("in_order", "retire_solved", "difficulty_pool")
RESAMPLE = {"filter": "signal", "max_rounds": 4}
RUNS = Path(__file__).parent / "runs" / "samplers.jsonl"
OUTPUT = Path("outputs/samplers")
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    sampler: str
    resample: bool
    seed: int


@dataclass(frozen=True)
class Setting:
    """One task: its trainings, its prompts and how the model is measured."""

    training: Task
    chosen: Mapping[str, Any]
    tokens: int
    seconds: float
    pool: Callable[[], list[Row]]
    start: Callable[[], Any]
    held_out: Callable[[Any, Any], float]


# ------------------------------------------------------------------------------------------------------------- tasks

WORDS = replace(TASKS["word problems"], batch_size=32)
POOL = {"tiny": 64, "real": 32}
START_TOKENS = 50_000
QUESTION = color_facts.Task(1)


def word_problems() -> list[Row]:
    """The recipes' problems, few."""
    return problems("word problems", "train", POOL["tiny"], 0)


def trained() -> Path:
    """The recipes' model after a training on other problems, which solves so many that half of the groups are equal."""
    folder = OUTPUT / "start"
    if not (folder / "config.json").is_file():
        budget = TokenBudget(START_TOKENS, WORDS.batch_size)
        rows = problems("word problems", "train", 4096, 77)
        chosen = {"learning_rate": RATES["word problems"], "compact_updates": "exact"}
        train_once(WORDS, rows, EMBEDDED_MODEL, 77, chosen, callbacks=[budget]).save_model(str(folder))
    return folder


def colors() -> list[Row]:
    """One question about 1 or 2 facts, which the start answers, in half of the prompts, else about 8 to 24."""
    rng, half = random.Random("pool"), POOL["real"] // 2
    sizes = [1, 2] * (half // 2) + [8, 12, 16, 24] * (half // 4)
    return [QUESTION.problem(rng, size) for size in sizes]


def first_line(completions: Sequence[Any], lines: Sequence[Sequence[str]], **columns: Any) -> list[float]:
    """1.0 where the first line is right."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(QUESTION.said(text)[:1] == [right[0]]) for text, right in zip(texts, lines, strict=True)]


@torch.no_grad()
def chance(model: Any, tokenizer: Any) -> float:
    """The mean probability of the right answer on problems of the pool's harder kind, at the training's temperature."""
    rng = random.Random("heldout")
    rows = [QUESTION.problem(rng, size) for size in (8, 12, 16, 24) * 8]
    found = []
    for row, prompt in zip(rows, color_facts.asked(tokenizer, rows), strict=True):
        before = tokenizer(prompt, add_special_tokens=False).input_ids
        answer = tokenizer(row["lines"][0], add_special_tokens=False).input_ids
        ids = torch.tensor([before + answer])
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state[:, len(before) - 1 : -1]
        logps = (model.lm_head(hidden) / color_facts.TEMPERATURE).log_softmax(dim=-1)
        found.append(logps.gather(-1, torch.tensor([answer])[..., None]).sum().exp().item())
    return statistics.fmean(found)


def solved(model: Any, tokenizer: Any) -> float:
    """The share of right answers on the test split, one sample each."""
    return measure("word problems", "test", model, tokenizer)["accuracy"] or 0.0


COLORS = replace(
    WORDS, reward=first_line, accuracy=first_line, batch_size=32, max_completion_length=8, learning_rates=(5e-5,)
)
SETTINGS = {
    "tiny": Setting(
        WORDS,
        {"learning_rate": RATES["word problems"]},
        tokens=30_000,
        seconds=25.0,
        pool=word_problems,
        start=trained,
        held_out=solved,
    ),
    "real": Setting(
        COLORS,
        {
            "learning_rate": 5e-5,
            "temperature": color_facts.TEMPERATURE,
            "cache_implementation": "static",
            "share_prompts": True,
        },
        tokens=2_400,
        seconds=90.0,
        pool=colors,
        start=lambda: evidence.policy_of(evidence.start_of(), "float32"),
        held_out=chance,
    ),
}


# --------------------------------------------------------------------------------------------------------- trainings


class Measures(TrainerCallback):
    """Measures the model when the tokens are generated and when the seconds are used; then the training ends."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.found = setting, dict[str, dict[str, float]]()
        self.generated, self.seconds, self.kept = 0, 0.0, list[float]()
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step > 1:  # the first has what is done once: the trial of packed rows, caches
            self.seconds += time.process_time() - self._began

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **rest: Any) -> None:
        if not logs or "completions/mean_length" not in logs:
            return
        rounds = logs.get("groups/rounds", 1.0)  # the mean length is over the rounds, each of as many completions
        self.generated += round(logs["completions/mean_length"] * rounds * self.setting.training.batch_size)
        self.kept.append(1.0 - logs["frac_reward_zero_std"])
        reached = {"tokens": self.generated >= self.setting.tokens, "time": self.seconds >= self.setting.seconds}
        for at, is_reached in reached.items():
            if is_reached and at not in self.found:
                self._measure(at, state.global_step, rest)
        control.should_training_stop = len(self.found) == len(reached)

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        for at in {"tokens", "time"} - self.found.keys():  # the prompts are exhausted
            self._measure(at, state.global_step, rest)

    def _measure(self, at: str, step: int, rest: Mapping[str, Any]) -> None:
        model, random_numbers = rest["model"], torch.get_rng_state()
        model.eval()
        found = self.setting.held_out(model, rest["processing_class"])
        model.train()
        torch.set_rng_state(random_numbers)
        self.found[at] = {
            "accuracy": round(found, 4),
            "generated": self.generated,
            "seconds": round(self.seconds, 1),
            "steps": step,
            "with_signal": round(statistics.fmean(self.kept), 3),
        }


def work(run: Run) -> dict[str, Any]:
    """One training: its line of the file."""
    started, setting = time.process_time(), SETTINGS[run.task]
    measures = Measures(setting)
    chosen = {**setting.chosen, "compact_updates": "exact", "prompt_sampler": run.sampler}
    if run.resample:
        chosen["resample"] = RESAMPLE
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        train_once(setting.training, setting.pool(), setting.start(), run.seed, chosen, callbacks=[measures])
    seconds = round(time.process_time() - started, 1)
    return {**asdict(run), **measures.found, "accuracy": measures.found["tokens"]["accuracy"], "used": seconds}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """One row for each way; differences are to the plain order without `resample`, paired by seed."""
    heads = ["task", "prompts", "seeds", "groups with signal", "held out at equal tokens", "difference"]
    heads += ["at equal time", "difference"]
    rows = []
    for task in SETTINGS:
        plain = _by_seed(lines, task, "in_order", False)
        for resample in (False, True):
            for sampler in SAMPLERS:
                found = _by_seed(lines, task, sampler, resample)
                if not found:
                    continue
                signal = statistics.fmean(line["tokens"]["with_signal"] for line in found.values())
                cells = [task, f"`{sampler}`{' and `resample`' if resample else ''}", str(len(found)), f"{signal:.2f}"]
                for at in ("tokens", "time"):
                    seeds = sorted({*found} & {*plain})
                    paired = [found[seed][at]["accuracy"] - plain[seed][at]["accuracy"] for seed in seeds]
                    cells.append(interval([line[at]["accuracy"] for line in found.values()]))
                    cells.append("" if found == plain else interval(paired))
                rows.append(cells)
    return markdown(heads, rows)


def _by_seed(
    lines: Sequence[Mapping[str, Any]], task: str, sampler: str, resample: bool
) -> dict[int, Mapping[str, Any]]:
    wanted = {"task": task, "sampler": sampler, "resample": resample}
    return {line["seed"]: line for line in lines if all(line[key] == value for key, value in wanted.items())}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=tuple(SETTINGS), default=tuple(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=(1, 2, 3, 4, 5))
    parser.add_argument("--resample", nargs="+", type=int, choices=(0, 1), default=(0, 1), help="without, with")
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=SAMPLERS)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, one thread each")
    parser.add_argument("--docs", type=Path, help="the page whose table is replaced")
    options = parser.parse_args(words)
    results = Results(RUNS)
    runs = [
        Run(task, name, bool(resample), seed)
        for task in options.tasks
        for seed in options.seeds
        for resample in options.resample
        for name in options.samplers
    ]
    if "tiny" in options.tasks:
        trained()
    if "real" in options.tasks:
        evidence.start_of()
    run_missing(runs, results, options.jobs, work, "accuracy")
    settings = ", ".join(f"{task}: {one.tokens:,} tokens, {one.seconds:.0f} s" for task, one in SETTINGS.items())
    said = f"{settings}. {versions('trl', 'torch')}; {machine()}, one thread."
    print(f"\n{table(results.lines)}\n\n{said}")
    if options.docs is not None:
        write_block(options.docs, "samplers", f"{table(results.lines)}\n\n{said}")


if __name__ == "__main__":
    main()
