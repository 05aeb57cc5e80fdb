"""The rules of prompt samplers, each as a check on small pools whose outcomes are made up. Nothing here needs torch."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from ..credit.flow import checked_draw, sampler_metrics
from ..types import PromptOutcome, PromptPool
from .rules import Broken, Checks, over, through_json

ROUNDS = 8
Draws = list[list[int] | None]  # what was drawn in each round, to the first None


@dataclass(frozen=True)
class Trial:
    """A training in small: a pool, the size of a draw, and what becomes of the prompts."""

    rows: int
    count: int
    seed: int = 0
    outcomes: str = "mixed"  # or "solved", "hopeless", "no reward"
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    without: bool = False  # whether the columns are None in the first row

    def __str__(self) -> str:
        none = ", with None in the columns of row 0" if self.without else ""
        return f"{self.rows} rows, draws of {self.count}, seed {self.seed}, outcomes: {self.outcomes}{none}"

    def pool(self) -> PromptPool:
        rows: list[dict[str, Any]] = []
        for number in range(self.rows):
            of_row = {name: values[number % len(values)] for name, values in self.columns.items()}
            if self.without and number == 0:
                of_row = dict.fromkeys(of_row)
            rows.append({"prompt": f"prompt {number}", **of_row})
        return PromptPool(rows=rows, seed=self.seed, order=self.order)

    def order(self, passes: int) -> list[int]:
        """A pass as TRL's sampler makes it: shuffled, without the rows that fill no batch."""
        numbers = list(range(self.rows))
        random.Random(f"{self.seed}/{passes}").shuffle(numbers)
        return numbers[: self.rows - self.rows % self.count]

    def outcome(self, row: int, round_number: int) -> PromptOutcome:
        mixed = (1.0, 0.0, 0.5, min(1.0, round_number / ROUNDS))[row % 4]
        reward = {"solved": 1.0, "hopeless": 0.0, "no reward": math.nan}.get(self.outcomes, mixed)
        deviation = math.nan if math.isnan(reward) else math.sqrt(reward * (1.0 - reward))
        return PromptOutcome(
            row=row,
            means={"right": reward, "form": 2 * reward},
            deviations={"right": deviation, "form": 2 * deviation},
            reward=2 * reward,
            deviation=2 * deviation,
            length=10.0 + row,
        )


class SamplerChecks(Checks):
    """The checks of one sampler, on copies of it: it is never started itself, if it can be copied."""

    def __init__(self, plugin: Any, columns: Mapping[str, Sequence[Any]]) -> None:
        self.plugin = plugin
        ordinary = Trial(rows=12, count=3, columns=columns)
        self.ordinary = [ordinary, replace(ordinary, rows=13, count=4, seed=7)]
        self.varied = [*self.ordinary, replace(ordinary, outcomes="solved"), replace(ordinary, outcomes="hopeless")]
        few = [replace(ordinary, rows=rows, count=count) for rows, count in ((3, 3), (4, 3), (5, 1))]
        self.odd = [*few, *(replace(trial, outcomes="solved") for trial in few)]
        self.odd += [replace(trial, outcomes="no reward") for trial in self.ordinary]
        self.odd += [replace(trial, without=True) for trial in self.ordinary if columns]

    def _started(self, trial: Trial, used: Any = None) -> Any:
        """A sampler that was used, or else a copy of the plugin, at the start of a training."""
        sampler = self._copy() if used is None else used
        sampler.start(trial.pool())
        return sampler

    def _play(self, trial: Trial, sampler: Any, first: int = 0, rounds: int = ROUNDS) -> Draws:
        """Draw and observe from round `first` to before `rounds`; what is drawn is checked."""
        found: Draws = []
        for number in range(first, rounds):
            drawn = checked_draw(sampler.draw(trial.count, number), trial.count, trial.rows, "it")
            found.append(drawn)
            if drawn is None:
                break
            sampler.observe([trial.outcome(row, number) for row in drawn])
            sampler_metrics(sampler)
        return found

    @over("varied")
    def run(self, trial: Trial) -> None:
        self._play(trial, self._started(trial))

    @over("varied", compares=True)
    def determinism(self, trial: Trial) -> None:
        before = random.getstate()
        found = list[Draws]()
        try:
            for seed in (1, 2):
                random.seed(seed)
                found.append(self._play(trial, self._started(trial)))
        finally:
            random.setstate(before)
        compare(found[0], found[1], "once and again", trial)

    @over("varied")
    def exhausted(self, trial: Trial) -> None:
        sampler = self._started(trial)
        drawn = self._play(trial, sampler)
        if drawn[0] is None:
            raise Broken("the first draw was None, though all prompts are left", trial)
        if drawn[-1] is None and sampler.draw(trial.count, len(drawn)) is not None:
            raise Broken(f"round {len(drawn) - 1} was None, and the next one, with nothing new, was not", trial)

    @over("odd")
    def odd_pools(self, trial: Trial) -> None:
        sampler = self._started(trial)
        self._play(trial, sampler)
        try:
            json.dumps(sampler.state_dict(), allow_nan=False, default=repr)
        except ValueError as error:
            raise Broken("it remembers a number that is not finite", f"{trial}: {sampler.state_dict()}") from error

    @over("varied", compares=True)
    def state(self, trial: Trial) -> None:
        whole = self._play(trial, self._started(trial))
        for saved in range(len(whole)):
            before = self._started(trial)
            self._play(trial, before, rounds=saved)
            travelled = through_json(before.state_dict())
            resumed = self._started(trial)
            resumed.load_state_dict(travelled)
            rest = self._play(trial, resumed, first=saved)
            compare(whole[saved:], rest, f"uninterrupted and resumed before round {saved}", trial)

    @over("varied", compares=True)
    def start(self, trial: Trial) -> None:
        used = self._started(trial)
        first = self._play(trial, used)
        compare(first, self._play(trial, self._started(trial, used)), "at first and started again", trial)


def compare(ours: Draws, theirs: Draws, what: str, example: object) -> None:
    """Compare the draws of two trainings; `what` names the two, as in "once and again"."""
    for number, (one, other) in enumerate(zip_longest(ours, theirs, fillvalue="nothing"), 1):
        if one != other:
            raise Broken(f"{what}: {one} and {other}, at draw {number}", example)
