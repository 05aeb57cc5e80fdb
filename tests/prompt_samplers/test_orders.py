"""Orders that do not depend on outcomes, by hand."""

import json
import random
from typing import Any

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.prompt_samplers.orders import Curriculum, InOrder, Mixture, PassAfterPass
from trl_grpo_ext.types import PromptPool


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
    assert [order[number] for number in range(14, 18)] == pool.order(2)
    assert sorted(order[number] for number in range(14, 21)) == list(range(7))
    assert [PassAfterPass(pool, [5, 1])[number] for number in range(2)] == [
        *(row for row in pool.order(0) if row in (1, 5)),
        *(row for row in (1, 5) if row not in pool.order(0)),
    ]


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
    first_of_a = [row for rows in drawn for row in rows if row < 10][:10]
    assert first_of_a == [row for row in pool.order(0) if row < 10]  # TRL's order within a source


def test_mixture_fills_in_where_a_source_is_smaller_than_its_part() -> None:
    sampler = Mixture(column="source", weights={"a": 1, "b": 1})
    sampler.start(mixed({"a": 1, "b": 9}))
    drawn = sampler.draw(6, 0)
    assert drawn is not None
    assert sorted(drawn)[0] == 0
    assert len({*drawn}) == 6
    assert sampler.draw(11, 1) is None


def test_none_in_a_column_is_hardest_or_no_source() -> None:
    pool = pool_of([{"prompt": "", "level": None, "source": None}, {"prompt": "", "level": 1, "source": "a"}])
    easiest, listed = Curriculum(column="level", rounds=10), Mixture(column="source", weights={"a": 1.0})
    for sampler in (easiest, listed):
        sampler.start(pool)
        assert list(sampler.draw(1, 0) or ()) == [1]
    assert listed.draw(2, 1) is None


def test_mixture_continues_from_its_state() -> None:
    weights, pool = {"a": 1.0, "b": 2.0}, mixed({"a": 3, "b": 4})
    whole = Mixture(column="source", weights=weights)
    whole.start(pool)
    drawn = [whole.draw(2, number) for number in range(3)]
    state = json.loads(json.dumps(whole.state_dict()))
    drawn += [whole.draw(2, number) for number in range(3, 9)]
    resumed = Mixture(column="source", weights=weights)
    resumed.start(pool)
    resumed.load_state_dict(state)
    assert [resumed.draw(2, number) for number in range(3, 9)] == drawn[3:]


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0}, {"d": 1.0}])
def test_mixture_refuses_weights_that_draw_nothing(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        Mixture(column="source", weights=weights).start(mixed({"a": 2}))
