"""Prompts by what came of them: solved ones retire, those near a target success rate are preferred."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError
from ..guard.parameters import checked_number, checked_text, checked_whole
from ..types import PromptOutcome, PromptPool, SamplerDeclaration
from .orders import PassAfterPass


class _Tracked:
    """What is known of each prompt: a running estimate of its success rate, and how often in a row it was solved.

    The success of a group is its mean reward, mapped so that `fails_at` is 0 and `solved_at` is 1.
    """

    def __init__(
        self, name: str, reward: str | None, solved_at: float, fails_at: float, new_share: float = 0.5
    ) -> None:
        self._name = name
        self.reward = None if reward is None else checked_text(f"{name}: reward", reward)
        self.fails_at = checked_number(f"{name}: fails_at", fails_at, "a finite number")
        above = f"above fails_at = {fails_at}"
        self.solved_at = checked_number(f"{name}: solved_at", solved_at, above, lambda v: v > fails_at)
        self._new_share = new_share
        self._size = 0
        self.estimates: dict[int, float] = {}
        self.solved_rounds: dict[int, int] = {}

    def start(self, pool: PromptPool) -> None:
        """Take the prompts; nothing is known of them."""
        self._size, self._pool = len(pool.rows), pool
        self.estimates, self.solved_rounds = {}, {}

    def observe(self, outcomes: Sequence[PromptOutcome]) -> None:
        """Update what is known; a prompt whose completions have no reward stays as it was."""
        for outcome in outcomes:
            mean = self._mean(outcome)
            if math.isnan(mean):
                continue
            success = min(1.0, max(0.0, (mean - self.fails_at) / (self.solved_at - self.fails_at)))
            before = self.estimates.get(outcome.row, success)
            self.estimates[outcome.row] = before + self._new_share * (success - before)
            solved = success >= 1.0
            self.solved_rounds[outcome.row] = self.solved_rounds.get(outcome.row, 0) + 1 if solved else 0

    def _mean(self, outcome: PromptOutcome) -> float:
        if self.reward is None:
            return outcome.reward
        if self.reward not in outcome.means:
            raise ConfigurationError(
                f"{self._name}: the run has no reward {self.reward!r}. It has: {', '.join(outcome.means)}."
            )
        return outcome.means[self.reward]

    def metrics(self) -> Mapping[str, float]:
        """Shares of the pool: unseen, solved when last drawn, and hopeless, which is never with a success."""
        size = max(1, self._size)
        solved = sum(rounds > 0 for rounds in self.solved_rounds.values())
        hopeless = sum(estimate == 0.0 for estimate in self.estimates.values())
        return {
            "unseen": 1.0 - len(self.estimates) / size,
            "solved": solved / size,
            "hopeless": hopeless / size,
        }

    def state_dict(self) -> Mapping[str, Any]:
        """What is known, as JSON values."""
        return {
            "estimates": {str(row): estimate for row, estimate in self.estimates.items()},
            "solved_rounds": {str(row): rounds for row, rounds in self.solved_rounds.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know it again."""
        self.estimates = {int(row): float(estimate) for row, estimate in state["estimates"].items()}
        self.solved_rounds = {int(row): int(rounds) for row, rounds in state["solved_rounds"].items()}

    def _random(self, round_number: int) -> random.Random:
        return random.Random(f"{self._pool.seed}/{self._name}/{round_number}")


class RetireSolved(_Tracked):
    """The prompts in TRL's order, without those that were solved `after` times in a row.

    A group that the policy solves as a whole has no signal, and costs as much as any other. A share of each draw goes
    to retired prompts, so that what is unlearned comes back: one that fails is no longer retired. When every prompt has
    retired, the training ends.

    The objective is another: prompts that the policy solves count less than in the data.

    Source: none of its own; prime-rl and open-instruct retire solved prompts in this way.

    Departures: theirs never come back.

    Args:
        after: Rounds in a row in which all completions of a prompt must be right.
        kept_back: Share of each draw for retired prompts, from 0 and below 1.
        reward: The reward function that decides; None means the weighted sum.
        solved_at: Mean reward from which a group is solved.
        fails_at: Mean reward at which it has failed, for the metrics.
    """

    __name__ = "retire_solved"
    declares = SamplerDeclaration()

    def __init__(
        self,
        *,
        after: int = 1,
        kept_back: float = 0.1,
        reward: str | None = None,
        solved_at: float = 1.0,
        fails_at: float = 0.0,
    ) -> None:
        super().__init__("retire_solved", reward, solved_at, fails_at)
        self.after = checked_whole("retire_solved: after", after, lowest=1)
        self.kept_back = checked_number("retire_solved: kept_back", kept_back, "in [0, 1)", lambda v: 0 <= v < 1)
        self._next = 0

    def start(self, pool: PromptPool) -> None:
        """Take the prompts, none of them retired."""
        super().start(pool)
        self._order, self._next = PassAfterPass(pool, range(len(pool.rows))), 0

    def draw(self, count: int, round_number: int) -> Sequence[int] | None:
        """Return the next prompts that are not retired, and some that are."""
        retired = sorted(row for row, rounds in self.solved_rounds.items() if rounds >= self.after)
        left = self._size - len(retired)
        if left == 0:
            return None
        fresh = min(count - int(self.kept_back * count) if retired else count, left)
        drawn: list[int] = []
        while len(drawn) < fresh:
            row = self._order[self._next]
            self._next += 1
            if row not in drawn and self.solved_rounds.get(row, 0) < self.after:
                drawn.append(row)
        return [*drawn, *self._random(round_number).sample(retired, count - fresh)]

    def state_dict(self) -> Mapping[str, Any]:
        """What is known, and the place in the order."""
        return {**super().state_dict(), "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know it again."""
        super().load_state_dict(state)
        self._next = int(state["next"])


class DifficultyPool(_Tracked):
    """Prompts whose success rate is near a target, by a running estimate of each; unseen ones are explored.

    The variance of a group's rewards, and with it the signal, is largest where half of the completions are right. A
    share of each draw are prompts that were never seen, as long as there are any. The others are drawn without
    replacement with probabilities in proportion to

        w = floor + (1 - floor) · (1 - |p - target| / max(target, 1 - target))^sharpness

    for the estimate `p`, so that a prompt which looks solved or hopeless is tried again now and then. A new round
    counts `new_share` in the estimate.

    The objective is another: prompts near the target count more than in the data.

    Source: none of its own; prompts of middle difficulty are preferred by Online Difficulty Filtering (2504.03380) and
    by the difficulty pools of prime-rl.

    Departures: the paper filters what was sampled; this chooses before sampling.

    Args:
        target: The success rate that is preferred, from 0 to 1.
        explore: Share of each draw for prompts that were never seen, from 0 to 1.
        sharpness: How strongly the target is preferred, from 0 (not at all).
        floor: Weight of a prompt as far from the target as possible, above 0 and at most 1.
        new_share: Weight of a new round in the estimate, above 0 and at most 1.
        reward: The reward function that decides; None means the weighted sum.
        solved_at: Mean reward at which the success is 1.
        fails_at: Mean reward at which it is 0.
    """

    __name__ = "difficulty_pool"
    declares = SamplerDeclaration()

    def __init__(
        self,
        *,
        target: float = 0.5,
        explore: float = 0.25,
        sharpness: float = 2.0,
        floor: float = 0.05,
        new_share: float = 0.5,
        reward: str | None = None,
        solved_at: float = 1.0,
        fails_at: float = 0.0,
    ) -> None:
        name, share = "difficulty_pool", "above 0 and at most 1"
        new_share = checked_number(f"{name}: new_share", new_share, share, lambda v: 0 < v <= 1)
        super().__init__(name, reward, solved_at, fails_at, new_share)
        self.target = checked_number(f"{name}: target", target, "from 0 to 1", lambda v: 0 <= v <= 1)
        self.explore = checked_number(f"{name}: explore", explore, "from 0 to 1", lambda v: 0 <= v <= 1)
        self.sharpness = checked_number(f"{name}: sharpness", sharpness, "0 or more", lambda v: v >= 0)
        self.floor = checked_number(f"{name}: floor", floor, share, lambda v: 0 < v <= 1)

    def draw(self, count: int, round_number: int) -> Sequence[int]:
        """Return unseen prompts, then such near the target."""
        chance = self._random(round_number)
        unseen = [row for row in range(self._size) if row not in self.estimates]
        seen = sorted(self.estimates)
        new = min(len(unseen), max(math.ceil(self.explore * count), count - len(seen)))
        # Efraimidis and Spirakis (2006): the largest u^(1/w) are a sample without replacement by weight.
        keys = {row: chance.random() ** (1.0 / self.weight(self.estimates[row])) for row in seen}
        return [*chance.sample(unseen, new), *sorted(seen, key=lambda row: (-keys[row], row))[: count - new]]

    def weight(self, success: float) -> float:
        """The weight of a prompt with this success rate."""
        far = abs(success - self.target) / max(self.target, 1.0 - self.target)
        near: float = max(0.0, 1.0 - far) ** self.sharpness
        return self.floor + (1.0 - self.floor) * near
