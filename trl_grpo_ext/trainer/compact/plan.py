"""Plan which rows of an optimizer window run together, to compute few tokens. Numbers only.

The rows of some consecutive micro-steps of one window, a block, are sorted and cut into one part per micro-step, such
that the tokens computed are as few as possible: `Σ rows · (longest prompt + longest completion)` where rows are padded;
where they are packed (`packed`), their own tokens, the prompt of a group once in each part. The cut has the same shape
on all ranks: TRL gathers one number per row of a micro-batch, and sharded models need as many forwards on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .packed import Groups, Lengths, together

Runs = npt.NDArray[np.bool_]
"""Which rows have to run."""

PLACEHOLDER_TOKENS = 2
"""Tokens of a lone placeholder: one of a prompt, and one after it."""


@dataclass(frozen=True)
class Plan:
    """How one block runs on one rank."""

    # By micro-step its parts, and by part this rank's rows by index in the block; -1 is a placeholder, where another
    # rank has a row and this one has none left.
    steps: tuple[tuple[tuple[int, ...], ...], ...]
    live: int  # tokens of the rows in the plan, without padding
    computed: int  # tokens computed, with padding and placeholders
    dropped: int  # rows that are not in the plan
    idle: int  # micro-steps that hold nothing but placeholders
    distinct: int = 0  # live tokens, counting the prompt of a group once; 0 if rows are padded


def plan_block(
    ranks: Sequence[tuple[Lengths, Runs]],
    micro_steps: int,
    *,
    rows_per_part: int | None = None,
    max_tokens: int | None = None,
    groups: Sequence[Groups] | None = None,
) -> list[Plan]:
    """Cut one block; the ranks' plans have the same number of parts, and the same number of rows in each part.

    `ranks` has the rows' lengths and which have to run. With `groups`, for each rank a number for each of its rows,
    rows are packed. A part may compute `max_tokens` on any rank, and then there may be more parts than micro-steps; by
    default as many as TRL's largest micro-batch. A longer row runs by itself. Every part has `rows_per_part` rows where
    a loss counts them; then every row runs.
    """
    limits = (max_tokens, 1) if max_tokens else _limits_without_plan(ranks, micro_steps)
    best: tuple[float, list[int], list[npt.NDArray[np.int64]]] | None = None
    for key in range(3 if groups is None else 1):
        if groups is None:
            orders = [_order(lengths, runs, key) for lengths, runs in ranks]
        else:
            orders = [_by_group(*rank, own) for rank, own in zip(ranks, groups, strict=True)]
        ordered = [lengths[order] for (lengths, _), order in zip(ranks, orders, strict=True)]
        if groups is None:
            costs = _costs(_profile(ordered), *limits, rows_per_part)
        else:
            of_rows = [own[order] for own, order in zip(groups, orders, strict=True)]
            costs = _packed_costs(list(zip(ordered, of_rows, strict=True)), *limits, rows_per_part)
        if rows_per_part is not None:
            sizes = [rows_per_part] * micro_steps
            cost = float(sum(costs[rows_per_part - 1, ::rows_per_part][:micro_steps]))
        else:
            sizes, cost = _cheapest_cut(costs, micro_steps, _parts(costs, micro_steps))
        if best is None or cost < best[0]:
            best = (cost, sizes, orders)
    assert best is not None
    _, sizes, orders = best
    return [
        _deal(lengths, order, sizes, micro_steps, None if groups is None else groups[rank])
        for rank, ((lengths, _), order) in enumerate(zip(ranks, orders, strict=True))
    ]


def _order(lengths: Lengths, runs: Runs, key: int) -> npt.NDArray[np.int64]:
    """The rows that run, longest first: by tokens in all, by completion, or by prompt.

    Ties are rows with the same two lengths, so the cut does not depend on their order.
    """
    by = (lengths.sum(axis=1), lengths[:, 1], lengths[:, 0])[key]
    kept = np.flatnonzero(runs)
    return kept[np.lexsort((kept, -lengths[kept, 1], -lengths[kept].sum(axis=1), -by[kept]))]


def _profile(sorted_ranks: Sequence[Lengths]) -> Lengths:
    """For each place in the order, the longest prompt and completion of any rank."""
    longest = max((len(lengths) for lengths in sorted_ranks), default=0)
    profile = np.zeros((longest, 2), dtype=np.int64)
    for lengths in sorted_ranks:
        profile[: len(lengths)] = np.maximum(profile[: len(lengths)], lengths)
    return profile


def _limits_without_plan(ranks: Sequence[tuple[Lengths, Runs]], micro_steps: int) -> tuple[int, int]:
    """Tokens and rows of a micro-batch as TRL cuts it: every row padded to the longest of its rank.

    A part with no more rows than that computes no more on any rank, even if the profile, which joins one rank's longest
    prompt with another's longest completion, has more tokens. So there are never more parts than micro-steps.
    """
    rows = max(-(-len(lengths) // micro_steps) for lengths, _ in ranks)
    widths = [int(lengths.max(axis=0).sum()) for lengths, _ in ranks if len(lengths)]
    return rows * max(widths, default=1), max(rows, 1)


def _by_group(lengths: Lengths, runs: Runs, groups: Groups) -> npt.NDArray[np.int64]:
    """The rows that run, grouped, longest first; groups by their total tokens."""
    kept = np.flatnonzero(runs)
    whole = np.zeros(int(groups.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(whole, groups[kept], lengths[kept, 0])
    np.add.at(whole, groups[kept], lengths[kept, 1] + 1)
    return kept[np.lexsort((kept, -lengths[kept, 1], groups[kept], -whole[groups[kept]]))]


def _costs(
    profile: Lengths, max_tokens: int, rows_at_any_length: int, rows_per_part: int | None = None
) -> npt.NDArray[np.float64]:
    """`[n - 1, k]`: tokens of a part of n rows that starts at row k; infinite if it is not allowed.

    A part may have `max_tokens`, or `rows_at_any_length` rows; with `rows_per_part` it may have these and no others.
    """
    rows = len(profile)
    if rows == 0:
        return np.zeros((rows_per_part or 0, 0))
    least = max(1, int(profile.sum(axis=1).min()))
    widest = rows_per_part or min(rows, max(rows_at_any_length, max_tokens // least))
    costs = np.full((widest, rows), np.inf)
    longest = profile.copy()
    for size in range(1, min(widest, rows) + 1):
        starts = rows - size + 1
        longest[:starts] = np.maximum(longest[:starts], profile[size - 1 :])
        tokens = size * longest[:starts].sum(axis=1)
        allowed = (tokens <= max_tokens) | (size <= rows_at_any_length) | (rows_per_part is not None)
        # Equal cuts are ranked by the sum of squared sizes, so that parts are as even as their lengths allow, which
        # keeps the largest small.
        costs[size - 1, :starts] = np.where(allowed, tokens + 1e-6 * size * size, np.inf)
    return costs


def _packed_costs(
    ordered: Sequence[tuple[Lengths, Groups]], max_tokens: int, rows_at_any_length: int, rows_per_part: int | None
) -> npt.NDArray[np.float64]:
    """Like `_costs` of packed rows: each rank's own tokens, on the rank that has most."""
    rows = max(len(lengths) for lengths, _ in ordered)
    prompts_R_N, own_R_N = (np.zeros((len(ordered), rows), dtype=np.int64) for _ in range(2))
    first_R_N = np.zeros((len(ordered), rows), dtype=bool)  # of its group
    for rank, (lengths, groups) in enumerate(ordered):
        live = np.flatnonzero(lengths[:, 1])
        prompts_R_N[rank, live], own_R_N[rank, live] = lengths[live].T
        first_R_N[rank, live] = np.append(True, groups[live[1:]] != groups[live[:-1]])[: len(live)]
    sums_R_N = np.cumsum(np.pad(own_R_N + np.where(first_R_N, prompts_R_N, 0), ((0, 0), (1, 0))), axis=1)
    again_R_N = np.where(first_R_N, 0, prompts_R_N)  # a part that begins inside a group computes its prompt too
    costs = np.full((rows_per_part or rows, rows), np.inf)
    for size in range(1, len(costs) + 1):
        starts = rows - size + 1
        tokens = (sums_R_N[:, size:] - sums_R_N[:, :starts] + again_R_N[:, :starts]).max(axis=0)
        allowed = (tokens <= max_tokens) | (size <= rows_at_any_length) | (rows_per_part is not None)
        if not allowed.any():  # nor with more rows
            return costs[: size - 1]
        # Equal cuts are ranked by the sum of squares, so that the largest part is small.
        costs[size - 1, :starts] = np.where(allowed, tokens + 1e-6 * tokens.astype(float) ** 2, np.inf)
    return costs


def _cheapest_cut(costs: npt.NDArray[np.float64], micro_steps: int, parts: int) -> tuple[list[int], float]:
    """The cheapest cut into at most that many parts: its sizes and its cost.

    By dynamic programming over (parts made, rows placed). A micro-step without a part has a placeholder.
    """
    widest, rows = costs.shape
    if rows == 0:
        return [], 0.0
    reached = np.full(rows + 1, np.inf)
    reached[0] = 0.0
    choices = np.zeros((parts, rows + 1), dtype=np.int64)
    best, made = np.inf, parts
    for part in range(parts):
        after = np.full(rows + 1, np.inf)
        for size in range(1, widest + 1):
            total = reached[: rows - size + 1] + costs[size - 1, : rows - size + 1]
            better = total < after[size:]
            after[size:][better] = total[better]
            choices[part, size:][better] = size
        reached = after
        idle = max(0, micro_steps - part - 1) * PLACEHOLDER_TOKENS
        if reached[rows] + idle <= best:
            best, made = float(reached[rows] + idle), part + 1
    sizes: list[int] = []
    left = rows
    for part in reversed(range(made)):
        sizes.append(int(choices[part, left]))
        left -= sizes[-1]
    return sizes[::-1], best


def _parts(costs: npt.NDArray[np.float64], micro_steps: int) -> int:
    """The number of parts allowed: one per micro-step, or the fewest that hold all rows."""
    rows: int = costs.shape[1]
    parts, row = 0, 0
    while row < rows:
        row += int(np.flatnonzero(np.isfinite(costs[:, row])).max()) + 1
        parts += 1
    return max(min(micro_steps, rows), parts)


def _deal(
    lengths: Lengths,
    order: npt.NDArray[np.int64],
    sizes: Sequence[int],
    micro_steps: int,
    groups: Groups | None,
) -> Plan:
    """Deal this rank's rows to the parts, and the parts to the micro-steps."""
    steps: list[list[tuple[int, ...]]] = [[] for _ in range(micro_steps)]
    first = 0
    for number, size in enumerate(sizes):
        taken = order[first : first + size].tolist()
        first += size
        steps[number % micro_steps].append((*taken, *[-1] * (size - len(taken))))
    for step in steps[len(sizes) :]:  # fewer rows than micro-steps
        step.append((-1,))
    return _measured(steps, lengths, order, groups)


def plan_in_place(lengths: Lengths, groups: Groups | None = None) -> Plan:
    """The plan of a block of one micro-step whose rows stay as they are."""
    return _measured([[tuple(range(len(lengths)))]], lengths, np.arange(len(lengths)), groups)


def _measured(
    steps: Sequence[Sequence[tuple[int, ...]]],
    lengths: Lengths,
    order: npt.NDArray[np.int64],
    groups: Groups | None,
) -> Plan:
    prompts = {} if groups is None else dict(zip(groups[order].tolist(), lengths[order, 0].tolist(), strict=True))
    return Plan(
        steps=tuple(map(tuple, steps)),
        live=int(lengths[order].sum()),
        computed=sum(part_tokens(lengths, part, groups) for step in steps for part in step),
        dropped=len(lengths) - len(order),
        idle=sum(all(row < 0 for part in step for row in part) for step in steps),
        distinct=0 if groups is None else sum(prompts.values()) + int(lengths[order, 1].sum()),
    )


def part_tokens(lengths: Lengths, part: Sequence[int], groups: Groups | None = None) -> int:
    """Tokens that a part computes on this rank, padding and placeholders counted."""
    rows = [row for row in part if row >= 0]
    if not rows:
        return len(part) * PLACEHOLDER_TOKENS
    if groups is not None and lengths[rows, 1].any():
        bundles = together(lengths[rows], groups[rows])  # the last token of a completion need not run, but counts here
        return sum(int(lengths[rows][own[0], 0] + lengths[rows][own, 1].sum()) for own in bundles)
    return len(part) * int(np.maximum(lengths[rows], 1).max(axis=0).sum())
