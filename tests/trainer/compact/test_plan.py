"""How the rows of a block are cut into parts: by hand, against every possible cut, and what holds for any plan.

`shapes` and `cheapest` below are written from the words of `plan_block`, not from its code: the first measures what a
plan computes, the second tries every cut.
"""

from collections.abc import Sequence
from itertools import combinations, pairwise, zip_longest
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.trainer.compact.plan import Plan, plan_block

Row = tuple[int, int]
"""Tokens of the prompt, and of the completion."""
Rank = list[tuple[Row, bool]]
"""Each row, and whether it has to run."""


def plans_of(ranks: Sequence[Rank], micro_steps: int, **settings: Any) -> list[Plan]:
    blocks = [
        (np.array([row for row, _ in rank], dtype=np.int64).reshape(-1, 2), np.array([r for _, r in rank], dtype=bool))
        for rank in ranks
    ]
    return plan_block(blocks, micro_steps, **settings)


def all_run(*rows: Row) -> Rank:
    return [(row, True) for row in rows]


def shapes(ranks: Sequence[Rank], plans: Sequence[Plan]) -> list[tuple[int, int, int]]:
    """Rows, longest prompt and longest completion of each part, over all ranks; placeholders alone have no length."""
    found = []
    for parts in zip(*(plan.steps for plan in plans), strict=True):
        (size,) = {len(part) for part in parts}
        rows = [rank[row][0] for rank, part in zip(ranks, parts, strict=True) for row in part if row >= 0]
        found.append((size, max((p for p, _ in rows), default=0), max((c for _, c in rows), default=0)))
    return found


def tokens(shape: tuple[int, int, int]) -> int:
    return shape[0] * (shape[1] + shape[2])


def rows_without_plan(ranks: Sequence[Rank], micro_steps: int) -> int:
    return -(-max(len(rank) for rank in ranks) // micro_steps)


def limit_without_plan(ranks: Sequence[Rank], micro_steps: int) -> int:
    """What a micro-batch of TRL's computes: its rows, padded to the longest prompt and completion of the rank."""
    rows = rows_without_plan(ranks, micro_steps)
    return rows * max(max(p for (p, _), _ in rank) + max(c for (_, c), _ in rank) for rank in ranks if rank)


def cheapest(ranks: Sequence[Rank], micro_steps: int) -> int:
    """Tokens of the best of all cuts into one part for each micro-step, or for each row where these are fewer."""
    limit, rows_at_any_length = limit_without_plan(ranks, micro_steps), rows_without_plan(ranks, micro_steps)
    kept = [[row for row, runs in rank if runs] for rank in ranks]
    # Rows of equal length: the longer completion first.
    ordered = [sorted(rows, key=lambda row: (sum(row), row[1]), reverse=True) for rows in kept]
    profile = [tuple(map(max, zip(*place, strict=True))) for place in zip_longest(*ordered, fillvalue=(0, 0))]
    found = [] if profile else [0]
    for cuts in combinations(range(1, len(profile)), min(micro_steps, len(profile)) - 1) if profile else ():
        pieces = [profile[a:b] for a, b in pairwise((0, *cuts, len(profile)))]
        costs = [len(piece) * (max(p for p, _ in piece) + max(c for _, c in piece)) for piece in pieces]
        if all(c <= limit or len(piece) <= rows_at_any_length for c, piece in zip(costs, pieces, strict=True)):
            found.append(sum(costs))
    return min(found)


lengths = st.tuples(st.integers(1, 6), st.integers(1, 9))
ranks_of_rows = st.integers(1, 3).flatmap(
    lambda count: st.integers(1, 8).flatmap(
        lambda rows: st.lists(
            st.lists(st.tuples(lengths, st.booleans()), min_size=rows, max_size=rows), min_size=count, max_size=count
        )
    )
)


def test_rows_that_count_each_other_stay_as_many() -> None:
    (plan,) = plans_of([all_run((1, 1), (1, 1), (1, 9), (1, 1))], 2, rows_per_step=2)
    assert plan.steps == ((0, 2), (1, 3))
    assert plan.computed == 2 * 10 + 2 * 2
    # In a block of one micro-step they stay as they are.
    (plan,) = plans_of([all_run((2, 5), (4, 1))], 1, rows_per_step=2)
    assert plan == Plan(((0, 1),), computed=2 * (4 + 5), dropped=0, idle=0)


def test_a_rank_with_fewer_rows_gets_placeholders() -> None:
    # The second rank has one row that runs. The cut is the first rank's; where the second has none left a placeholder
    # stands: beside a row it is as long as the row, by itself it counts for nothing.
    first = all_run((2, 8), (2, 8), (2, 1), (2, 1))
    second = [((3, 2), False), ((2, 5), False), ((4, 3), True), ((2, 9), False)]
    one, two = plans_of([first, second], 2)
    assert one.steps == ((0, 1), (2, 3))
    assert two.steps == ((2, -1), (-1, -1))
    assert (one.computed, one.idle, one.dropped) == (2 * 10 + 2 * 3, 0, 0)
    assert (two.computed, two.idle, two.dropped) == (2 * 7, 1, 3)


@given(ranks_of_rows, st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_of_any_plan(ranks: list[Rank], micro_steps: int, random: Any) -> None:
    plans = plans_of(ranks, micro_steps)
    # No cut computes fewer tokens.
    assert sum(map(tokens, shapes(ranks, plans))) == cheapest(ranks, micro_steps)
    assert all(len(plan.steps) == micro_steps and all(plan.steps) for plan in plans)
    for rank, plan in zip(ranks, plans, strict=True):
        placed = [row for part in plan.steps for row in part if row >= 0]
        assert sorted(placed) == [row for row, (_, runs) in enumerate(rank) if runs]
        assert plan.dropped == len(rank) - len(placed)
        assert plan.idle == sum(all(row < 0 for row in part) for part in plan.steps)
        assert plan.computed == sum(map(tokens, shapes([rank], [plan])))
        # No rank computes more at a time than the largest micro-batch of TRL's.
        assert all(tokens(shape) <= limit_without_plan(ranks, micro_steps) for shape in shapes([rank], [plan]))
    # The order in which rows come does not matter.
    shuffled = [random.sample(rank, len(rank)) for rank in ranks]
    assert shapes(ranks, plans) == shapes(shuffled, plans_of(shuffled, micro_steps))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
@settings(max_examples=30)
def test_parts_of_a_fixed_size_hold_every_row(rows: int, micro_steps: int, count: int, data: st.DataObject) -> None:
    total = rows * micro_steps
    ranks = [all_run(*data.draw(st.lists(lengths, min_size=total, max_size=total), label="rows")) for _ in range(count)]
    for rank, plan in zip(ranks, plans_of(ranks, micro_steps, rows_per_step=rows), strict=True):
        assert [len(part) for part in plan.steps] == [rows] * micro_steps
        assert sorted(row for part in plan.steps for row in part) == list(range(total))
        assert plan.computed <= limit_without_plan([rank], micro_steps) * micro_steps
