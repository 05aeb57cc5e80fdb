"""The prompt samplers: what they draw, by hand and over many draws, and what a checkpoint keeps of them."""

import functools
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.prompt_samplers.samplers import (
    Curriculum,
    DifficultyPool,
    InOrder,
    Mixture,
    PassAfterPass,
    RetireSolved,
)
from trl_grpo_ext.types import PromptOutcome, PromptPool


def pool_of(rows: list[dict[str, Any]], seed: int = 0, left_out: int = 0) -> PromptPool:
    def order(passes: int) -> list[int]:
        numbers = list(range(len(rows)))
        random.Random(passes).shuffle(numbers)
        return numbers[: len(rows) - left_out]

    return PromptPool(rows=rows, seed=seed, order=order)


def plain(size: int, **options: Any) -> PromptPool:
    return pool_of([{"prompt": str(number)} for number in range(size)], **options)


def test_in_order_goes_through_whole_rounds_of_each_pass() -> None:
    pool, sampler = plain(5, left_out=1), InOrder()
    sampler.start(pool)
    drawn = [list(sampler.draw(2, number) or ()) for number in range(4)]
    assert drawn == [pool.order(0)[:2], pool.order(0)[2:4], pool.order(1)[:2], pool.order(1)[2:4]]


def test_pass_after_pass_has_every_row_once_in_each() -> None:
    pool = plain(7, left_out=3)
    order = PassAfterPass(pool, range(7))
    order.take(7)
    order.take(7)
    third = order.take(7)
    assert third[:4] == pool.order(2)
    assert sorted(third) == list(range(7))
    first = pool.order(0)
    assert PassAfterPass(pool, [5, 1]).take(2) == sorted([1, 5], key=[*first, 1, 5].index)


def test_curriculum_opens_the_data_by_the_square_root() -> None:
    difficulties = [5, 1, None, 3, 2, 9, 8, 7, 6, 4]
    pool = pool_of([{"prompt": "", "level": level} for level in difficulties])
    sampler = Curriculum(column="level", rounds=100, start=0.2)
    sampler.start(pool)
    easiest_first = [1, 4, 3, 9, 0, 8, 7, 6, 5, 2]  # rows of the levels 1 to 9, then None
    # sqrt(0.04 + 0.96 · n / 100): 0.2, 0.5 at n = 21.875, 1 at the end
    for number, open_rows in ((0, 2), (22, 5), (100, 10), (1000, 10)):
        seen = {row for tried in range(200) for row in sampler.draw(2, number + 1000 * tried * (number >= 100))}
        assert seen <= {*easiest_first[:open_rows]}
    assert {*sampler.draw(2, 0)} == {1, 4}
    assert sampler.metrics()["open"] == pytest.approx(0.2)
    assert list(sampler.draw(3, 50)) == list(sampler.draw(3, 50))


@pytest.mark.parametrize(
    ("column", "values"), [("missing", [1, 2]), ("level", ["easy", "hard"]), ("level", [float("nan"), 1.0])]
)
def test_curriculum_refuses_a_column_without_numbers(column: str, values: list[Any]) -> None:
    sampler = Curriculum(column=column, rounds=10)
    with pytest.raises(ConfigurationError, match=column):
        sampler.start(pool_of([{"prompt": "", "level": value} for value in values]))


def mixed(sizes: dict[str, int]) -> PromptPool:
    return pool_of([{"prompt": "", "source": name} for name, size in sizes.items() for _ in range(size)])


def test_mixture_gives_each_source_its_share_over_time() -> None:
    pool = mixed({"a": 10, "b": 5, "c": 4})
    sampler = Mixture(column="source", weights={"a": 2, "b": 1})
    sampler.start(pool)
    drawn = [list(sampler.draw(4, number) or ()) for number in range(30)]
    assert all(len({*rows}) == 4 for rows in drawn)
    names = [pool.rows[row]["source"] for rows in drawn for row in rows]
    assert names.count("a") == pytest.approx(80, abs=1)  # a single row may still be owed
    assert "c" not in names
    assert sampler.metrics() == pytest.approx({"drawn/a": 2 / 3, "drawn/b": 1 / 3}, abs=0.01)
    of_a = [row for rows in drawn for row in rows if row < 10]
    assert of_a[:10] == [row for row in pool.order(0) if row < 10]  # TRL's order within a source


def test_mixture_fills_in_where_a_source_is_smaller_than_its_part() -> None:
    sampler = Mixture(column="source", weights={"a": 1, "b": 1})
    sampler.start(mixed({"a": 1, "b": 9}))
    drawn = {*(sampler.draw(6, 0) or ())}
    assert 0 in drawn
    assert len(drawn) == 6
    assert sampler.draw(11, 1) is None


def test_none_in_a_column_is_hardest_or_no_source() -> None:
    pool = pool_of([{"prompt": "", "level": None, "source": None}, {"prompt": "", "level": 1, "source": "a"}])
    easiest, listed = Curriculum(column="level", rounds=10), Mixture(column="source", weights={"a": 1.0})
    for sampler in (easiest, listed):
        sampler.start(pool)
        assert list(sampler.draw(1, 0) or ()) == [1]
    assert listed.draw(2, 1) is None


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0}, {"d": 1.0}])
def test_mixture_refuses_weights_that_draw_nothing(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        Mixture(column="source", weights=weights).start(mixed({"a": 2}))


def outcome(row: int, mean: float, **means: float) -> PromptOutcome:
    return PromptOutcome(row=row, means=means, deviations={}, reward=mean, deviation=0.0, length=1.0)


def rounds(sampler: Any, count: int, success: dict[int, float], numbers: Sequence[int]) -> list[list[int]]:
    drawn = []
    for number in numbers:
        rows = sampler.draw(count, number)
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
    assert sampler.draw(1, 3) == sampler.draw(1, 4) == [1]


def test_retire_solved_keeps_a_share_back_and_takes_up_what_is_unlearned() -> None:
    sampler = RetireSolved(kept_back=0.25)
    sampler.start(plain(20))
    rounds(sampler, 4, dict.fromkeys(range(10), 1.0), range(8))  # all have been seen
    drawn = rounds(sampler, 4, dict.fromkeys(range(10), 1.0), range(8, 18))
    assert [sum(row < 10 for row in rows) for rows in drawn] == [1] * 10
    sampler.observe([outcome(3, 0.0)])
    fresh = [row for rows in rounds(sampler, 4, {}, range(18, 28)) for row in rows]
    assert fresh.count(3) >= 2


def test_retire_solved_fills_up_with_retired_prompts_and_ends_when_everything_is_solved() -> None:
    sampler = RetireSolved(kept_back=0.0)
    sampler.start(plain(4))
    rounds(sampler, 4, {0: 1.0, 1: 1.0, 2: 1.0}, range(1))
    assert sorted(sampler.draw(4, 1) or ()) == [0, 1, 2, 3]
    rounds(sampler, 4, dict.fromkeys(range(4), 1.0), range(1, 2))
    assert sampler.draw(2, 2) is None


def test_retire_solved_keeps_back_no_more_than_there_is() -> None:
    sampler = RetireSolved(kept_back=0.5)
    sampler.start(plain(12))
    rounds(sampler, 8, {0: 1.0}, range(1))
    drawn = sampler.draw(8, 1) or ()
    assert len({*drawn}) == 8
    assert 0 in drawn


@pytest.mark.parametrize(
    "make",
    [
        RetireSolved,
        DifficultyPool,
        functools.partial(Mixture, column="source", weights={"a": 1.0, "b": 2.0}),
        functools.partial(Curriculum, column="level", rounds=10),
    ],
)
def test_a_state_survives_json(make: Any) -> None:
    success = {row: row / 9 for row in range(10)}
    pool = pool_of([{"prompt": "", "level": row, "source": "a" if row < 4 else "b"} for row in range(10)])
    whole, resumed = make(), make()
    for sampler in (whole, resumed):
        sampler.start(pool)
    before = resumed.metrics()
    rounds(whole, 3, success, range(4))
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.metrics() == whole.metrics() != before
    assert rounds(resumed, 3, success, range(4, 12)) == rounds(whole, 3, success, range(4, 12))


def test_curriculum_takes_the_empty_state_of_older_checkpoints() -> None:
    success = {row: row / 9 for row in range(10)}
    fresh, resumed = Curriculum(column="level", rounds=10), Curriculum(column="level", rounds=10)
    for sampler in (fresh, resumed):
        sampler.start(pool_of([{"prompt": "", "level": row} for row in range(10)]))
    resumed.load_state_dict({})
    assert rounds(resumed, 3, success, range(8)) == rounds(fresh, 3, success, range(8))


def test_difficulty_pool_estimates_by_hand() -> None:
    sampler = DifficultyPool(fails_at=-1.0, solved_at=1.0)
    sampler.start(plain(3))
    for mean in (0.0, 1.0, math.nan, 3.0):  # successes 0.5, 1, none, 1
        sampler.observe([outcome(1, mean)])
    assert sampler.estimates == {1: pytest.approx((0.75 + 1) / 2)}
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


def test_difficulty_pool_sees_most_of_a_pool_first() -> None:
    sampler = DifficultyPool()
    sampler.start(plain(40))
    drawn = rounds(sampler, 4, dict.fromkeys(range(40), 0.5), range(8))
    assert len({row for rows in drawn for row in rows}) == 25  # of 32 draws: 4, 4, 4, 3, 3, 3, 2, 2 new ones


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
    with pytest.raises(ConfigurationError, match="'right'"):
        sampler.observe([outcome(0, 1.0)])
