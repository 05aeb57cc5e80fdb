"""Deal the rows of an optimizer window to all ranks again, so that all have the same work.

Ranks wait for the slowest. If groups without signal are left out, one rank may keep many rows and another few. So the
remaining rows of all ranks are sorted by length and dealt in turn: every rank gets about as many rows, of about the
same lengths. Every rank gathers all rows and keeps its own, which costs little compared with an update.
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
    """Deal the rows that run to the ranks.

    Args:
        lengths_R_B: `(R, B, 2)`, tokens of each rank's prompts and completions.
        runs_R_B: `(R, B)`, which of them have to run.

    Returns:
        For each rank the indices `rank * B + row` of its rows. The ranks' row counts differ by at most one.
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
    """Gather every rank's rows of one block, and keep this rank's share.

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
    """The dealt rows as `plan_block` takes them. A rank without rows gets one that does not run.

    Returns:
        For each rank its rows' indices; and their lengths and whether they run.
    """
    flat = lengths_R_B.reshape(-1, 2)
    shown = [rows if len(rows) else np.zeros(1, dtype=np.int64) for rows in dealt]
    blocks = [(flat[rows], np.full(len(rows), bool(len(own)))) for rows, own in zip(shown, dealt, strict=True)]
    return shown, blocks
