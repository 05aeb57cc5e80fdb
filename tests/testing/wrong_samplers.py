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
        self.size, self.seed, self.levels = len(pool.rows), pool.seed, pool.column("level")
        self.times, self.solved = dict[int, int](), set[int]()

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

    def metrics(self) -> Mapping[str, float]:
        return {"solved": len(self.solved) / self.size}

    def state_dict(self) -> Any:
        return {"times": {str(row): times for row, times in self.times.items()}, "solved": sorted(self.solved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.times, self.solved = {int(row): n for row, n in state["times"].items()}, {*state["solved"]}


class ByTheRound(Right):
    """Right as well, at random."""

    def draw(self, count: int, round_number: int) -> Any:
        return random.Random(f"{self.seed}/{round_number}").sample(range(self.size), count)


class WithoutObserve(Right):
    observe = None  # type: ignore[assignment]


class Raises(Right):
    def draw(self, count: int, round_number: int) -> Any:
        raise KeyError("level")


class TooMany(Right):
    def draw(self, count: int, round_number: int) -> Any:
        return super().draw(count + 1, round_number)


class Texts(Right):
    def draw(self, count: int, round_number: int) -> Any:
        return [str(row) for row in range(count)]


class Twice(Right):
    def draw(self, count: int, round_number: int) -> Any:
        return [0] * count


class OneBeyond(Right):
    def draw(self, count: int, round_number: int) -> Any:
        return range(self.size - count + 1, self.size + 1)


class GlobalRandom(Right):
    def draw(self, count: int, round_number: int) -> Any:
        return random.sample(range(self.size), count)


class NothingAtFirst(Right):
    def draw(self, count: int, round_number: int) -> Any:
        return super().draw(count, round_number) if round_number else None


class NoneNowAndThen(Right):
    def draw(self, count: int, round_number: int) -> Any:
        return range(count) if round_number % 4 != 3 else None


class WantsTwiceAsMany(Right):
    def draw(self, count: int, round_number: int) -> Any:
        return random.Random(round_number).sample(range(self.size), 2 * count)[:count]


class RunningMean(Right):
    mean = 0.0

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


class Forgets(Right):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class SavesASet(Right):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "solved": self.solved}


class GoesOn(Right):
    started = False

    def start(self, pool: Any) -> None:
        if not self.started:
            super().start(pool)
            self.started = True


class DividesByDraws(Right):
    def metrics(self) -> Mapping[str, float]:
        return {"solved": len(self.solved) / len(self.times)}


class NotFinite(Right):
    def metrics(self) -> Mapping[str, float]:
        return {"solved": float("nan")}


class Lambda(Right):
    def __init__(self) -> None:
        self.key = lambda row: row


SOUND = [Right(), ByTheRound()]

BREAKS: list[tuple[str, Any]] = [
    ("sampler.form", object),
    ("sampler.form", WithoutObserve),
    ("sampler.run", Raises),
    *(("sampler.shape", wrong) for wrong in (TooMany, Texts, Twice, OneBeyond)),
    ("sampler.determinism", GlobalRandom),
    ("sampler.exhausted", NothingAtFirst),
    ("sampler.exhausted", NoneNowAndThen),
    ("sampler.odd_pools", WantsTwiceAsMany),
    ("sampler.odd_pools", RunningMean),
    ("sampler.odd_pools", NumbersOnly),
    ("sampler.state", Forgets),
    ("sampler.state", SavesASet),
    ("sampler.start", GoesOn),
    ("sampler.metrics", DividesByDraws),
    ("sampler.metrics", NotFinite),
    ("sampler.pickle", Lambda),
]
