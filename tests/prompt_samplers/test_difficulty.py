"""Prompts by what came of them, by hand."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.prompt_samplers.test_orders import plain
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.prompt_samplers.difficulty import DifficultyPool, RetireSolved
from trl_grpo_ext.types import PromptOutcome


def outcome(row: int, mean: float, **means: float) -> PromptOutcome:
    return PromptOutcome(
        row=row, means={"r": mean, **means}, deviations={"r": 0.0}, reward=mean, deviation=0.0, length=1.0
    )


def rounds(sampler: Any, count: int, success: dict[int, float], numbers: Sequence[int]) -> list[list[int]]:
    drawn = []
    for number in numbers:
        rows = sampler.draw(count, number)
        if rows is None:
            break
        drawn.append(list(rows))
        sampler.observe([outcome(row, success.get(row, 0.0)) for row in rows])
    return drawn


def test_retire_solved_leaves_out_what_was_solved() -> None:
    pool, sampler = plain(6), RetireSolved(kept_back=0.0)
    sampler.start(pool)
    solved = dict.fromkeys(pool.order(0)[:3], 1.0)
    drawn = rounds(sampler, 2, solved, range(6))
    assert [row for rows in drawn[:3] for row in rows] == pool.order(0)
    assert all(row not in solved for rows in drawn[3:] for row in rows)
    assert all(len({*rows}) == 2 for rows in drawn)
    assert sampler.metrics() == {"unseen": 0.0, "solved": 0.5, "hopeless": 0.5}


def test_retire_solved_waits_for_several_rounds_in_a_row() -> None:
    sampler = RetireSolved(after=2, kept_back=0.0)
    sampler.start(plain(2))
    for success in (1.0, 0.0, 1.0):
        assert len(sampler.draw(2, 0) or ()) == 2
        sampler.observe([outcome(0, success), outcome(1, 0.5)])
    sampler.observe([outcome(0, 1.0)])
    assert sampler.draw(1, 3) == [1]
    assert sampler.draw(1, 4) == [1]


def test_retire_solved_keeps_a_share_back_and_takes_up_what_is_unlearned() -> None:
    sampler = RetireSolved(kept_back=0.25)
    sampler.start(plain(20))
    rounds(sampler, 4, dict.fromkeys(range(10), 1.0), range(8))  # all have been seen
    drawn = rounds(sampler, 4, dict.fromkeys(range(10), 1.0), range(8, 18))
    assert [sum(row < 10 for row in rows) for rows in drawn] == [1] * 10
    sampler.observe([outcome(3, 0.0)])
    fresh = [row for rows in rounds(sampler, 4, {}, range(18, 28)) for row in rows]
    assert fresh.count(3) >= 2


def test_retire_solved_ends_when_everything_is_solved() -> None:
    sampler = RetireSolved()
    sampler.start(plain(4))
    drawn = rounds(sampler, 2, dict.fromkeys(range(4), 1.0), range(10))
    assert len(drawn) == 2
    assert sampler.draw(2, 2) is None


def test_retire_solved_fills_up_with_retired_prompts() -> None:
    sampler = RetireSolved(kept_back=0.0)
    sampler.start(plain(4))
    rounds(sampler, 4, {0: 1.0, 1: 1.0, 2: 1.0}, range(1))
    drawn = sampler.draw(4, 1)
    assert sorted(drawn or ()) == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [RetireSolved, DifficultyPool])
def test_a_state_survives_json(make: Any) -> None:
    success = {row: row / 9 for row in range(10)}
    whole = make()
    whole.start(plain(10))
    rounds(whole, 3, success, range(4))
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = make()
    resumed.start(plain(10))
    resumed.load_state_dict(state)
    assert rounds(resumed, 3, success, range(4, 12)) == rounds(whole, 3, success, range(4, 12))


def test_difficulty_pool_estimates_by_hand() -> None:
    sampler = DifficultyPool(new_share=0.25, fails_at=-1.0, solved_at=1.0)
    sampler.start(plain(3))
    for mean in (0.0, 1.0, math.nan, 3.0):  # successes 0.5, 1, none, 1
        sampler.observe([outcome(1, mean)])
    assert sampler.estimates == {1: pytest.approx(0.5 + 0.25 * 0.5 + 0.25 * (1 - 0.625))}
    # w = 0.05 + 0.95 · (1 - |p - 0.5| / 0.5)²
    assert sampler.weight(0.5) == 1.0
    assert sampler.weight(0.75) == pytest.approx(0.05 + 0.95 * 0.25)
    assert sampler.weight(1.0) == sampler.weight(0.0) == pytest.approx(0.05)


def test_difficulty_pool_explores_first_and_then_prefers_the_target() -> None:
    sampler = DifficultyPool(explore=0.5)
    sampler.start(plain(30))
    success = {row: (0.0, 0.5, 1.0)[row % 3] for row in range(30)}
    drawn = rounds(sampler, 4, success, range(400))
    assert all(len({*rows}) == 4 for rows in drawn)
    first = [row for rows in drawn[:14] for row in rows]
    assert {*first} == set(range(30))  # two new ones a round, more in the first
    later = Counter(row % 3 for rows in drawn[50:] for row in rows)
    # Without replacement the middle third, of weight 1 against 0.05, is drawn far more often.
    assert later[1] > 5 * max(later[0], later[2])
    assert min(later[0], later[2]) > 0


def test_difficulty_pool_draws_by_weight_as_the_slow_way_does() -> None:
    sampler = DifficultyPool(explore=0.0)
    sampler.start(plain(3))
    sampler.observe([outcome(0, 0.0), outcome(1, 0.5), outcome(2, 0.75)])
    found = Counter(sampler.draw(1, number)[0] for number in range(4000))
    weights = [sampler.weight(p) for p in (0.0, 0.5, 0.75)]
    for row, weight in enumerate(weights):
        assert found[row] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_a_reward_decides_by_its_name() -> None:
    sampler = RetireSolved(reward="right", kept_back=0.0)
    sampler.start(plain(2))
    sampler.observe([outcome(0, 9.0, right=0.0), outcome(1, 0.0, right=1.0)])
    assert sampler.draw(1, 0) == [0]
    with pytest.raises(ConfigurationError, match="no reward 'right'"):
        sampler.observe([outcome(0, 1.0)])
