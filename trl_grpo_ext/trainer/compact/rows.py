"""Measure, select, recombine and trim rows of TRL's micro-batches. Tensors only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...credit.signal import has_signal
from ..batch import PROMPT_KEYS, BatchKeys, counting_mask, join_batches
from .plan import Plan, Shared, plan_block, token_limit
from .shared import Lengths, SharedPrompts, rows_of

RowFactor = Callable[[dict[str, Any], dict[str, Any]], float | None]
"""From TRL's micro-batch and a part: the factor on the advantages of its rows in that part; None for 1."""


@dataclass(frozen=True)
class Layout:
    """How to make parts from rows.

    Attributes:
        factor: See `RowFactor`.
        precision: Of advantages that are multiplied.
        trim_left: Cut away the prompts' padding too.
    """

    factor: RowFactor
    precision: torch.dtype
    trim_left: bool


def row_table(batch: dict[str, Any]) -> torch.Tensor:
    """`(B, 3)`: prompt tokens, completion tokens, and 2 for a row with signal, 1 without, 0 if no token counts."""
    counting_B_T = counting_mask(batch)
    kind_B = (counting_B_T != 0).any(dim=1).long() + has_signal(batch["advantages"], counting_B_T).long()
    lengths = (_width(batch["prompt_mask"].flip(1)), _width(batch["completion_mask"]))
    return torch.stack([*lengths, kind_B], dim=1)


def make_micro_steps(
    micro_batches: Sequence[dict[str, Any]],
    plan: Plan,
    lengths: Lengths,
    layout: Layout,
    came_from: Sequence[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Make the micro-steps of one block.

    Args:
        micro_batches: The micro-batches that hold the rows, in order.
        plan: Of this rank.
        lengths: Tokens of each row's prompt and completion.
        layout: How.
        came_from: For each row the micro-batch that TRL dealt it to; by default the one in `micro_batches`.

    Returns:
        One dict for each micro-step; parts that run before it are under `BatchKeys.parts`.
    """
    rows = join_batches(micro_batches)
    if came_from is None:
        came_from = [batch for batch in micro_batches for _ in range(len(lengths) // len(micro_batches))]
    steps = []
    for step in plan.steps:
        parts = [_part(rows, came_from, part, lengths, layout) for part in step]
        steps.append({**parts[0], BatchKeys.parts: parts[1:]} if len(parts) > 1 else parts[0])
    return steps


def trim_to_longest(batch: dict[str, Any], lengths: Lengths, layout: Layout) -> dict[str, Any]:
    """A micro-batch as TRL dealt it, without columns that are padding in the whole block."""
    left, right = (max(1, int(longest)) for longest in lengths.max(axis=0))
    kept = dict(batch)
    _trim(kept, left if layout.trim_left else None, right)
    return kept


def _part(
    rows: dict[str, Any], came_from: Sequence[dict[str, Any]], part: Sequence[int], lengths: Lengths, layout: Layout
) -> dict[str, Any]:
    """Take some rows of a block; -1 is a placeholder: a row in which nothing counts, cut short if alone."""
    shortest = int(lengths[:, 0].argmin())
    chosen = [shortest if row < 0 else row for row in part]
    index = torch.tensor(chosen, device=rows["completion_ids"].device)
    made: dict[str, Any] = {}
    for key, value in rows.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            made[key] = value[index.to(value.device)]
        elif isinstance(value, list):
            made[key] = [value[row] for row in chosen]
        else:
            made[key] = value
    _hold_places(made, [row < 0 for row in part])
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


def _hold_places(part: dict[str, Any], held: Sequence[bool]) -> None:
    """Turn copied rows into placeholders: no advantage, no weight, no token that counts."""
    if not any(held):
        return
    held_B = torch.tensor(held, device=part["completion_mask"].device)
    for key in ("advantages", BatchKeys.weights, "completion_mask"):
        if part.get(key) is not None:
            part[key][held_B] = 0
    if part.get(BatchKeys.place) is not None:
        part[BatchKeys.place][held_B] = -1  # no row of the records


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


def _width(mask_B_T: torch.Tensor) -> torch.Tensor:
    """The number of columns up to the last non-zero one; 0 if all are 0."""
    columns = torch.arange(1, mask_B_T.size(1) + 1, device=mask_B_T.device)
    return (columns * (mask_B_T != 0)).amax(dim=1)


def logps_by_length(
    method: Any, given: dict[str, Any], chunk: int, trim_left: bool, sharing: SharedPrompts | None = None
) -> Any:
    """Log-probabilities without a gradient, in as many forward passes as before, each over rows of similar length.

    With shared prompts the passes are planned like the parts of an update.

    Args:
        method: TRL's `_get_per_token_logps_and_entropies`.
        given: Its arguments by name.
        chunk: Rows of a forward pass.
        trim_left: Cut away the prompts' padding too.
        sharing: Shares prompts, if they are to be shared.

    Returns:
        What the method returns, in the original order of rows; zero after each completion.
    """
    ids, mask, keep = given["input_ids"], given["attention_mask"], given["logits_to_keep"]
    prompts_B, completions_B = _width(mask[:, :-keep].flip(1)), _width(mask[:, -keep:])
    order = torch.argsort(prompts_B + completions_B, descending=True, stable=True)
    start_of_completion = ids.size(1) - keep
    results: dict[int, torch.Tensor] = {}
    chunks = [order[start : start + chunk] for start in range(0, len(order), chunk)]
    limit = None
    if sharing is not None and (planned := _passes_with_shared(ids, mask, keep, len(chunks), sharing)) is not None:
        chunks, limit = planned
    for rows in chunks:
        left = start_of_completion - max(1, int(prompts_B[rows].max())) if trim_left else 0
        width = max(1, int(completions_B[rows].max()))
        columns = slice(left, start_of_completion + width)
        arguments = (given["model"], ids[rows, columns], mask[rows, columns], width)
        some = dict(zip(("model", "input_ids", "attention_mask", "logits_to_keep"), arguments, strict=True))
        entropies = given.get("compute_entropy", False)
        layout = None if sharing is None else sharing.layout(*arguments[1:], limit)
        if sharing is not None and layout is not None:
            output = sharing.logps(method, {**some, "compute_entropy": entropies}, layout)
        else:
            output = method(*arguments, batch_size=len(rows), compute_entropy=entropies)
        for number, values in enumerate(output[:2]):
            if values is not None:
                results.setdefault(number, values.new_zeros((len(order), keep)))[rows, :width] = values
    return results.get(0), results.get(1), None


def _passes_with_shared(
    ids: torch.Tensor, mask: torch.Tensor, keep: int, passes: int, sharing: SharedPrompts
) -> tuple[list[torch.Tensor], int] | None:
    """The rows of each pass, and the tokens that one may compute; None if prompts are not shared.

    A pass without rows repeats the first row, since every rank runs the same number.
    """
    if sharing.price is None:
        return None
    lengths, groups = rows_of(ids, mask, keep)
    if lengths is None or not sharing.fits(lengths):
        return None
    blocks = [(lengths, np.ones(len(lengths), dtype=bool))]
    limit = token_limit(blocks, passes, sharing.budget)
    (plan,) = plan_block(blocks, passes, shared=Shared([groups], sharing.price, limit))
    parts = [[max(row, 0) for row in part] for step in plan.steps for part in step]
    return [torch.tensor(part, device=ids.device) for part in parts], limit
