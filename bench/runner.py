"""Trainings of a study, each in a worker process and one line of a JSON Lines file; what is there is not run again."""

import gc
import json
import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

QUIET = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Settings of a training on the CPU of which only its line is kept."""


class Results:
    """The lines of a JSON Lines file, one for each finished run."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def missing(self, runs: Iterable[Any]) -> list[Any]:
        """Those of the runs, all of one dataclass, that have no line yet."""
        return [
            run for run in runs if not any(all(line[k] == v for k, v in asdict(run).items()) for line in self.lines)
        ]

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def prepare_worker() -> None:
    """One thread each, no network, no noise; and what is imported now is not collected after every training."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    disable_progress_bar()
    gc.collect()
    gc.freeze()


def run_missing(
    runs: Sequence[Any], results: Results, jobs: int, work: Callable[[Any], dict[str, Any]], shown: str
) -> None:
    """Do the missing runs. One that fails is printed and left missing: the next start tries it again."""
    missing = results.missing(runs)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), prepare_worker) as pool:
        waiting = {pool.submit(work, run): run for run in missing}
        for number, future in enumerate(as_completed(waiting), start=1):
            run = waiting[future]
            what = f"[{number}/{len(missing)}] {', '.join(f'{value}' for value in asdict(run).values())}"
            try:
                results.add(line := future.result())
            except Exception:
                print(f"{what}: failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                continue
            print(f"{what}: {shown} {line[shown]:.3f}, {line.get('used', line.get('seconds')):.1f} s", flush=True)
    if failed := results.missing(runs):
        raise SystemExit(f"error: {len(failed)} of {len(runs)} trainings failed; the same command tries them again.")
