"""What `share_prompts` saves beyond `compact_updates: exact`, by prompt length, on the CPU.

    python -m bench.compact_shared [--updates 3] [--threads 1] [--prompts 32 128 512 600 2048] [--markdown FILE]

Three arms take turns on the same rollouts: plain TRL, compact, and compact with shared prompts. Completions are short
(8 to 96 tokens, uniform), log-normal (their mean a third of 512) or all equal (256, where compact updates alone have
nothing to save); groups of 8, all with signal, and every prompt of a cell has the same length. The floor is what TRL
would take if it computed each distinct token once at the cost that it has for a token: its time, times the distinct
tokens of what it computes.

All cells take about half an hour. With `--json FILE` each cell is written down as soon as it is measured, and those
in the file are not measured again, so that the grid may be measured in pieces.
"""

import argparse
import functools
import itertools
import json
import math
import random
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.compact_rollouts import Cell, Script, Size
from bench.compact_updates import EXACT, PLAIN, SHARED, Match, save_model
from bench.tables import machine, show, versions
from bench.turns import Meter

LENGTHS = ("uniform short", "log-normal", "all equal")
TITLES = (
    *("completions", "prompt", "update, s: plain TRL", "compact", "shared", "times faster"),
    *("peak memory, MB: plain TRL", "shared"),
)
FIRST = ("step", "plain TRL, s", "compact", "shared", "times faster: compact", "shared")


@dataclass(frozen=True)
class LongPrompts(Cell):
    """A line of the table: the profile of completions, and the length of every prompt."""

    prompt: int = 0


class LongScript(Script):
    """Rollouts of a cell whose prompts all have one length."""

    def __init__(self, size: Size, first: LongPrompts) -> None:
        super().__init__(size)
        self.cell = first  # of the first update, which makes the optimizer's state

    def lengths(self) -> tuple[list[int], list[int]]:
        assert isinstance(self.cell, LongPrompts)
        rows = self.size.rows
        draw = random.Random(0)
        if not self.cell.profile:
            completions = [4] * rows
        elif self.cell.profile == LENGTHS[0]:
            completions = [draw.randint(8, 96) for _ in range(rows)]
        elif self.cell.profile == LENGTHS[2]:
            completions = [256] * rows
        else:
            normal = statistics.NormalDist(math.log(512 / 3) - 0.08, 0.4)
            completions = [min(512, round(math.exp(normal.inv_cdf((row + 0.5) / rows)))) for row in range(rows)]
            draw.shuffle(completions)
        return [self.cell.prompt] * rows, completions


def cells_of(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for found in results:
        seconds = found["seconds"]
        rows.append(
            [
                found["completions"],
                str(found["prompt"]),
                *(f"{seconds[arm]:.3g}" for arm in (PLAIN, EXACT, SHARED)),
                f"{seconds[PLAIN] / seconds[SHARED]:.2f}",
                *(f"{found['peak'][arm] / 1e6:.0f}" if found["peak"] else "" for arm in (PLAIN, SHARED)),
            ]
        )
    return rows


def measure(match: Match, cell: LongPrompts, updates: int) -> dict[str, Any]:
    """The fastest of some updates of each arm."""
    result = match.measure(cell, updates)
    prompts, completions = match.script.lengths()
    size = match.script.size
    running = match.script.groups_with_signal * match.script.size.members
    distinct = sum(prompts[: running : size.members]) + sum(completions[:running])
    return {
        "completions": cell.profile,
        "prompt": cell.prompt,
        "seconds": {arm: min(found) for arm, found in result.seconds.items()},
        "padding": size.rows * (max(prompts) + max(completions)) / distinct,
        "computed": [*match.turns.values()][-1].logs.get("compact/computed_to_distinct", math.nan),
        "peak": result.peak,
        "norm_gap": result.norm_gap,
        "norms": {arm: turns.logs["grad_norm"] for arm, turns in match.turns.items()},
        "each": result.seconds,
    }


def first_steps(model: Path, folder: Path, size: Size, prompt: int) -> list[list[str]]:
    """Seconds of some of the first ten steps of new trainings with short completions, and of plain TRL for each."""
    arms = (PLAIN, EXACT, SHARED)
    seconds = dict[str, list[float]]()
    script = functools.partial(LongScript, first=LongPrompts(LENGTHS[0], 0, prompt))
    match = Match(model, folder, size, arms=arms, script=script)
    for step in range(10):
        for arm in arms:
            seconds.setdefault(arm, []).append((match.turn(arm) if step else match.turns[arm]).seconds)
    match.close()
    ratios = [[plain / own for plain, own in zip(seconds[PLAIN], seconds[arm], strict=True)] for arm in arms[1:]]
    return [
        [f"{step}", *(f"{seconds[arm][step - 1]:.3g}" for arm in arms), *(f"{each[step - 1]:.2f}" for each in ratios)]
        for step in (1, 2, 10)
    ]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=3, help="of each arm in each cell, timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 128, 512, 600, 2048])
    parser.add_argument("--completions", nargs="+", default=LENGTHS, choices=LENGTHS)
    parser.add_argument("--first-steps", action="store_true", help="steps 1, 2 and 10 of a training, first length only")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, and keep those in it")
    options = parser.parse_args(given)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    results: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))
    size = Size(groups=options.groups, members=8, limit=512)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        if options.first_steps:
            rows = first_steps(model, Path(folder), size, options.prompts[0])
            said = f"Prompts of {options.prompts[0]} tokens, {size.rows} completions of 8 to 96 tokens; {machine()}."
            show("the first steps with shared prompts", FIRST, rows, said, options.markdown)
            return
        script = functools.partial(LongScript, first=LongPrompts("", 0, 4))
        match = Match(model, Path(folder), size, script=script)
        for profile, prompt in itertools.product(options.completions, options.prompts):
            if not any((found["completions"], found["prompt"]) == (profile, prompt) for found in results):
                results.append(measure(match, LongPrompts(profile, 0, prompt), options.updates))
                if options.json is not None:
                    options.json.write_text(json.dumps(results), encoding="utf-8")
        match.close()
    results.sort(key=lambda found: LENGTHS.index(found["completions"]) * 10_000 + found["prompt"])
    said = (
        f"{size.rows} completions in groups and micro-batches of 8, all with signal; best of {options.updates} "
        f"updates, {Meter().time_is} time. Llama, 5.3M parameters, "
        f"{options.threads} thread(s), {machine()}; {versions('torch', 'transformers', 'trl')}. "
        f"The gradient norms differ by {max(found['norm_gap'] for found in results):.0e} at most, relatively."
    )
    show("shared prompts on the CPU", TITLES, cells_of(results), said, options.markdown)


if __name__ == "__main__":
    main()
