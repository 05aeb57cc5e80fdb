"""Credit by step in an environment of several turns against its outcome: the table of docs/recipes.md.

    python -m bench.coins [--docs docs/recipes.md]        # minutes of one core; goes on where it was stopped

The task is that of `recipes/coins_grpo.py`. All arms train on what the environment paid for each step; they differ in
the advantage hook alone. Each trains on the same number of completions, at the best of three learning rates on another
seed, and plays held-out games. The control pays each turn for the step after it. Raw runs are `bench/runs/coins.jsonl`.
"""

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from bench.runner import QUIET, Results, run_missing
from bench.study_report import estimate
from bench.tables import machine, show, versions
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.rewards.environment import EnvironmentSteps, record_steps
from trl_grpo_ext.types import Parts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from coins import task

RUNS = Path(__file__).parent / "runs" / "coins.jsonl"
GROUP = 4
COMPLETIONS = 16
STEPS = 24
EVERY = 6
RATES = (3e-4, 1e-3, 3e-3)
TUNING_SEEDS = (101,)
HELDOUT = 192
OUTCOME = "outcome"
TURNS = "turns"
SHUFFLED = "turns, steps shuffled"
HOOKS: dict[str, list[dict[str, Any]] | None] = {
    OUTCOME: None,
    TURNS: [{"name": "turn_rewards", "gamma": 0.5}],
    SHUFFLED: [{"name": "turn_rewards", "gamma": 0.5}],
}


@dataclass(frozen=True)
class Run:
    """One training."""

    stage: str
    arm: str
    rate: float
    seed: int


class Shuffled(EnvironmentSteps):
    """Each turn is paid for the step after it, and the last for the first."""

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[Parts | None]:
        return [score and shifted(score) for score in super().__call__(completions, **columns)]


def shifted(score: Parts) -> Parts:
    places = [part.places for part in score.parts]
    moved = zip(score.parts, [*places[-1:], *places[:-1]], strict=True)
    return Parts({part.name: (part.score, list(place)) for part, place in moved}, float(score))


@torch.no_grad()
def played(model: Any, tokenizer: Any, rows: Sequence[Sequence[int]]) -> float:
    """What one game on each row takes in all, at temperature 1; a broken call ends a game."""
    games = [task.Coins() for _ in rows]
    for game, coins in zip(games, rows, strict=True):
        game.reset(coins)
    texts = [f"{task.shown(coins)} {task.ROW_END}" for coins in rows]
    taken = [0.0] * len(rows)
    going = [True] * len(rows)
    sides = tokenizer.convert_tokens_to_ids(list(task.SIDES))
    for _ in range(task.TURNS):
        ids = tokenizer(texts, return_tensors="pt").input_ids
        chances = model(input_ids=ids, logits_to_keep=1).logits[:, -1].softmax(-1)
        for row, token in enumerate(torch.multinomial(chances, 1).squeeze(1).tolist()):
            going[row] &= token in sides
            side = "right" if token == sides[1] else "left"  # also in a game that has ended: rows stay of one length
            answer = getattr(games[row], side)()
            texts[row] += f" {side} <eos> {answer} {task.ROW_END}"
            if going[row]:
                taken[row] = games[row].taken
    return sum(taken)


class Held(TrainerCallback):
    """The score on held-out games every few steps: 0 is what chance takes, 1 what the best play does."""

    def __init__(self) -> None:
        self.rows = task.draw_rows("heldout", HELDOUT, random.Random("heldout"))
        self.chance = sum(task.value_of(coins, fmean) for coins in self.rows)
        self.best = sum(task.value_of(coins, max) for coins in self.rows)
        self.curve: list[tuple[int, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self._measure(0, keywords)

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step % EVERY == 0:
            self._measure(state.global_step, keywords)

    def _measure(self, step: int, keywords: Any) -> None:
        model = keywords["model"].eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            taken = played(model, keywords["processing_class"], self.rows)
        self.curve.append((step, round((taken - self.chance) / (self.best - self.chance), 4)))
        model.train()


def work(run: Run, start: Path) -> dict[str, Any]:
    """One training: its line of the file."""
    begun = time.process_time()
    held = Held()
    settings: dict[str, Any] = {
        "seed": run.seed,
        "learning_rate": run.rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": 3,
        "max_steps": STEPS,
        "per_device_train_batch_size": COMPLETIONS,
        "num_generations": GROUP,
        "max_completion_length": 48,
        "max_tool_calling_iterations": task.TURNS,
        "beta": 0.0,
        **QUIET,
        "advantage_hooks": HOOKS[run.arm],
    }
    rows = task.draw_rows("train", STEPS * COMPLETIONS // GROUP, random.Random(run.seed))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        trainer = GRPOExtTrainer(
            str(start),
            (Shuffled if run.arm == SHUFFLED else EnvironmentSteps)(),
            GRPOExtConfig(output_dir=folder, **settings),
            train_dataset=Dataset.from_list([task.row_of(coins) for coins in rows]),
            processing_class=task.load_tokenizer(start),
            environment_factory=record_steps(task.Coins),
            callbacks=[held],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    spent = round(time.process_time() - begun, 1)
    return {**asdict(run), "heldout": held.curve, "last": held.curve[-1][1], "seconds": spent}


def tuned(lines: Sequence[Mapping[str, Any]], arm: str) -> float:
    """The rate with the best score on the tuning seeds. The control has that of what it controls."""
    arm = TURNS if arm == SHUFFLED else arm
    found = [line for line in lines if line["stage"] == "tuning" and line["arm"] == arm]
    return max(RATES, key=lambda rate: fmean(line["last"] for line in found if line["rate"] == rate))


def table(lines: Sequence[Mapping[str, Any]], page: Path | None) -> None:
    """The score of each arm at the end, and how it differs from the outcome's, paired by seed."""
    found = {
        arm: {line["seed"]: line for line in lines if line["stage"] == "evaluation" and line["arm"] == arm}
        for arm in HOOKS
    }
    rows = []
    for arm, by_seed in found.items():
        scores = [line["last"] for line in by_seed.values()]
        apart = [line["last"] - found[OUTCOME][seed]["last"] for seed, line in by_seed.items()]
        difference = estimate(apart)
        rows.append(
            [
                arm,
                f"{tuned(lines, arm):g}",
                str(len(scores)),
                f"{fmean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})",
                "" if arm == OUTCOME else f"{difference.mean:+.3f} ± {difference.half_width:.3f}",
            ]
        )
    start = fmean(line["heldout"][0][1] for line in lines)
    minutes = sum(line["seconds"] for line in lines) / 60
    show(
        "coins: credit by step",
        ["credit", "rate", "seeds", "score", "difference to the outcome"],
        rows,
        f"After {STEPS * COMPLETIONS} completions, {COMPLETIONS} a step in groups of {GROUP}, on {HELDOUT} held-out "
        f"games; 0 is what chance takes, 1 what the best play does, and the start model has {start:.3f}. Each arm has "
        f"the best of the rates {', '.join(f'{rate:g}' for rate in RATES)} on another seed. Mean (lowest to "
        f"highest); ± is half of a 95 % interval by Student's t, paired by seed. "
        f"{minutes:.0f} minutes of one core; {versions('trl', 'torch')}; {machine()}.",
        page,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/coins"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[11, 12, 13, 14, 15])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, one thread each")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--docs", type=Path, help="a page whose table is replaced")
    options = parser.parse_args()
    results = Results(RUNS)
    start = options.output / "start"
    if not options.draw:
        torch.set_num_threads(1)
        if not (start / "config.json").is_file():
            task.supervised_start(start)
        one = partial(work, start=start)
        tuning = [
            Run("tuning", arm, rate, seed)
            for arm in HOOKS
            if arm != SHUFFLED
            for rate in RATES
            for seed in TUNING_SEEDS
        ]
        run_missing(tuning, results, options.jobs, one, "last")
        runs = [Run("evaluation", arm, tuned(results.lines, arm), seed) for seed in options.seeds for arm in HOOKS]
        run_missing(runs, results, options.jobs, one, "last")
    table(results.lines, options.docs)


if __name__ == "__main__":
    main()
