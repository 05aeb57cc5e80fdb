"""Prompt samplers of which each breaks one rule, and two that keep them all. Most are a change of a right one."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from trl_grpo_ext.types import SamplerDeclaration

COLUMNS = {"level": [2, 1]}


class Right:
    """Takes the prompts drawn least often, of these the best; what is solved retires."""

    declares = SamplerDeclaration(conformance={"columns": COLUMNS})

    def start(self, pool: Any) -> None:
        self.size = len(pool.rows)
        self.seed = pool.seed
        self.levels = pool.column("level")
        self.times = dict[int, int]()
        self.solved = set[int]()

    def draw(self, count: int, round_number: int) -> Any:
        left = [row for row in range(self.size) if row not in self.solved]
        if len(left) < count:
            return None
        return sorted(left, key=lambda row: (self.times.get(row, 0), self.levels[row] or 9, row))[:count]

    def observe(self, outcomes: Sequence[Any]) -> None:
        for outcome in outcomes:
            self.times[outcome.row] = self.times.get(outcome.row, 0) + 1
            if outcome.means["right"] == 1.0:
                self.solved.add(outcome.row)

    def state_dict(self) -> Any:
        return {"times": {str(row): times for row, times in self.times.items()}, "solved": sorted(self.solved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.times = {int(row): n for row, n in state["times"].items()}
        self.solved = {*state["solved"]}


class ByTheRound(Right):
    """Right as well, at random."""

    def draw(self, count: int, round_number: int) -> Any:
        return random.Random(f"{self.seed}/{round_number}").sample(range(self.size), count)


def changed(**methods: Any) -> type[Right]:
    """The right one with other methods."""
    return type("Changed", (Right,), methods)


class RunningMean(Right):
    def start(self, pool: Any) -> None:
        super().start(pool)
        self.mean = 0.0

    def observe(self, outcomes: Sequence[Any]) -> None:
        super().observe(outcomes)
        self.mean = 0.5 * self.mean + 0.5 * outcomes[0].reward

    def state_dict(self) -> Any:
        return {**super().state_dict(), "mean": self.mean}


class NumbersOnly(Right):
    def start(self, pool: Any) -> None:
        super().start(pool)
        self.levels = [float(level) for level in self.levels]


class GoesOn(Right):
    started = False

    def start(self, pool: Any) -> None:
        if not self.started:
            super().start(pool)
            self.started = True


def draw_of_twice_as_many(self: Right, count: int, round_number: int) -> Any:
    return random.Random(round_number).sample(range(self.size), 2 * count)[:count]


SOUND = [Right(), ByTheRound()]

BREAKS: list[tuple[str, Any]] = [
    ("sampler.run", changed(draw=lambda self, count, number: Right.draw(self, count + 1, number))),
    ("sampler.run", changed(draw=lambda self, count, number: [0] * count)),
    ("sampler.run", changed(draw=lambda self, count, number: range(self.size - count + 1, self.size + 1))),
    ("sampler.run", changed(metrics=lambda self: {"drawn": 0.0})),
    ("sampler.determinism", changed(draw=lambda self, count, number: random.sample(range(self.size), count))),
    ("sampler.exhausted", changed(draw=lambda self, count, n: Right.draw(self, count, n) if n else None)),
    ("sampler.exhausted", changed(draw=lambda self, count, number: range(count) if number % 4 != 3 else None)),
    ("sampler.odd_pools", changed(draw=draw_of_twice_as_many)),
    ("sampler.odd_pools", RunningMean),
    ("sampler.odd_pools", NumbersOnly),
    ("sampler.state", changed(load_state_dict=lambda self, state: None)),
    ("sampler.state", changed(state_dict=lambda self: {**Right.state_dict(self), "solved": self.solved})),
    ("sampler.start", GoesOn),
]
