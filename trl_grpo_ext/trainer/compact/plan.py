"""Plan which rows of an optimizer window run together, to compute little padding. Numbers only.

The rows of some consecutive micro-steps of one window, a block, are sorted by length and cut into one part per
micro-step, such that the tokens computed, `Σ rows · (longest prompt + longest completion)`, are as few as possible. The
cut is made on a profile that all ranks know, so that it has the same shape on all of them: TRL gathers one number per
row of a micro-batch, and sharded models need as many forwards on each rank.

With shared prompts (`shared`), an order that keeps the rows of a group together is tried too, and a part costs as much
as the cheaper of its two layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .shared import GAIN, Groups, Lengths, Price, shared_rows, sizes_of, width_of

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
    distinct: int = 0  # live tokens, counting each prompt once; 0 if prompts are not shared
    shared: int = 0  # parts in the shared layout


@dataclass(frozen=True)
class Shared:
    """How prompts may be shared."""

    groups: Sequence[Groups]  # for each rank a number for each of its rows, the same for rows of the same prompt
    price: Price  # of a forward pass
    max_tokens: int  # that one may compute, see `token_limit`


def plan_block(
    ranks: Sequence[tuple[Lengths, Runs]],
    micro_steps: int,
    *,
    rows_per_part: int | None = None,
    max_tokens: int | None = None,
    shared: Shared | None = None,
) -> list[Plan]:
    """Cut one block; the ranks' plans have the same number of parts, and the same number of rows in each part.

    `ranks` has the rows' lengths and which have to run. A part may compute `max_tokens` on any rank, and then there may
    be more parts than micro-steps; by default as many as TRL's largest micro-batch. A longer row runs by itself. Every
    part has `rows_per_part` rows where a loss counts them; then every row runs.
    """
    limits = (max_tokens, 1) if max_tokens else _limits_without_plan(ranks, micro_steps)
    best: tuple[float, list[int], list[npt.NDArray[np.int64]]] | None = None
    for key in range(3 if shared is None else 4):
        if key < 3:
            orders = [_order(lengths, runs, key) for lengths, runs in ranks]
        else:
            assert shared is not None
            orders = [_by_group(*rank, groups) for rank, groups in zip(ranks, shared.groups, strict=True)]
        ordered = [lengths[order] for (lengths, _), order in zip(ranks, orders, strict=True)]
        costs = _costs(_profile(ordered), *limits, rows_per_part)
        parts = _parts(costs, micro_steps)
        if shared is not None:
            groups = [groups[order] for groups, order in zip(shared.groups, orders, strict=True)]
            costs = _costs_with_shared(costs, ordered, groups, shared)
        if rows_per_part is not None:
            sizes = [rows_per_part] * micro_steps
            cost = float(sum(costs[rows_per_part - 1, ::rows_per_part][:micro_steps]))
        else:
            sizes, cost = _cheapest_cut(costs, micro_steps, max(parts, _parts(costs, micro_steps)))
        if best is None or cost < best[0]:
            best = (cost, sizes, orders)
    assert best is not None
    _, sizes, orders = best
    return [
        _deal(lengths, order, sizes, micro_steps, None if shared is None else (shared.groups[rank], shared))
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


def token_limit(ranks: Sequence[tuple[Lengths, Runs]], micro_steps: int, max_tokens: int | None) -> int:
    """Tokens that a part may compute: `max_tokens`, or as many as the largest micro-batch would have without a plan."""
    return max_tokens or _limits_without_plan(ranks, micro_steps)[0]


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


def _costs_with_shared(
    tokens: npt.NDArray[np.float64], ordered: Sequence[Lengths], groups: Sequence[Groups], shared: Shared
) -> npt.NDArray[np.float64]:
    """Like `_costs`, but by price: for each part its cheaper layout, on the rank where it costs most.

    In the shared layout the rows of a part fill rows of some size in turn, see `shared.fill_rows`. Their number and
    width are computed for all sizes, ranks and starts at once, adding one row to each part at a time.
    """
    price, rows = shared.price, tokens.shape[1]
    widths = np.full((max(rows, len(tokens)), rows), np.inf)  # a group may fit if shared, though not as separate rows
    places = np.arange(1, len(widths) + 1)[:, None]
    widths[: len(tokens)] = tokens / places[: len(tokens)]
    finite = np.where(np.isfinite(widths), widths, 0.0)
    masked, causal = (
        np.where(np.isfinite(widths), cost(places, finite) * GAIN, np.inf) for cost in (price.masked, price.causal)
    )
    alike_R_1 = np.array([[len(own) == rows and bool((own == own[:1]).all())] for own in ordered])
    costs = causal if alike_R_1.all() else masked

    of_ranks = list(itertools.starmap(sizes_of, zip(ordered, groups, strict=True)))
    most = max(map(len, of_ranks))
    sizes_S_R_1 = np.array([np.pad(sizes, (0, most - len(sizes)), "edge") for sizes in of_ranks]).T[..., None]
    prompts_R_N, more_R_N = (np.zeros((len(ordered), rows), dtype=np.int64) for _ in range(2))
    first_R_N = np.ones((len(ordered), rows), dtype=bool)  # of its group
    none_R_N = np.ones((len(ordered), rows), dtype=bool)  # no row of this rank is left
    for rank, (own, group) in enumerate(zip(ordered, groups, strict=True)):
        live = np.flatnonzero(own[:, 1])
        prompts_R_N[rank, live], more_R_N[rank, live] = own[live, 0] - 1, own[live, 1] + 1
        first_R_N[rank, live[1:]] = group[live[1:]] != group[live[:-1]]
        none_R_N[rank, : len(own)] = False
    filled, held, wide = (np.zeros((most, len(ordered), rows), dtype=np.int64) for _ in range(3))
    for count in range(1, rows + 1):
        at, starts = slice(count - 1, rows), slice(0, rows - count + 1)
        filled, held, wide = (counted[..., starts] for counted in (filled, held, wide))
        begins = (first_R_N[:, at] | (held + more_R_N[:, at] > sizes_S_R_1) | (filled == 0)) & (more_R_N[:, at] > 0)
        held = np.where(begins, prompts_R_N[:, at], held) + more_R_N[:, at]
        filled, wide = filled + begins, np.maximum(wide, held)
        allowed = price.memory(filled, wide) <= shared.max_tokens
        if not allowed.any():  # nor with more rows
            break
        something = (filled > 0) | none_R_N[:, starts]
        together_R_N = np.where(allowed & something, price.masked(filled, wide), np.inf).min(axis=0)
        alone_R_N = np.where(alike_R_1, causal[count - 1, starts], masked[count - 1, starts])
        costs[count - 1, starts] = np.minimum(together_R_N, alone_R_N).max(axis=0)
    return costs[: 1 + int(np.flatnonzero(np.isfinite(costs).any(axis=1)).max(initial=0))]


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
    shared: tuple[Groups, Shared] | None,
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
    return _measured(steps, lengths, order, shared)


def plan_in_place(lengths: Lengths, shared: tuple[Groups, Shared] | None = None) -> Plan:
    """The plan of a block of one micro-step whose rows stay as they are."""
    return _measured([[tuple(range(len(lengths)))]], lengths, np.arange(len(lengths)), shared)


def _measured(
    steps: Sequence[Sequence[tuple[int, ...]]],
    lengths: Lengths,
    order: npt.NDArray[np.int64],
    shared: tuple[Groups, Shared] | None,
) -> Plan:
    parts = [part_tokens(lengths, part, shared) for step in steps for part in step]
    prompts = {} if shared is None else dict(zip(shared[0][order].tolist(), lengths[order, 0].tolist(), strict=True))
    return Plan(
        steps=tuple(map(tuple, steps)),
        live=int(lengths[order].sum()),
        computed=sum(tokens for tokens, _ in parts),
        dropped=len(lengths) - len(order),
        idle=sum(all(row < 0 for part in step for row in part) for step in steps),
        distinct=0 if shared is None else sum(prompts.values()) + int(lengths[order, 1].sum()),
        shared=sum(is_shared for _, is_shared in parts),
    )


def part_tokens(lengths: Lengths, part: Sequence[int], shared: tuple[Groups, Shared] | None = None) -> tuple[int, bool]:
    """Tokens that a part computes on this rank, padding and placeholders counted; and whether it shares prompts."""
    rows = [row for row in part if row >= 0]
    if not rows:
        return len(part) * PLACEHOLDER_TOKENS, False
    if shared is not None and len(part) > 1:
        groups, how = shared
        filled = shared_rows(lengths[rows], groups[rows], how.price, how.max_tokens, placeholders=len(part) - len(rows))
        if filled is not None:
            return len(filled) * width_of(lengths[rows], filled), True
    return len(part) * int(np.maximum(lengths[rows], 1).max(axis=0).sum()), False
