"""Does it pay to choose the prompts? Three prompt samplers, with and without `resample`, at equal generated tokens.

    python -m bench.samplers [--seeds 1 2 3] [--jobs 2]      # runs what is missing, then prints the table
    python -m bench.samplers --docs docs                     # also writes it into plugins.md

The tiny model and the word problems of the recipes, rewards of 1 and 0, plain TRL's learning rate. The training has few
prompts, so that each comes several times, as in a run of several epochs. Every training is one line of
`bench/runs/samplers.jsonl`; it is measured on the test split at half of the tokens and at all of them.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.resampling import RATES, Measures, interval
from bench.runner import Results, run_missing
from bench.study import EMBEDDED_MODEL, TASKS, problems, train_once
from bench.tables import machine, markdown

TASK = "word problems"
PROMPTS = 32
TOKENS = {"half": 20_000, "all": 40_000}
SAMPLERS = ("in_order", "retire_solved", "difficulty_pool")
RESAMPLE = {"filter": "signal", "max_rounds": 4}
RUNS = Path(__file__).parent / "runs" / "samplers.jsonl"


@dataclass(frozen=True)
class Run:
    """One training."""

    sampler: str
    resample: bool
    seed: int


def work(run: Run) -> dict[str, Any]:
    """One training: its line of the file."""
    started, task = time.process_time(), replace(TASKS[TASK], train_problems=PROMPTS)
    measures = Measures(TASK, TOKENS, {})
    chosen = {"learning_rate": RATES[TASK], "compact_updates": "exact", "prompt_sampler": run.sampler}
    if run.resample:
        chosen["resample"] = RESAMPLE
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        rows = problems(TASK, "train", PROMPTS, run.seed)
        train_once(task, rows, EMBEDDED_MODEL, run.seed, chosen, callbacks=[measures])
    seconds = round(time.process_time() - started, 2)
    return {**asdict(run), **measures.found, "accuracy": measures.found["all"]["accuracy"], "seconds": seconds}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """One row for each way; differences are to the plain order without `resample`, paired by seed."""
    heads = ["prompts", "accuracy", "difference"]
    plain = _by_seed(lines, "in_order", False)
    rows = []
    for resample in (False, True):
        for sampler in SAMPLERS:
            found = _by_seed(lines, sampler, resample)
            if not found:
                continue
            paired = [found[seed]["all"]["accuracy"] - plain[seed]["all"]["accuracy"] for seed in {*found} & {*plain}]
            at_all = [line["all"] for line in found.values()]
            rows.append(
                [
                    f"`{sampler}`{' and `resample`' if resample else ''}",
                    interval([point["accuracy"] for point in at_all]),
                    "" if found == plain else interval(paired),
                ]
            )
    return markdown(heads, rows)


def _by_seed(lines: Sequence[Mapping[str, Any]], sampler: str, resample: bool) -> dict[int, Mapping[str, Any]]:
    return {line["seed"]: line for line in lines if line["sampler"] == sampler and line["resample"] == resample}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=(1, 2, 3))
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, one thread each")
    options = parser.parse_args(words)
    results = Results(RUNS)
    runs = [Run(name, resample, seed) for seed in options.seeds for resample in (False, True) for name in SAMPLERS]
    run_missing(runs, results, options.jobs, work, "accuracy")
    print(f"\n{table(results.lines)}\n")
    print(f"{sum(line['seconds'] for line in results.lines):.0f} s of one core, {machine()}")


if __name__ == "__main__":
    main()
