"""The GSM8K recipe beside plain TRL's `trl grpo` with the same settings, each started as a person would, on one GPU.

    python -m bench.launches_gpu [--minutes 9] [--out FOLDER] [--markdown FILE]
    python -m bench.launches_gpu --cells "7B QLoRA" --arms "trl grpo" "ours, exact"
    python -m bench.launches_gpu --tiny --cells "0.5B full" --steps 2

NO GPU HAS RUN THIS YET: only `--tiny`, on the CPU. How many of the runs fit into the time is a guess.

Models of the shapes of Qwen2.5-0.5B and 7B with random weights, in full and as QLoRA, for 20 steps each. Three arms:
`trl grpo`, the recipe with `compact_updates: exact` (its default), and with `off`. Nothing is downloaded. Settings are
those of the run configurations in `recipes/configs`, on both sides; changed are batch and length, to be quick, and for
7B in full the weights (bfloat16) and the optimizer (`adamw_8bit`), to fit on one GPU (see `launch_cells.ONE_GPU`).

Random weights answer nothing right, and equal rewards leave nothing to learn: with compact updates there would be no
work at all. So both sides are given a reward with a signal, the share of even token ids. Completions run to the limit
and all have a signal, so compact updates have nothing to save here: what they save where rows differ is measured by
`compact_updates_gpu`. The recipe's evaluations, before and after, are not among the steps.

Time and memory are taken inside each process by the reward and by a hook behind the optimizer, the same for both sides
(see `launch_cells_probe`). A run that was not what it should be does not count: its reason is shown, and the script
ends with status 1. Runs that don't fit into `--minutes` are named; measure them with `--cells` and `--arms`. Everything
is also written to `launches_gpu.json`, and what the runs said to a file each, under `--out`. The models take 17 GB in
the temporary folder (`TMPDIR`), and what a run saves 15 GB more until it is over.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.compact_cells import put
from bench.launch_cells import (
    ARMS,
    CELLS,
    EXACT,
    OFF,
    PLAIN,
    Cell,
    Size,
    save_model,
    save_problems,
    settings_of,
)
from bench.launch_cells_runs import Run, differences, measure

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes")
TITLES = (
    "cell",
    "arm",
    "tokens/s",
    "times plain TRL's",
    "s/step",
    "generation, s",
    "update, s",
    "TRL's step_time, s",
    "peak memory, GB",
)
START = 45.0
"""Seconds that a run is thought to take before any was seen."""


def order(cells: Sequence[Cell], arms: Sequence[str]) -> list[tuple[Cell, str]]:
    """All runs, those that say most first: plain TRL and the recipe as it is, and after them the recipe with `off`."""
    first = [(cell, arm) for cell in cells for arm in (PLAIN, EXACT) if arm in arms]
    return first + [(cell, OFF) for cell in cells if OFF in arms]


def run_all(
    runs: Sequence[tuple[Cell, str]],
    size: Size,
    tiny: bool,
    until: float,
    limit: float,
    out: Path,
    after: Callable[[Sequence[Run]], object] = list,
) -> tuple[list[Run], list[str]]:
    """Do the runs in order until the time is over.

    Args:
        runs: As `order` returns them.
        size: Of each.
        tiny: Tiny models in place of those with published shapes.
        until: On `time.monotonic`.
        limit: Seconds that one run may take.
        out: Folder for what the runs say.
        after: Called with all runs so far after each of them.

    Returns:
        What came of them, and those that were left out by name.
    """
    done: list[Run] = []
    left: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        problems = save_problems(work, size.problems)
        for cell, arm in runs:
            like = [run.seconds for run in done if run.cell == cell.name]
            if time.monotonic() + max(like, default=START) > until:
                left.append(f"{cell.name}, {arm}")
                continue
            model = work / cell.model.rpartition("/")[2]
            if not model.exists():
                save_model(model, cell.model, tiny, "cpu" if size.cpu else "cuda")
            folder = work / "run"
            folder.mkdir()
            settings = settings_of(cell, size, model)
            run = measure(cell, arm, settings, size, folder, problems, min(limit, until - time.monotonic()))
            shutil.copy(folder / "said", out / f"{cell.name} {arm}.txt".replace(" ", "_").replace(",", ""))
            shutil.rmtree(folder)  # 15 GB for 7B in full
            compare(run, done)
            print(f"{cell.name}, {arm}: {run.seconds:.0f} s{'; '.join(['', *run.problems])}", flush=True)
            done.append(run)
            after(done)
    return done, left


def plain_of(run: Run, runs: Sequence[Run]) -> Run | None:
    """The run of plain TRL that this one is beside; None where there is none that counts."""
    beside = (other for other in runs if (other.cell, other.arm) == (run.cell, PLAIN) and not other.problems)
    return next(beside, None)


def compare(run: Run, done: Sequence[Run]) -> None:
    """Add what makes a run another one than plain TRL's to its problems."""
    plain = plain_of(run, done)
    if plain is not None and not run.problems:
        run.problems += differences(run, plain)


# -------------------------------------------------------------------------------------------------------------- table


def rows_of(runs: Sequence[Run]) -> Iterator[list[str]]:
    """One for each run that counts, cell by cell."""
    names = [cell.name for cell in CELLS]
    for run in sorted(runs, key=lambda run: (names.index(run.cell), ARMS.index(run.arm))):
        if run.problems:
            continue
        plain = plain_of(run, runs)
        yield [
            run.cell,
            run.arm,
            f"{run.tokens_per_second:.0f}",
            "-" if plain is None else f"{run.tokens_per_second / plain.tokens_per_second:.2f}",
            f"{run.generation + run.update:.3g}",
            f"{run.generation:.3g}",
            f"{run.update:.3g}",
            f"{run.step_time:.3g}",
            f"{run.peak / 1e9:.2f}",
        ]


def markdown(runs: Sequence[Run]) -> str:
    lines = [list(TITLES), ["---"] * 2 + ["---:"] * (len(TITLES) - 2), *rows_of(runs)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(runs: Sequence[Run]) -> Table:
    table = Table(title="launches", title_justify="left")
    for number, column in enumerate(TITLES):
        table.add_column(column, justify="left" if number < 2 else "right")
    for row in rows_of(runs):
        table.add_row(*row)
    return table


def sentences(size: Size, runs: Sequence[Run], left: Sequence[str], machine: str) -> str:
    """What was measured, on what, and what was not."""
    memory = (
        "the process's resident set at its largest"
        if size.cpu
        else "the most that torch's allocator held, from the second step on"
    )
    found = ", ".join(f"{name} {value}" for name, value in versions().items())
    said = (
        f"{size.steps} steps, of which the first is left out; {size.completions} completions of up to {size.tokens} "
        f"tokens per step in groups of {size.members}, micro-batches of {size.rows}. Tokens are those of the "
        f"completions. A step lasts from the end of one optimizer step to the end of the next; TRL's step_time leaves "
        f"the optimizer out. Memory is {memory}. {machine}; Python {platform.python_version()}, {found}."
    )
    for run in runs:
        if run.problems:
            said += f" {run.cell}, {run.arm} does not count: {'; '.join(run.problems)}."
    return said + (f" Not run for want of time: {'; '.join(left)}." if left else "")


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def save(out: Path, size: Size, runs: Sequence[Run], left: Sequence[str], machine: str) -> Path:
    """Write all figures to `launches_gpu.json`; the settings that runs saved stay out of it."""
    measured: list[dict[str, Any]] = []
    for run in runs:
        record = dataclasses.asdict(run)
        del record["settings"]
        if not run.problems:
            record |= {"tokens_per_second": run.tokens_per_second, "step_time": run.step_time}
            record |= {"seconds_per_step": {"generation": run.generation, "update": run.update}}
        measured.append(record)
    content = {
        "machine": machine,
        "python": platform.python_version(),
        "versions": versions(),
        "size": dataclasses.asdict(size),
        "runs": measured,
        "left_out": list(left),
    }
    path = out / "launches_gpu.json"
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return path


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=[c.name for c in CELLS], choices=[c.name for c in CELLS])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--steps", type=int, default=20, help="of each run; the first one is not counted")
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--minutes", type=float, default=9.0, help="start nothing more, and stop, when these are over")
    parser.add_argument("--limit", type=float, default=200, help="seconds that one run may take")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to see that the script works")
    parser.add_argument("--out", type=Path, default=Path("outputs/launches_gpu"), help="folder for figures and logs")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args(given)
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: at least 2, as the first is not counted")
    if not options.tiny and not torch.cuda.is_available():
        print("There is no CUDA device here. With --tiny the script runs on the CPU, to see that it works.")
        return 0

    until = time.monotonic() + 60 * options.minutes
    tiny = {"tokens": min(options.tokens, 8), "rows": 4, "members": 4, "cpu": True} if options.tiny else {}
    size = Size(**{"steps": options.steps, "tokens": options.tokens, **tiny})
    machine = f"{platform.machine()} CPU, tiny shapes" if options.tiny else torch.cuda.get_device_name()
    options.out.mkdir(parents=True, exist_ok=True)
    cells = [cell for cell in CELLS if cell.name in options.cells]
    runs, left = run_all(
        order(cells, options.arms),
        size,
        options.tiny,
        until,
        options.limit,
        options.out,
        lambda done: save(options.out, size, done, [], machine),  # whatever ends this script, they are kept
    )
    console = Console(width=150)
    console.print(shown(runs))
    said = sentences(size, runs, left, machine)
    path = save(options.out, size, runs, left, machine)
    console.print(f"{said}\nfigures {path}", highlight=False, markup=False)
    if options.markdown is not None:
        put(options.markdown, "launches", f"{markdown(runs)}\n\n{said}")
    return int(any(run.problems for run in runs))


if __name__ == "__main__":
    raise SystemExit(main())
