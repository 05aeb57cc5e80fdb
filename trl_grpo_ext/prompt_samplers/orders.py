"""Prompts in an order that does not depend on what came of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError
from ..guard.parameters import checked_number, checked_text, checked_whole
from ..types import PromptOutcome, PromptPool, SamplerDeclaration


class InOrder:
    """The prompts in the order of TRL's own sampler, in as many whole rounds as a pass over the data has.

    It is what runs without a prompt sampler, and equal to TRL's own batches.

    Source: TRL's `RepeatSampler`.

    Departures: a round of `resample` takes further prompts, so that the data is passed faster.
    """

    __name__ = "in_order"
    declares = SamplerDeclaration()

    def start(self, pool: PromptPool) -> None:
        """Take the prompts."""
        self._pool = pool

    def draw(self, count: int, round_number: int) -> Sequence[int] | None:
        """Return the next `count` row numbers."""
        rounds = len(self._pool.rows) // count
        done, place = divmod(round_number, rounds)
        return self._pool.order(done)[place * count : (place + 1) * count]

    def observe(self, outcomes: Sequence[PromptOutcome]) -> None:
        """The order does not depend on outcomes."""

    def state_dict(self) -> Mapping[str, Any]:
        """The round alone decides."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""


class Curriculum:
    """Easy prompts first: drawn at random from a part of the data that grows, by a column of difficulties.

    In round `n` the prompts come from the easiest share `min(1, sqrt(start² + (1 - start²) · n / rounds))` of the data,
    and never from fewer than a draw needs. Prompts whose column is None count as the hardest.

    Until the whole pool is open, the objective is another: hard prompts do not count.

    Source: Competence-based Curriculum Learning (1903.09848), with its square-root competence.

    Departures: difficulties are a column of the data, not lengths or rarities of words.

    Args:
        column: The column of numbers; smaller is easier.
        rounds: Rounds after which all prompts are open.
        start: Share of the data that is open at the beginning, above 0 and at most 1.
    """

    __name__ = "curriculum"
    declares = SamplerDeclaration(
        conformance={"parameters": {"column": "level", "rounds": 5}, "columns": {"level": [3, 1, 2]}}
    )

    def __init__(self, *, column: str, rounds: int, start: float = 0.1) -> None:
        self.column = checked_text("curriculum: column", column)
        self.rounds = checked_whole("curriculum: rounds", rounds, lowest=1)
        self.start_share = checked_number("curriculum: start", start, "above 0 and at most 1", lambda v: 0 < v <= 1)
        self._open = 1.0

    def start(self, pool: PromptPool) -> None:
        """Take the prompts, sorted by difficulty."""
        values = _column(pool, self.column, "curriculum")
        numbers: list[float] = []
        for row, value in enumerate(values):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value != value):
                raise ConfigurationError(
                    f"curriculum: the column {self.column!r} must have numbers or None; row {row} has {value!r}."
                )
            numbers.append(float("inf") if value is None else float(value))
        self._seed = pool.seed
        self._order = sorted(range(len(numbers)), key=lambda row: (numbers[row], row))

    def draw(self, count: int, round_number: int) -> Sequence[int]:
        """Return prompts from the part that is open."""
        done = min(1.0, round_number / self.rounds)
        self._open = (self.start_share**2 + (1.0 - self.start_share**2) * done) ** 0.5
        easiest = self._order[: max(count, round(self._open * len(self._order)))]
        return random.Random(f"{self._seed}/curriculum/{round_number}").sample(easiest, count)

    def observe(self, outcomes: Sequence[PromptOutcome]) -> None:
        """The order does not depend on outcomes."""

    def metrics(self) -> Mapping[str, float]:
        """The share of the data that is open."""
        return {"open": self._open}

    def state_dict(self) -> Mapping[str, Any]:
        """The round alone decides."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""


class Mixture:
    """Prompts of several sources in given proportions, each source in TRL's order.

    Of every draw each source gets its share; what rounding takes from it, it gets back in a later draw. A source with
    fewer rows than its part of one draw gives all of them once, and the others fill in.

    The objective is another: sources count by their weights, not by their sizes.

    Source: none of its own.

    Departures: none.

    Args:
        column: The column that names a row's source.
        weights: Weight of each source, 0 or more, by its value in the column. Sources that are not listed are left out.
    """

    __name__ = "mixture"
    declares = SamplerDeclaration(
        conformance={
            "parameters": {"column": "source", "weights": {"a": 2, "b": 1}},
            "columns": {"source": ["a", "b", "a"]},
        }
    )

    def __init__(self, *, column: str, weights: Mapping[str, float]) -> None:
        self.column = checked_text("mixture: column", column)
        if not isinstance(weights, Mapping) or not weights:
            raise ConfigurationError(f"mixture: weights must be a mapping of sources to numbers, got {weights!r}.")
        checked = {
            str(source): checked_number(f"mixture: weight of {source}", weight, "0 or more", lambda v: v >= 0)
            for source, weight in weights.items()
        }
        total = sum(checked.values())
        if not total:
            raise ConfigurationError("mixture: all weights are 0. Give a source a weight above 0.")
        self.shares = {source: weight / total for source, weight in checked.items() if weight}
        self._next: dict[str, int] = {}  # rows drawn so far, by source

    def start(self, pool: PromptPool) -> None:
        """Take the prompts, by source."""
        values = [str(value) for value in _column(pool, self.column, "mixture")]
        self._orders = {
            source: PassAfterPass(pool, (row for row, value in enumerate(values) if value == source))
            for source in self.shares
        }
        if empty := [source for source, order in self._orders.items() if not order.rows]:
            raise ConfigurationError(
                f"mixture: no row has {empty[0]!r} in the column {self.column!r}. It has: "
                f"{', '.join(sorted({*values})[:20])}."
            )
        self._next = dict.fromkeys(self.shares, 0)

    def draw(self, count: int, round_number: int) -> Sequence[int] | None:
        """Return rows of each source, by its share of all that was drawn so far."""
        sizes = {source: len(order.rows) for source, order in self._orders.items()}
        if sum(sizes.values()) < count:
            return None
        total = sum(self._next.values()) + count
        owed = {source: share * total - self._next[source] for source, share in self.shares.items()}
        parts = dict.fromkeys(owed, 0)
        for _ in range(count):  # one row at a time to the source to which most is owed
            able = [source for source in owed if parts[source] < sizes[source]]
            source = max(able, key=lambda one: (owed[one] - parts[one], one))
            parts[source] += 1
        return [row for source, part in parts.items() for row in self._take(source, part)]

    def _take(self, source: str, count: int) -> list[int]:
        drawn: list[int] = []
        while len(drawn) < count:
            row = self._orders[source][self._next[source]]
            self._next[source] += 1
            if row not in drawn:  # a draw that goes over the end of a pass may meet a row again
                drawn.append(row)
        return drawn

    def observe(self, outcomes: Sequence[PromptOutcome]) -> None:
        """The order does not depend on outcomes."""

    def metrics(self) -> Mapping[str, float]:
        """Each source's share of what was drawn."""
        total = max(1, sum(self._next.values()))
        return {f"drawn/{source}": drawn / total for source, drawn in self._next.items()}

    def state_dict(self) -> Mapping[str, Any]:
        """How many rows of each source were drawn."""
        return {"next": dict(self._next)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self._next = {source: int(drawn) for source, drawn in state["next"].items()}


class PassAfterPass:
    """Rows in the order of TRL's sampler, pass after pass; those that it leaves out, as they fill no batch, last."""

    def __init__(self, pool: PromptPool, rows: Iterable[int]) -> None:
        self.rows, self._pool = {*rows}, pool
        self._passes, self._order = -1, list[int]()

    def __getitem__(self, number: int) -> int:
        """The row at a place, counted from 0 over all passes."""
        passes, place = divmod(number, len(self.rows))
        if passes != self._passes:  # one pass is kept: places are asked for one after the other
            order = [row for row in self._pool.order(passes) if row in self.rows]
            self._passes, self._order = passes, [*order, *sorted(self.rows.difference(order))]
        return self._order[place]


def _column(pool: PromptPool, name: str, sampler: str) -> list[Any]:
    values = pool.column(name)
    if all(value is None for value in values):
        raise ConfigurationError(
            f"{sampler}: the data have no column {name!r}. They have: {', '.join(sorted(pool.rows[0]))}."
        )
    return values
