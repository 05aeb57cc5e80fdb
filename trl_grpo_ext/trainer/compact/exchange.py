"""Rows of an optimizer window dealt to all ranks again, so that none has more to do than another.

Ranks wait for the slowest. Where whole groups have no signal and are left out, one rank may keep many rows and another
few. The rows that run are put in order of length, over all ranks, and dealt in turn: each rank gets as many, and as
long ones, as any other. Every rank gathers all rows and keeps its own; that is little beside an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..batch import PROMPT_KEYS
from .shared import Lengths


def deal_rows(lengths_R_B: npt.NDArray[np.int64], runs_R_B: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.int64]]:
    """Which rows each rank gets.

    Args:
        lengths_R_B: `(R, B, 2)`, tokens of each rank's prompts and completions.
        runs_R_B: `(R, B)`, which of them have to run.

    Returns:
        For each rank the numbers of its rows in all ranks' rows one after the other, `rank * B + row`. The ranks'
        numbers of rows differ by one at most.
    """
    totals = lengths_R_B.sum(axis=2).reshape(-1)
    kept = np.flatnonzero(runs_R_B.reshape(-1))
    order = kept[np.argsort(-totals[kept], kind="stable")]
    return [order[rank :: len(lengths_R_B)] for rank in range(len(lengths_R_B))]


def exchange_rows(
    rows: dict[str, Any],
    mine: npt.NDArray[np.int64],
    gather: Callable[[torch.Tensor], torch.Tensor],
    gather_object: Callable[[list[Any]], list[Any]],
) -> dict[str, Any]:
    """Every rank's rows of one block, of which this rank keeps some.

    Args:
        rows: This rank's; tensors `(B, ...)`, lists of `B`, and what belongs to no row.
        mine: Which to keep, see `deal_rows`.
        gather: Concatenates equally shaped tensors over all ranks, in rank order.
        gather_object: The same for lists.

    Returns:
        The rows kept. Prompts are padded in front, other tensors at the end, to the widest of any rank.
    """
    widths = {key: value.size(1) for key, value in rows.items() if isinstance(value, torch.Tensor) and value.dim() > 1}
    device = rows["completion_ids"].device
    widest = gather(torch.tensor([[*widths.values()]], device=device)).amax(dim=0).tolist()
    index = torch.from_numpy(mine).to(device)
    kept: dict[str, Any] = {}
    for key, value in rows.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if key in widths:
                missing = widest[list(widths).index(key)] - value.size(1)
                sides = (missing, 0) if key in PROMPT_KEYS else (0, missing)
                value = torch.nn.functional.pad(value, [*([0, 0] * (value.dim() - 2)), *sides])
            kept[key] = gather(value.contiguous())[index]
        elif isinstance(value, list):
            everyone = gather_object(value)
            kept[key] = [everyone[row] for row in mine.tolist()]
        else:
            kept[key] = value
    return kept


def rows_to_plan(
    lengths_R_B: npt.NDArray[np.int64], dealt: Sequence[npt.NDArray[np.int64]]
) -> tuple[list[npt.NDArray[np.int64]], list[tuple[Lengths, npt.NDArray[np.bool_]]]]:
    """What `plan_block` sees of the rows dealt. A rank that got none is shown one, which does not run.

    Returns:
        For each rank its rows' numbers, and their lengths with which of them run.
    """
    flat = lengths_R_B.reshape(-1, 2)
    shown = [rows if len(rows) else np.zeros(1, dtype=np.int64) for rows in dealt]
    blocks = [(flat[rows], np.full(len(rows), bool(len(own)))) for rows, own in zip(shown, dealt, strict=True)]
    return shown, blocks
