"""Plan which rows of an optimizer window run together, to compute few tokens. Numbers only.

The cut has the same shape on all ranks, since TRL gathers by row, and sharded models run as often on each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .packed import Groups, Lengths, together

Runs = npt.NDArray[np.bool_]  # which rows have to run
Tokens = Iterator[npt.NDArray[np.int64]]
"""For parts of 1, 2, ... rows: the tokens of the part that starts at each place of the order, on the rank with most."""

PASS_TOKENS = 64  # what one more pass costs, in tokens: it reads all weights and adds to all of their gradients


@dataclass(frozen=True)
class Plan:
    """How one block runs on one rank."""

    steps: tuple[tuple[int, ...], ...]  # by micro-step this rank's rows in the block; -1 where it has none left
    computed: int  # tokens computed, with padding and placeholders beside rows
    dropped: int  # rows that are not in the plan
    idle: int  # micro-steps that hold nothing but placeholders
    distinct: int = 0  # live tokens, counting the prompt of a group once; 0 if rows are padded


def plan_block(
    ranks: Sequence[tuple[Lengths, Runs]],
    micro_steps: int,
    *,
    rows_per_step: int | None = None,
    groups: Sequence[Groups] | None = None,
) -> list[Plan]:
    """Cut one block of rows, packed if they have `groups`; the ranks' plans have as many rows in each micro-step.

    A part computes no more than TRL's largest micro-batch, or has no more rows; or it has `rows_per_step`.
    """
    if groups is None:
        orders = [_by_length(lengths, runs) for lengths, runs in ranks]
        tokens = _padded([lengths[order] for (lengths, _), order in zip(ranks, orders, strict=True)])
    else:
        orders = [_by_group(*rank, own) for rank, own in zip(ranks, groups, strict=True)]
        each = zip(ranks, orders, groups, strict=True)
        tokens = _packed([(lengths[order], own[order]) for (lengths, _), order, own in each])
    rows_of_trl = max(-(-len(lengths) // micro_steps) for lengths, _ in ranks)
    widest = max((int(lengths.max(axis=0).sum()) for lengths, _ in ranks if len(lengths)), default=1)
    costs = []
    for size, of_parts in enumerate(tokens, 1):
        allowed = (of_parts <= rows_of_trl * widest) | (size <= rows_of_trl)
        if rows_per_step is not None:
            allowed[:] = size == rows_per_step
        elif not allowed.any():  # nor with more rows
            break
        # Equal cuts are ranked by the sum of squares, so that the largest part is small.
        # Packed rows cost the same however they are cut, but for the passes.
        whole = of_parts + (0 if groups is None else PASS_TOKENS)
        costs.append(np.where(allowed, whole + 1e-12 * of_parts.astype(float) ** 2, np.inf))
    sizes = _cheapest_cut(costs, max(map(len, orders)), micro_steps)
    return [
        _deal(lengths, order, sizes, micro_steps, None if groups is None else groups[rank])
        for rank, ((lengths, _), order) in enumerate(zip(ranks, orders, strict=True))
    ]


def _by_length(lengths: Lengths, runs: Runs) -> npt.NDArray[np.int64]:
    """The rows that run, longest first. Ties are rows with the same two lengths: their order does not matter."""
    kept = np.flatnonzero(runs)
    return kept[np.lexsort((kept, -lengths[kept, 1], -lengths[kept].sum(axis=1)))]


def _by_group(lengths: Lengths, runs: Runs, groups: Groups) -> npt.NDArray[np.int64]:
    """The rows that run, grouped, longest first; groups by their total tokens."""
    kept = np.flatnonzero(runs)
    whole = np.zeros(int(groups.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(whole, groups[kept], lengths[kept, 0])
    np.add.at(whole, groups[kept], lengths[kept, 1] + 1)
    return kept[np.lexsort((kept, -lengths[kept, 1], groups[kept], -whole[groups[kept]]))]


def _padded(ordered: Sequence[Lengths]) -> Tokens:
    """Of padded rows: every row as long as the longest prompt and the longest completion of the part, on any rank."""
    rows = max(map(len, ordered))
    profile = np.zeros((rows, 2), dtype=np.int64)  # of each place in the order, over all ranks
    for lengths in ordered:
        profile[: len(lengths)] = np.maximum(profile[: len(lengths)], lengths)
    longest = profile.copy()
    for size in range(1, rows + 1):
        starts = rows - size + 1
        longest[:starts] = np.maximum(longest[:starts], profile[size - 1 :])
        yield size * longest[:starts].sum(axis=1)


def _packed(ordered: Sequence[tuple[Lengths, Groups]]) -> Tokens:
    """Of packed rows: their own tokens, and the prompt of each group once."""
    rows = max(len(lengths) for lengths, _ in ordered)
    prompts_R_N, own_R_N = (np.zeros((len(ordered), rows), dtype=np.int64) for _ in range(2))
    first_R_N = np.zeros((len(ordered), rows), dtype=bool)  # of its group
    for rank, (lengths, groups) in enumerate(ordered):
        live = np.flatnonzero(lengths[:, 1])
        prompts_R_N[rank, live], own_R_N[rank, live] = lengths[live].T
        first_R_N[rank, live] = np.append(True, groups[live[1:]] != groups[live[:-1]])[: len(live)]
    sums_R_N = np.cumsum(np.pad(own_R_N + np.where(first_R_N, prompts_R_N, 0), ((0, 0), (1, 0))), axis=1)
    again_R_N = np.where(first_R_N, 0, prompts_R_N)  # a part that begins inside a group computes its prompt too
    for size in range(1, rows + 1):
        starts = rows - size + 1
        yield (sums_R_N[:, size:] - sums_R_N[:, :starts] + again_R_N[:, :starts]).max(axis=0)


def _cheapest_cut(costs: Sequence[npt.NDArray[np.float64]], rows: int, micro_steps: int) -> list[int]:
    """The sizes of the cheapest cut, by dynamic programming; `costs[n - 1][k]` is of the n rows that start at row k."""
    parts = min(micro_steps, rows)
    reached = np.full(rows + 1, np.inf)
    reached[0] = 0.0
    choices = np.zeros((parts, rows + 1), dtype=np.int64)
    best = np.inf
    made = parts
    for part in range(parts):
        after = np.full(rows + 1, np.inf)
        for size, of_parts in enumerate(costs, 1):
            total = reached[: len(of_parts)] + of_parts
            better = total < after[size:]
            after[size:][better] = total[better]
            choices[part, size:][better] = size
        reached = after
        if reached[rows] <= best:
            best = float(reached[rows])
            made = part + 1
    sizes: list[int] = []
    left = rows
    for part in reversed(range(made)):
        sizes.append(int(choices[part, left]))
        left -= sizes[-1]
    return sizes[::-1]


def _deal(
    lengths: Lengths, order: npt.NDArray[np.int64], sizes: Sequence[int], micro_steps: int, groups: Groups | None
) -> Plan:
    """This rank's rows of each part, in the order that they had."""
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    parts = [sorted(order[end - size : end].tolist()) for size, end in zip(sizes, ends, strict=True)]
    steps = [(*part, *[-1] * (size - len(part))) for size, part in zip(sizes, parts, strict=True)]
    steps += [(-1,)] * (micro_steps - len(steps))  # fewer parts than micro-steps
    prompts = {} if groups is None else dict(zip(groups[order].tolist(), lengths[order, 0].tolist(), strict=True))
    return Plan(
        steps=tuple(steps),
        computed=sum(part_tokens(lengths, step, groups) for step in steps),
        dropped=len(lengths) - len(order),
        idle=sum(max(step) < 0 for step in steps),
        distinct=0 if groups is None else sum(prompts.values()) + int(lengths[order, 1].sum()),
    )


def part_tokens(lengths: Lengths, part: Sequence[int], groups: Groups | None) -> int:
    """Tokens that a part computes on this rank, padding counted; none if it holds placeholders alone."""
    rows = [row for row in part if row >= 0]
    if not rows:
        return 0
    if groups is not None and lengths[rows, 1].any():
        bundles = together(lengths[rows], groups[rows])  # the last token of a completion need not run, but counts here
        return sum(int(lengths[rows][own[0], 0] + lengths[rows][own, 1].sum()) for own in bundles)
    return len(part) * int(np.maximum(lengths[rows], 1).max(axis=0).sum())
