"""Prompt samplers: in an order of their own, or by what came of the prompts."""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

from ..errors import ConfigurationError
from ..guard.parameters import Checked, checked_choice, checked_number, checked_text, checked_whole, number, text, whole
from ..types import PromptOutcome, PromptPool, SamplerDeclaration


class _ByRound:
    """A sampler whose draws depend on the round alone."""

    declares = SamplerDeclaration()

    def observe(self, outcomes: Sequence[PromptOutcome]) -> None:
        """The order does not depend on outcomes."""

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""


class InOrder(_ByRound):
    """The prompts in the order of TRL's own sampler; what runs without a prompt sampler, equal to TRL's own batches.

    Source: TRL's `RepeatSampler`.
    Departures: a round of `resample` takes further prompts, so that the data is passed faster.
    """

    __name__ = "in_order"

    def start(self, pool: PromptPool) -> None:
        self._pool = pool

    def draw(self, count: int, round_number: int) -> Sequence[int] | None:
        done, place = divmod(round_number, len(self._pool.rows) // count)
        return self._pool.order(done)[place * count : (place + 1) * count]


class Curriculum(_ByRound):
    """Easy prompts first: drawn at random from a part of the data that grows, by a column of difficulties.

    In round `n` the prompts come from the easiest share `min(1, sqrt(start² + (1 - start²) · n / rounds))` of the data,
    and never from fewer than a draw needs. Prompts whose column is None count as the hardest. Until the whole pool is
    open, the objective is another: hard prompts do not count.

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

    def start(self, pool: PromptPool) -> None:
        numbers = [math.inf if value is None else value for value in _column(pool, self.column, "curriculum")]
        for row, value in enumerate(numbers):
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
                what = f"the column {self.column!r} must have numbers or None"
                raise ConfigurationError(f"curriculum: {what}, got {value!r} in row {row}.")
        self._seed = pool.seed
        self._order = sorted(range(len(numbers)), key=lambda row: (numbers[row], row))
        self._open = self.start_share

    def draw(self, count: int, round_number: int) -> Sequence[int]:
        done = min(1.0, round_number / self.rounds)
        self._open = (self.start_share**2 + (1.0 - self.start_share**2) * done) ** 0.5
        easiest = self._order[: max(count, round(self._open * len(self._order)))]
        return random.Random(f"{self._seed}/curriculum/{round_number}").sample(easiest, count)

    def metrics(self) -> Mapping[str, float]:
        return {"open": self._open}

    def state_dict(self) -> Mapping[str, Any]:  # the next round is drawn before a checkpoint
        return {"open": self._open}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._open = float(state.get("open", self.start_share))


class Mixture(Checked, _ByRound):
    """Prompts of several sources in given proportions, each source in TRL's order.

    Each source gets its share of the draws, over time to the row. A source with fewer rows than its part of a draw
    gives all of them once, and the others fill in. The objective is another: sources count by weight, not by size.

    Source: none of its own.

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
    column: str = text()
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.weights, Mapping):
            raise ConfigurationError(f"mixture: weights must be a mapping of sources to numbers, got {self.weights!r}.")
        checked = {
            str(source): checked_number(f"mixture: weight of {source}", weight, "0 or more", lambda v: v >= 0)
            for source, weight in self.weights.items()
        }
        total = sum(checked.values())
        if not total:
            raise ConfigurationError("mixture: no source has a weight above 0.")
        self.shares = {source: weight / total for source, weight in checked.items() if weight}

    def start(self, pool: PromptPool) -> None:
        values = [str(value) for value in _column(pool, self.column, "mixture")]
        self._orders = {
            source: PassAfterPass(pool, (row for row, value in enumerate(values) if value == source))
            for source in self.shares
        }
        for source in self.shares:
            checked_choice(f"mixture: a source in {self.column!r}", source, sorted({*values}))

    def draw(self, count: int, round_number: int) -> Sequence[int] | None:
        sizes = {source: len(order.rows) for source, order in self._orders.items()}
        if sum(sizes.values()) < count:
            return None
        total = sum(order.drawn for order in self._orders.values()) + count
        owed = {source: share * total - self._orders[source].drawn for source, share in self.shares.items()}
        parts = dict.fromkeys(owed, 0)
        for _ in range(count):  # one row at a time to the source to which most is owed
            able = [source for source in owed if parts[source] < sizes[source]]
            parts[max(able, key=lambda source: (owed[source] - parts[source], source))] += 1
        return [row for source, part in parts.items() for row in self._orders[source].take(part)]

    def metrics(self) -> Mapping[str, float]:
        total = max(1, sum(order.drawn for order in self._orders.values()))
        return {f"drawn/{source}": order.drawn / total for source, order in self._orders.items()}

    def state_dict(self) -> Mapping[str, Any]:
        return {"next": {source: order.drawn for source, order in self._orders.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for source, drawn in state["next"].items():
            self._orders[source].drawn = int(drawn)


class PassAfterPass:
    """Rows in the order of TRL's sampler, pass after pass; those that it leaves out, as they fill no batch, last."""

    def __init__(self, pool: PromptPool, rows: Iterable[int]) -> None:
        self.rows = {*rows}
        self.drawn = 0
        self._pool = pool
        self._passes = -1
        self._order: list[int] = []

    def take(self, count: int, skip: Callable[[int], bool] = lambda row: False) -> list[int]:
        """The next rows, different ones, without those to skip."""
        taken: list[int] = []
        while len(taken) < count:
            row = self._at(self.drawn)
            self.drawn += 1
            if row not in taken and not skip(row):  # over the end of a pass a row may come again
                taken.append(row)
        return taken

    def _at(self, number: int) -> int:
        passes, place = divmod(number, len(self.rows))
        if passes != self._passes:  # one pass is kept: places are asked for one after the other
            order = [row for row in self._pool.order(passes) if row in self.rows]
            self._passes = passes
            self._order = [*order, *sorted(self.rows.difference(order))]
        return self._order[place]


def _column(pool: PromptPool, name: str, sampler: str) -> list[Any]:
    values = pool.column(name)
    if all(value is None for value in values):
        raise ConfigurationError(f"{sampler}: no values in the column {name!r}, only in {sorted(pool.rows[0])}.")
    return values


class _Tracked(Checked):
    """What is known of each prompt: a running estimate of its success rate, and how often in a row it was solved.

    A group's success is its mean reward, from 0 at `fails_at` to 1 at `solved_at`; the last round is half the estimate.
    """

    __name__: ClassVar[str]
    declares = SamplerDeclaration()

    reward: str | None = text(None)
    solved_at: float = number(1.0, "a finite number")
    fails_at: float = number(0.0, "a finite number")
    estimates: dict[int, float] = field(init=False, default_factory=dict)
    solved_rounds: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solved_at <= self.fails_at:
            numbers = f"{self.solved_at} and {self.fails_at}"
            raise ConfigurationError(f"{self.__name__}: solved_at must be above fails_at, got {numbers}.")

    def start(self, pool: PromptPool) -> None:
        self._pool = pool
        self.estimates = {}
        self.solved_rounds = {}

    def observe(self, outcomes: Sequence[PromptOutcome]) -> None:
        """Update what is known; a prompt whose completions have no reward stays as it was."""
        for outcome in outcomes:
            mean = outcome.reward
            if self.reward is not None:
                mean = outcome.means[checked_choice(f"{self.__name__}: reward", self.reward, [*outcome.means])]
            if math.isnan(mean):
                continue
            success = min(1.0, max(0.0, (mean - self.fails_at) / (self.solved_at - self.fails_at)))
            before = self.estimates.get(outcome.row, success)
            self.estimates[outcome.row] = before + 0.5 * (success - before)
            in_a_row = self.solved_rounds.get(outcome.row, 0)
            self.solved_rounds[outcome.row] = in_a_row + 1 if success >= 1.0 else 0

    def metrics(self) -> Mapping[str, float]:
        """Shares of the pool: unseen, solved when last drawn, and hopeless, which is never with a success."""
        size = max(1, len(self._pool.rows))
        return {
            "unseen": 1.0 - len(self.estimates) / size,
            "solved": sum(rounds > 0 for rounds in self.solved_rounds.values()) / size,
            "hopeless": sum(estimate == 0.0 for estimate in self.estimates.values()) / size,
        }

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "estimates": {str(row): estimate for row, estimate in self.estimates.items()},
            "solved_rounds": {str(row): rounds for row, rounds in self.solved_rounds.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.estimates = {int(row): float(estimate) for row, estimate in state["estimates"].items()}
        self.solved_rounds = {int(row): int(rounds) for row, rounds in state["solved_rounds"].items()}

    def _random(self, round_number: int) -> random.Random:
        return random.Random(f"{self._pool.seed}/{self.__name__}/{round_number}")


class RetireSolved(_Tracked):
    """The prompts in TRL's order, without those that were solved `after` times in a row.

    A share of each draw goes to retired prompts: one that fails is no longer retired. When every prompt has retired,
    the training ends. The objective is another: prompts that the policy solves count less than in the data.

    Source: none of its own; prime-rl and open-instruct retire solved prompts in this way, but for good.

    Args:
        after: Rounds in a row in which all completions of a prompt must be right.
        kept_back: Share of each draw for retired prompts, from 0 and below 1.
        reward: The reward function that decides; None means the weighted sum.
        solved_at: Mean reward from which a group is solved.
        fails_at: Mean reward at which it has failed, for the metrics.
    """

    __name__ = "retire_solved"
    after: int = whole(1, lowest=1)
    kept_back: float = number(0.1, "in [0, 1)", lambda v: 0 <= v < 1)

    def start(self, pool: PromptPool) -> None:
        super().start(pool)
        self._order = PassAfterPass(pool, range(len(pool.rows)))

    def draw(self, count: int, round_number: int) -> Sequence[int] | None:
        retired = sorted(row for row, rounds in self.solved_rounds.items() if rounds >= self.after)
        left = len(self._pool.rows) - len(retired)
        if left == 0:
            return None
        fresh = min(count - min(int(self.kept_back * count), len(retired)), left)
        drawn = self._order.take(fresh, skip=lambda row: self.solved_rounds.get(row, 0) >= self.after)
        return [*drawn, *self._random(round_number).sample(retired, count - fresh)]

    def state_dict(self) -> Mapping[str, Any]:
        return {**super().state_dict(), "next": self._order.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._order.drawn = int(state["next"])


class DifficultyPool(_Tracked):
    """Prompts whose success rate is near a target, by a running estimate of each; unseen ones are explored.

    A share of each draw are prompts that were never seen, at first nearly all of it. The others are drawn without
    replacement in proportion to `w = 0.05 + 0.95 · (1 - |p - target| / max(target, 1 - target))²` for the estimate `p`,
    so that a prompt which looks solved or hopeless is tried again now and then. The objective is another: prompts near
    the target count more than in the data.

    Source: none of its own; Online Difficulty Filtering (2504.03380) and prime-rl's pools prefer middle difficulties.
    Departures: the paper filters what was sampled; this chooses before sampling.

    Args:
        target: The success rate that is preferred, from 0 to 1.
        explore: Least share of each draw for prompts that were never seen, from 0 to 1; at least theirs in the pool.
        reward: The reward function that decides; None means the weighted sum.
        solved_at: Mean reward at which the success is 1.
        fails_at: Mean reward at which it is 0.
    """

    __name__ = "difficulty_pool"
    target: float = number(0.5, "from 0 to 1", lambda v: 0 <= v <= 1)
    explore: float = number(0.25, "from 0 to 1", lambda v: 0 <= v <= 1)

    def draw(self, count: int, round_number: int) -> Sequence[int]:
        chance = self._random(round_number)
        size = len(self._pool.rows)
        unseen = [row for row in range(size) if row not in self.estimates]
        seen = sorted(self.estimates)
        new = min(len(unseen), math.ceil(count * max(self.explore, len(unseen) / size)))
        new = max(new, count - len(seen))
        # Efraimidis and Spirakis (2006): the largest u^(1/w) are a sample without replacement by weight.
        keys = {row: chance.random() ** (1.0 / self.weight(self.estimates[row])) for row in seen}
        return [*chance.sample(unseen, new), *sorted(seen, key=lambda row: (-keys[row], row))[: count - new]]

    def weight(self, success: float) -> float:
        """The weight of a prompt with this success rate."""
        far = abs(success - self.target) / max(self.target, 1.0 - self.target)
        return 0.05 + (1.0 - 0.05) * math.pow(max(0.0, 1.0 - far), 2.0)
