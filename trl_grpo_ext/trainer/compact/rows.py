"""Measure, select, recombine, trim and exchange rows of TRL's micro-batches. Tensors only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...credit.signal import has_signal
from ..batch import PROMPT_KEYS, BatchKeys, counting_mask, join_batches
from .packed import Lengths, Packing
from .plan import Plan, Runs, plan_block

RowFactor = Callable[[dict[str, Any], dict[str, Any]], float | None]
"""From TRL's micro-batch and a part: the factor on the advantages of its rows in that part; None for 1."""


@dataclass(frozen=True)
class Layout:
    """How to make parts from rows."""

    factor: RowFactor  # see `RowFactor`
    precision: torch.dtype  # of advantages that are multiplied
    trim_left: bool  # cut away the prompts' padding too


def row_lengths_and_kinds(batch: dict[str, Any], ratios_multiply: bool = False) -> torch.Tensor:
    """`(B, 3)`: prompt tokens, completion tokens, and 2 for a row with signal, 1 without, 0 if no token counts."""
    counting_B_T = counting_mask(batch) != 0
    signal_B_T = counting_B_T
    if ratios_multiply and batch.get("importance_sampling_ratio") is not None:
        signal_B_T = counting_B_T & (batch["importance_sampling_ratio"] != 0)
    kind_B = counting_B_T.any(dim=1).long() + has_signal(batch["advantages"], signal_B_T).long()
    return torch.stack([_width(batch["prompt_mask"].flip(1)), _width(batch["completion_mask"]), kind_B], dim=1)


def _width(mask_B_T: torch.Tensor) -> torch.Tensor:
    """The number of columns up to the last non-zero one; 0 if all are 0."""
    columns = torch.arange(1, mask_B_T.size(1) + 1, device=mask_B_T.device)
    return (columns * (mask_B_T != 0)).amax(dim=1)


# ------------------------------------------------------------------------------------------------ parts made of rows


def make_micro_steps(
    micro_batches: Sequence[dict[str, Any]],
    plan: Plan,
    lengths: Lengths,
    layout: Layout,
    came_from: Sequence[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """The micro-steps of one block; parts that run before the last are under `BatchKeys.parts`."""
    rows = join_batches(micro_batches)
    if came_from is None:
        came_from = [batch for batch in micro_batches for _ in range(len(lengths) // len(micro_batches))]
    steps = []
    for step in plan.steps:
        parts = [_part(rows, came_from, part, lengths, layout) for part in step]
        steps.append({**parts[0], BatchKeys.parts: parts[1:]} if len(parts) > 1 else parts[0])
    return steps


def _part(
    rows: dict[str, Any], came_from: Sequence[dict[str, Any]], part: Sequence[int], lengths: Lengths, layout: Layout
) -> dict[str, Any]:
    """Take some rows of a block; -1 is a placeholder: a row in which nothing counts, cut short if alone."""
    shortest = int(lengths[:, 0].argmin())
    chosen = [shortest if row < 0 else row for row in part]
    made = _take(rows, chosen)
    _make_placeholders(made, [row < 0 for row in part])
    live = [row for row in part if row >= 0]
    left = max([1, *lengths[live, 0].tolist()])
    _trim(made, left if layout.trim_left or not live else None, max([1, *lengths[live, 1].tolist()]))
    factors = {id(batch): layout.factor(batch, made) for batch in {id(batch): batch for batch in came_from}.values()}
    per_row = [factors[id(came_from[row])] for row in chosen]
    if None not in per_row:
        advantages = made["advantages"]
        factors_B = torch.tensor(per_row, dtype=torch.float64, device=advantages.device)
        scaled = advantages.double() * factors_B.view(-1, *[1] * (advantages.dim() - 1))
        made["advantages"], made[BatchKeys.factor] = scaled.to(layout.precision), factors_B.to(layout.precision)
    return made


def _take(rows: dict[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    index, made = torch.tensor(chosen, dtype=torch.long), dict(rows)
    for key, value in rows.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            made[key] = value[index.to(value.device)]
        elif isinstance(value, list):
            made[key] = [value[row] for row in chosen]
    return made


def _make_placeholders(part: dict[str, Any], placeholders: Sequence[bool]) -> None:
    """Turn copied rows into placeholders: no advantage, no weight, no token that counts."""
    if not any(placeholders):
        return
    empty_B = torch.tensor(placeholders, device=part["completion_mask"].device)
    for key in ("advantages", BatchKeys.weights, "completion_mask"):
        if part.get(key) is not None:
            part[key][empty_B] = 0
    if part.get(BatchKeys.row_id) is not None:
        part[BatchKeys.row_id][empty_B] = -1  # no row of the records


def _trim(part: dict[str, Any], left: int | None, right: int) -> None:
    """Keep the last `left` columns of the prompts (None: all) and the first `right` of the completions."""
    width = part["completion_mask"].size(1)
    for key, value in part.items():
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            continue
        if key in PROMPT_KEYS:
            part[key] = value if left is None else value[:, value.size(1) - left :]
        elif value.size(1) == width:
            part[key] = value[:, :right]


# ------------------------------------------------------------------------------------------------ between ranks


def deal_rows(lengths_R_B: npt.NDArray[np.int64], runs_R_B: Runs) -> list[npt.NDArray[np.int64]]:
    """For each rank the indices `rank * B + row` of the rows that it runs, so that all ranks have the same work.

    The rows of all ranks are sorted by length and dealt in turn. Every rank then gathers all rows and keeps its own,
    which costs little compared with an update.
    """
    totals, running = lengths_R_B.sum(axis=2).reshape(-1), np.flatnonzero(runs_R_B.reshape(-1))
    order = running[np.argsort(-totals[running], kind="stable")]
    return [order[rank :: len(lengths_R_B)] for rank in range(len(lengths_R_B))]


def rows_to_plan(
    lengths_R_B: npt.NDArray[np.int64], dealt: Sequence[npt.NDArray[np.int64]]
) -> tuple[list[npt.NDArray[np.int64]], list[tuple[Lengths, Runs]]]:
    """The dealt rows by rank, as indices and as `plan_block` takes them. A rank without rows gets one that is idle."""
    flat = lengths_R_B.reshape(-1, 2)
    indices = [rows if len(rows) else np.zeros(1, dtype=np.int64) for rows in dealt]
    return indices, [(flat[rows], np.full(len(rows), bool(len(own)))) for rows, own in zip(indices, dealt, strict=True)]


def exchange_rows(
    rows: dict[str, Any],
    mine: npt.NDArray[np.int64],
    gather: Callable[[torch.Tensor], torch.Tensor],
    gather_object: Callable[[list[Any]], list[Any]],
) -> dict[str, Any]:
    """Gather every rank's rows of one block, padded to the widest of any rank, and keep this rank's share."""
    widths = {key: value.size(1) for key, value in rows.items() if isinstance(value, torch.Tensor) and value.dim() > 1}
    device = rows["completion_ids"].device
    widest = gather(torch.tensor([[*widths.values()]], device=device)).amax(dim=0).tolist()
    everyone: dict[str, Any] = {}
    for key, value in rows.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if key in widths:
                missing = widest[list(widths).index(key)] - value.size(1)
                sides = (missing, 0) if key in PROMPT_KEYS else (0, missing)
                value = torch.nn.functional.pad(value, [*([0, 0] * (value.dim() - 2)), *sides])
            everyone[key] = gather(value.contiguous())
        else:
            everyone[key] = gather_object(value) if isinstance(value, list) else value
    return _take(everyone, mine.tolist())


# ------------------------------------------------------------------------------- log-probabilities without a gradient


def logps_by_length(
    method: Any, given: dict[str, Any], chunk: int, trim_left: bool, packing: Packing | None = None
) -> Any:
    """Log-probabilities without a gradient, in as many forward passes as before, each over rows of similar length.

    Packed passes are planned like the parts of an update.
    """
    ids, mask, keep = given["input_ids"], given["attention_mask"], given["logits_to_keep"]
    prompts_B, completions_B = _width(mask[:, :-keep].flip(1)), _width(mask[:, -keep:])
    order = torch.argsort(prompts_B + completions_B, descending=True, stable=True)
    start_of_completion, entropies = ids.size(1) - keep, given.get("compute_entropy", False)
    results: dict[int, torch.Tensor] = {}
    chunks = [order[first : first + chunk] for first in range(0, len(order), chunk)]
    if packing is not None and (found := packing.measured(ids, mask, keep)) is not None:
        (plan,) = plan_block([(found[0], np.ones(len(ids), dtype=bool))], len(chunks), groups=[found[1]])
        # A pass without rows repeats the first row, since every rank runs the same number.
        parts = [[max(row, 0) for row in part] for step in plan.steps for part in step]
        chunks = [torch.tensor(part, device=ids.device) for part in parts]
    for rows in chunks:
        left = start_of_completion - max(1, int(prompts_B[rows].max())) if trim_left else 0
        width = max(1, int(completions_B[rows].max()))
        columns = slice(left, start_of_completion + width)
        arguments = (given["model"], ids[rows, columns], mask[rows, columns], width)
        packed = None if packing is None else packing.pack(*arguments[1:])
        if packing is not None and packed is not None:
            some = dict(zip(("model", "input_ids", "attention_mask", "logits_to_keep"), arguments, strict=True))
            output = packing.logps(method, {**some, "compute_entropy": entropies}, packed)
        else:
            output = method(*arguments, batch_size=len(rows), compute_entropy=entropies)
        for number, values in enumerate(output[:2]):
            if values is not None:
                results.setdefault(number, values.new_zeros((len(order), keep)))[rows, :width] = values
    return results.get(0), results.get(1), None
