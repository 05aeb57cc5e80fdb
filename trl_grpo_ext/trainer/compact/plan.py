"""Which rows of an optimizer window run together, so that little of what is computed is padding. Numbers only.

A block is a number of micro-steps inside one optimizer window. Its rows are put in order of length and cut into as
many parts as there are micro-steps, so that the tokens computed, `Σ rows · (longest prompt + longest completion)`, are
as few as any such cut allows. The cut is made on a profile that all ranks know, so that it has the same shape on all of
them: TRL gathers one number per row of a micro-batch, and sharded models need as many forwards on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
"""`(rows, 2)`: tokens of each row's prompt and of its completion, without padding."""


@dataclass(frozen=True)
class Plan:
    """How one block runs.

    Attributes:
        steps: For each micro-step its parts, for each part this rank's rows, by their number in the block; -1 is a
            placeholder, where another rank has a row and this one has none left.
        live: Tokens of this rank's rows in the plan, without padding.
        computed: Tokens that this rank computes, with padding and placeholders.
        dropped: Rows of this rank that are not in the plan.
        idle: Micro-steps that hold nothing but placeholders, on this rank.
    """

    steps: tuple[tuple[tuple[int, ...], ...], ...]
    live: int
    computed: int
    dropped: int
    idle: int


def plan_block(
    ranks: Sequence[tuple[Lengths, npt.NDArray[np.bool_]]],
    micro_steps: int,
    *,
    rows_per_part: int | None = None,
    max_tokens: int | None = None,
) -> list[Plan]:
    """Cut one block.

    Args:
        ranks: For each rank its rows' lengths, and which of its rows have to run.
        micro_steps: Forwards with a backward that each rank makes for this block, at least.
        rows_per_part: Every part must have this many rows, for losses that count rows; None where any number is exact.
            With it every row has to run, and each rank has `micro_steps * rows_per_part` of them.
        max_tokens: Tokens that a part may compute on any rank. A row that is longer runs by itself. None is as many
            as the largest micro-batch would have had without a plan. With it there may be more parts than micro-steps.

    Returns:
        Each rank's plan; they have the same number of parts, and the same number of rows in each part.
    """
    limits = (max_tokens, 1) if max_tokens else _limits_without_plan(ranks, micro_steps)
    best: tuple[float, list[int], list[npt.NDArray[np.int64]]] | None = None
    for key in range(3):
        orders = [_order(lengths, runs, key) for lengths, runs in ranks]
        profile = _profile([lengths[order] for (lengths, _), order in zip(ranks, orders, strict=True)])
        if rows_per_part is not None:
            sizes = [rows_per_part] * micro_steps
            cost = _cost(profile, sizes)
        else:
            sizes, cost = _cheapest_cut(profile, micro_steps, *limits)
        if best is None or cost < best[0]:
            best = (cost, sizes, orders)
    assert best is not None
    _, sizes, orders = best
    return [_dealt(lengths, order, sizes, micro_steps) for (lengths, _), order in zip(ranks, orders, strict=True)]


def _order(lengths: Lengths, runs: npt.NDArray[np.bool_], key: int) -> npt.NDArray[np.int64]:
    """The rows that run, longest first: by tokens in all, by completion, or by prompt.

    Only rows of the same two lengths are ordered by where they stood, so the cut does not depend on it.
    """
    by = (lengths.sum(axis=1), lengths[:, 1], lengths[:, 0])[key]
    kept = np.flatnonzero(runs)
    return kept[np.lexsort((kept, -lengths[kept, 1], -lengths[kept].sum(axis=1), -by[kept]))]


def _profile(sorted_ranks: Sequence[Lengths]) -> Lengths:
    """At each place of the order, the longest prompt and completion that any rank has there."""
    longest = max((len(lengths) for lengths in sorted_ranks), default=0)
    profile = np.zeros((longest, 2), dtype=np.int64)
    for lengths in sorted_ranks:
        profile[: len(lengths)] = np.maximum(profile[: len(lengths)], lengths)
    return profile


def _limits_without_plan(ranks: Sequence[tuple[Lengths, npt.NDArray[np.bool_]]], micro_steps: int) -> tuple[int, int]:
    """Tokens and rows of a micro-batch as TRL cuts it: every row padded to the longest of its rank.

    A part of no more rows computes no more on any rank, even where the profile, which joins the longest prompt of one
    rank with the longest completion of another, has more tokens. So there are never more parts than micro-steps.
    """
    rows = max(-(-len(lengths) // micro_steps) for lengths, _ in ranks)
    widths = [int(lengths.max(axis=0).sum()) for lengths, _ in ranks if len(lengths)]
    return rows * max(widths, default=1), max(rows, 1)


def _cost(profile: Lengths, sizes: Sequence[int]) -> float:
    """Tokens that a cut computes."""
    ends = np.cumsum(sizes)
    parts = [profile[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return float(sum(len(part) * part.max(axis=0).sum() for part in parts if len(part)))


def _cheapest_cut(
    profile: Lengths, micro_steps: int, max_tokens: int, rows_at_any_length: int
) -> tuple[list[int], float]:
    """Sizes of the parts that compute the fewest tokens, and how many those are.

    A part may have `max_tokens`, or `rows_at_any_length` rows.

    By dynamic programming over (parts made, rows placed). Equal cuts are ranked by the sum of squared sizes, so
    that parts are as even as their lengths allow, which keeps the largest small.
    """
    rows = len(profile)
    if rows == 0:
        return [], 0.0
    widest = min(rows, max(rows_at_any_length, max_tokens // max(1, int(profile.sum(axis=1).min()))))
    # cost[n - 1, k]: a part of n rows that starts at row k
    cost = np.full((widest, rows), np.inf)
    longest = profile.copy()
    for size in range(1, widest + 1):
        starts = rows - size + 1
        longest[:starts] = np.maximum(longest[:starts], profile[size - 1 :])
        tokens = size * longest[:starts].sum(axis=1)
        allowed = (tokens <= max_tokens) | (size <= rows_at_any_length)
        cost[size - 1, :starts] = np.where(allowed, tokens + 1e-6 * size * size, np.inf)
    parts = max(min(micro_steps, rows), _fewest_parts(cost, rows))
    reached = np.full(rows + 1, np.inf)
    reached[0] = 0.0
    choices = np.zeros((parts, rows + 1), dtype=np.int64)
    for part in range(parts):
        after = np.full(rows + 1, np.inf)
        for size in range(1, widest + 1):
            total = reached[: rows - size + 1] + cost[size - 1, : rows - size + 1]
            better = total < after[size:]
            after[size:][better] = total[better]
            choices[part, size:][better] = size
        reached = after
    sizes: list[int] = []
    left = rows
    for part in reversed(range(parts)):
        sizes.append(int(choices[part, left]))
        left -= sizes[-1]
    return sizes[::-1], float(reached[rows])


def _fewest_parts(cost: npt.NDArray[np.float64], rows: int) -> int:
    """How many parts it takes if each takes as many rows as it may."""
    parts, row = 0, 0
    while row < rows:
        row += int(np.flatnonzero(np.isfinite(cost[:, row])).max()) + 1
        parts += 1
    return parts


def _dealt(lengths: Lengths, order: npt.NDArray[np.int64], sizes: Sequence[int], micro_steps: int) -> Plan:
    """Deal this rank's rows to the parts, and the parts to the micro-steps."""
    steps: list[list[tuple[int, ...]]] = [[] for _ in range(micro_steps)]
    place, computed, idle = 0, 0, 0
    for number, size in enumerate(sizes):
        taken = order[place : place + size]
        place += size
        steps[number % micro_steps].append((*taken.tolist(), *[-1] * (size - len(taken))))
        computed += part_tokens(lengths, steps[number % micro_steps][-1])
    for step in steps:
        if not step:  # fewer rows than micro-steps
            step.append((-1,))
            computed += part_tokens(lengths, (-1,))
        idle += all(row < 0 for part in step for row in part)
    live = int(lengths[order].sum())
    return Plan(tuple(map(tuple, steps)), live, computed, len(lengths) - len(order), idle)


def part_tokens(lengths: Lengths, part: Sequence[int]) -> int:
    """Tokens that a part computes on this rank, padding and placeholders counted."""
    rows = [row for row in part if row >= 0]
    if not rows:
        return len(part) * placeholder_tokens(lengths)
    return len(part) * int(np.maximum(lengths[rows], 1).max(axis=0).sum())


def placeholder_tokens(lengths: Lengths) -> int:
    """Tokens of a placeholder: the shortest prompt, and one token after it."""
    return int(lengths[:, 0].min()) + 1 if len(lengths) else 1


def unmoved(lengths: Lengths) -> Plan:
    """The plan of a block of one micro-step whose rows stay as they are."""
    part = tuple(range(len(lengths)))
    return Plan(((part,),), int(lengths.sum()), part_tokens(lengths, part), 0, 0)


def saves_nothing(plan: Plan, lengths: Lengths) -> bool:
    """Whether a block computes as many tokens with the plan as with every row padded to the longest: all are alike."""
    return plan.dropped == 0 and plan.computed >= len(lengths) * int(np.maximum(lengths, 1).max(axis=0).sum())
