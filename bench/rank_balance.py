"""Simulate what ranks would save by exchanging rows before an update, to have equally many tokens.

    python -m bench.rank_balance [--draws 20] [--markdown FILE]

Rows are drawn for R ranks and planned with `compact_plan.plan_block`, once with each rank's own rows, as
`compact_updates: exact` does it, and once with rows exchanged: all rows that run are put in order of length and dealt
to the ranks in turn, so that at each place all ranks have rows of like length. Time is taken as proportional to tokens:

- sharded (ZeRO-3, FSDP): ranks meet in every forward pass, so a part takes as long as the rank with most tokens in it;
- DDP: ranks meet once per optimizer window, so the window takes as long as the rank with most tokens in all.

Groups stay whole: a rank's rows are those of its own prompts, as TRL deals them. Half of the variance of the log-length
is between prompts, which makes ranks more unlike each other than independent rows would. No machine is measured here.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.compact_rollouts import PROFILES, SHARES, SPREAD
from bench.tables import show
from trl_grpo_ext.trainer.compact.plan import Lengths, Plan, part_tokens, plan_block

RANKS = (2, 4, 8, 16, 32)
GROUPS, MEMBERS, LIMIT = 8, 8, 512
"""Of each rank: a window of 8 micro-steps with 8 rows each."""
BYTES_PER_TOKEN = {"id": 8, "mask": 8}
BYTES_PER_COMPLETION_TOKEN = {"sampling log-probability": 4, "old log-probability": 4, "reference log-probability": 4}
MODELS = {"0.5B": 0.5e9, "7B": 7e9}
BANDWIDTH, FLOPS = 10e9, 400e12
"""Bytes a second between ranks, and operations a second of one rank in training: round numbers of a good machine."""

Block = tuple[Lengths, npt.NDArray[np.bool_]]


def draw_blocks(profile: str, share: int, ranks: int, generator: np.random.Generator) -> list[Block]:
    """Each rank's rows, and which of them run."""
    groups, mean = ranks * GROUPS, LIMIT / 3
    normal = generator.standard_normal
    shifts = (normal((groups, 1)) + normal((groups, MEMBERS))) * np.sqrt(0.5)
    completions = np.exp(np.log(mean) - SPREAD**2 / 2 + SPREAD * shifts).round().clip(1, LIMIT)
    prompts = np.repeat(generator.integers(LIMIT // 32, LIMIT * 6 // 32 + 1, groups)[:, None], MEMBERS, axis=1)
    if profile == PROFILES[0]:
        completions[:], prompts[:] = round(mean), LIMIT * 7 // 64
    if profile == PROFILES[2]:
        rows = completions.reshape(-1)
        rows[generator.choice(len(rows), round(0.02 * len(rows)), replace=False)] = LIMIT
    flat = np.zeros(groups, dtype=bool)
    flat[generator.choice(groups, round(groups * share / 100), replace=False)] = True
    lengths = np.stack([prompts, completions.astype(np.int64)], axis=-1).reshape(ranks, GROUPS * MEMBERS, 2)
    runs = np.repeat(~flat, MEMBERS).reshape(ranks, GROUPS * MEMBERS)
    return list(zip(lengths, runs, strict=True))


def exchange(blocks: Sequence[Block]) -> tuple[list[Block], int]:
    """Deal the rows that run to the ranks in order of length."""
    rows = [(rank, int(row)) for rank, (_, runs) in enumerate(blocks) for row in np.flatnonzero(runs)]
    lengths = np.array([blocks[rank][0][row] for rank, row in rows], dtype=np.int64).reshape(-1, 2)
    order = np.lexsort((lengths[:, 1], -lengths.sum(axis=1)))
    dealt: list[Block] = []
    moved = 0
    for rank in range(len(blocks)):
        mine = order[rank :: len(blocks)]
        moved += sum(row_bytes(lengths[row]) for row in mine if rows[row][0] != rank)
        dealt.append((lengths[mine], np.ones(len(mine), dtype=bool)))
    return dealt, moved


def row_bytes(row: npt.NDArray[np.int64]) -> int:
    """Bytes that TRL keeps of a row, without padding."""
    return int(row.sum()) * sum(BYTES_PER_TOKEN.values()) + int(row[1]) * sum(BYTES_PER_COMPLETION_TOKEN.values())


def planned_time(blocks: Sequence[Block], budget: int) -> tuple[float, float]:
    """Time of an update in tokens, sharded and with DDP."""
    plans: list[Plan] = plan_block(blocks, GROUPS, max_tokens=budget)
    tokens = np.array(
        [
            [part_tokens(lengths, part)[0] for step in plan.steps for part in step]
            for plan, (lengths, _) in zip(plans, blocks, strict=True)
        ]
    )
    return float(tokens.max(axis=0).sum()), float(tokens.sum(axis=1).max())


def plain_time(blocks: Sequence[Block]) -> float:
    """Time of plain TRL's update in tokens: every row as long as the longest of its rank, or of all."""
    widths = [int(lengths.max(axis=0).sum()) for lengths, _ in blocks]
    return float(max(widths) * GROUPS * MEMBERS)


@dataclass(frozen=True)
class Line:
    """The mean over the draws: time of an update in tokens, and what moves."""

    profile: str
    share: int
    ranks: int
    plain: float
    own: tuple[float, float]
    pooled: tuple[float, float]
    live: float
    megabytes: float

    def saved(self, kind: int) -> float:
        """Percent of the update."""
        return 100 * (1 - self.pooled[kind] / self.own[kind])


def line_of(profile: str, share: int, ranks: int, draws: int) -> Line:
    generator = np.random.default_rng([PROFILES.index(profile), share, ranks])
    plain, own, pooled, live, moved = [], [], [], [], []
    for _ in range(draws):
        blocks = draw_blocks(profile, share, ranks, generator)
        budget = GROUPS * max(int(lengths.max(axis=0).sum()) for lengths, _ in blocks)
        dealt, size = exchange(blocks)
        plain.append(plain_time(blocks))
        own.append(planned_time(blocks, budget))
        pooled.append(planned_time(dealt, budget))
        live.append(sum(int(lengths[runs].sum()) for lengths, runs in blocks) / ranks)
        moved.append(size / ranks / 1e6)
    mean = statistics.fmean
    return Line(
        profile,
        share,
        ranks,
        mean(plain),
        (mean(pair[0] for pair in own), mean(pair[1] for pair in own)),
        (mean(pair[0] for pair in pooled), mean(pair[1] for pair in pooled)),
        mean(live),
        mean(moved),
    )


def table_of(lines: Sequence[Line]) -> list[list[str]]:
    """Titles and rows: what the exchange saves for each number of ranks, and the most ranks in more detail."""
    ranks = sorted({line.ranks for line in lines})
    most = ranks[-1]
    titles = ["completions", "rows without signal", *(f"saved, {number} ranks" for number in ranks)]
    titles += [f"tokens / live, {most} ranks: plain TRL", "own rows", "exchanged", "MB sent by a rank"]
    rows = [titles]
    for last in (line for line in lines if line.ranks == most):
        same = [line for line in lines if (line.profile, line.share) == (last.profile, last.share)]
        saved = [f"{line.saved(0):.0f} %" for line in sorted(same, key=lambda line: line.ranks)]
        beside = [f"{tokens / last.live:.2f}" for tokens in (last.plain, last.own[0], last.pooled[0])]
        rows.append([last.profile, f"{last.share} %", *saved, *beside, f"{last.megabytes:.2f}"])
    return rows


def cost(lines: Sequence[Line]) -> str:
    """The exchange beside the update that it shortens."""
    worst = max(lines, key=lambda line: line.megabytes)
    sending = 1e6 * worst.megabytes / BANDWIDTH
    updates = {name: 6 * parameters * worst.own[0] / FLOPS for name, parameters in MODELS.items()}
    beside = " and ".join(f"{seconds:.1f} s for {name} parameters" for name, seconds in updates.items())
    return (
        f"The largest exchange sends {worst.megabytes:.2f} MB from each rank, {1000 * sending:.2f} ms at "
        f"{BANDWIDTH / 1e9:.0f} GB/s, beside an update of about {beside} at {FLOPS / 1e12:.0f} TFLOP/s."
    )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args(given)

    lines = [
        line_of(profile, share, ranks, options.draws)
        for profile in PROFILES
        for share in SHARES
        for ranks in options.ranks
    ]
    apart = max(abs(line.saved(0) - line.saved(1)) for line in lines)
    said = (
        f"Mean of {options.draws} draws; each rank has {GROUPS * MEMBERS} completions of up to {LIMIT} tokens in "
        f"groups of {MEMBERS}, in {GROUPS} micro-steps. Time is that of the slowest rank in each forward pass (ZeRO-3, "
        f"FSDP); with DDP, where ranks wait once per window, the savings are at most {apart:.0f} points apart from "
        f"these. Live is the mean of the ranks, which no plan can be below. {cost(lines)}"
    )
    titles, *rows = table_of(lines)
    show("balance between ranks", titles, rows, said, options.markdown)


if __name__ == "__main__":
    main()
