"""Measure, select, recombine and trim rows of TRL's micro-batches. Tensors only."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...credit.signal import has_signal
from ..batch import PROMPT_KEYS, BatchKeys, counting_mask, join_batches
from ..upstream import contract, images
from .packed import Lengths, Packing
from .plan import Plan, plan_block

_OF_PLACEHOLDERS = {"advantages": 0, BatchKeys.weights: 0, "completion_mask": 0, BatchKeys.row_id: -1}
RowFactor = Callable[[dict[str, Any], dict[str, Any]], float | None]
"""From TRL's micro-batch and a part: the factor on the advantages of its rows there; None for 1."""


def row_lengths_and_kinds(batch: dict[str, Any]) -> torch.Tensor:
    """`(B, 3)`: prompt tokens, completion tokens, and 2 for a row with signal, 1 without, 0 if no token counts."""
    counting_B_T = counting_mask(batch) != 0
    kind_B = counting_B_T.any(dim=1).long() + has_signal(batch["advantages"], counting_B_T).long()
    lengths_B_2 = row_lengths(batch["prompt_mask"], batch["completion_mask"])
    return torch.cat([lengths_B_2, kind_B.unsqueeze(1)], dim=1)


def row_lengths(prompt_mask: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
    return torch.stack([_width(prompt_mask.flip(1)), _width(completion_mask)], dim=1)


def _width(mask_B_T: torch.Tensor) -> torch.Tensor:
    """The number of columns up to the last non-zero one; 0 if all are 0."""
    columns = torch.arange(1, mask_B_T.size(1) + 1, device=mask_B_T.device)
    return (columns * (mask_B_T != 0)).amax(dim=1)


def make_micro_steps(
    micro_batches: Sequence[dict[str, Any]],
    plan: Plan,
    lengths: Lengths,
    factor: RowFactor,
    precision: torch.dtype,
    least: Sequence[int] = (1, 1),
) -> list[dict[str, Any]]:
    """The micro-steps of one block, trimmed to their rows; `least` columns of prompts and of completions stay."""
    rows = join_batches([*map(images.by_row, micro_batches)])
    dealt = len(lengths) // len(micro_batches)
    steps = []
    for part in plan.steps:
        # A placeholder is a row in which nothing counts, cut short if alone.
        chosen = [int(lengths[:, 0].argmin()) if row < 0 else row for row in part]
        made = _take(rows, chosen)
        empty_B = torch.tensor(part, device=made["completion_mask"].device) < 0
        for key, value in _OF_PLACEHOLDERS.items():
            if made.get(key) is not None:
                made[key][empty_B] = value
        live = [row for row in part if row >= 0]
        prompted = chosen if "num_images" in rows else live  # a model counts the tokens of a placeholder's images too
        left = max([least[0], *lengths[prompted, 0].tolist()])
        right = max([least[1], *lengths[live, 1].tolist()])
        made = images.joined(_trimmed(made, left, right))
        factors = [factor(batch, made) for batch in micro_batches]
        if None not in factors:
            advantages = made["advantages"]
            factors_B = advantages.new_tensor([factors[row // dealt] for row in chosen], dtype=torch.float64)
            scaled = advantages.double() * factors_B.view(-1, *[1] * (advantages.dim() - 1))
            made["advantages"] = scaled.to(precision)
            made[BatchKeys.part_factor] = factors_B.to(precision)
        steps.append(made)
    return steps


def _take(rows: dict[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    made = dict(rows)
    for key, value in rows.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            made[key] = value[[*chosen]]
        elif isinstance(value, list):
            made[key] = [value[row] for row in chosen]
    return made


def _trimmed(part: dict[str, Any], left: int, right: int) -> dict[str, Any]:
    width = part["completion_mask"].size(1)
    made = dict(part)
    for key, value in part.items():
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            continue
        if key in PROMPT_KEYS:
            made[key] = value[:, value.size(1) - left :]
        elif value.size(1) == width:
            made[key] = value[:, :right]
    return made


def logps_by_length(method: Any, given: dict[str, Any], chunk: int, widths: Lengths, packing: Packing | None) -> Any:
    """Log-probabilities without a gradient, planned like an update; `widths` are what runs of unpacked rows."""
    ids = given["input_ids"]
    mask = given["attention_mask"]
    keep = given["logits_to_keep"]
    start = ids.size(1) - keep
    seen = images.Images.of(given)
    without_images = {name: value for name, value in given.items() if name not in contract.MULTIMODAL_KEYS}
    found = None if packing is None else packing.measured(ids, mask, keep, seen)
    lengths, groups = (widths, None) if found is None else (found[0], [found[1]])
    (plan,) = plan_block([(lengths, np.ones(len(ids), dtype=bool))], -(-len(ids) // chunk), groups=groups)
    results: dict[int, torch.Tensor] = {}
    for step in plan.steps:
        # A pass without rows repeats the first row, since every rank runs the same number.
        rows = torch.tensor(step, device=ids.device).clamp(min=0)
        left, width = (max(1, int(longest)) for longest in lengths[rows.cpu().numpy()].max(axis=0))
        columns = slice(start - left, start + width)
        own = seen.at(rows.tolist()).between(columns)
        some = {**without_images, **own.entries(ids.device), "batch_size": len(rows)}
        some |= {"input_ids": ids[rows, columns], "attention_mask": mask[rows, columns], "logits_to_keep": width}
        packed = None if packing is None else packing.pack(some["input_ids"], some["attention_mask"], width, own)
        output = method(**some) if packing is None or packed is None else packing.logps(method, some, packed)
        for number, values in enumerate(output[:2]):
            if values is not None:
                results.setdefault(number, values.new_zeros((len(ids), keep)))[rows, :width] = values
    return results.get(0), results.get(1), None
