"""Contexts made by hand, for tests of hooks and aggregations without a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trl_grpo_ext.types import Forward, Rollout, Totals


def mask_of(lengths: Sequence[int], width: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    width = max(max(lengths), 1) if width is None else width
    return (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).to(dtype)


def padded(rows: Sequence[Sequence[float]], width: int | None = None) -> torch.Tensor:
    width = max(len(row) for row in rows) if width is None else width
    return torch.tensor([[*row, *([0.0] * (width - len(row)))] for row in rows], dtype=torch.float64)


def make_rollout(
    lengths: Sequence[int],
    rewards: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
    *,
    width: int | None = None,
    limit: int = 8,
    **overrides: Any,
) -> Rollout:
    """One rank's generation batch; `rewards` are those of a single function, NaN for None."""
    rows = len(lengths)
    rewards_B = torch.tensor([0.0] * rows if rewards is None else list(rewards), dtype=torch.float64)
    groups = [0] * rows if groups is None else list(groups)
    mask_B_T = mask_of(lengths, width)
    settings: dict[str, Any] = {
        "prompts": ["p"] * rows,
        "completions": ["c"] * rows,
        "completion_ids_B_T": torch.ones(mask_B_T.shape, dtype=torch.long),
        "mask_B_T": mask_B_T,
        "rewards_B_K": rewards_B.unsqueeze(1),
        "reward_names": ("r",),
        "reward_weights_K": torch.ones(1, dtype=torch.float64),
        "rewards_B": rewards_B,
        "group_ids_B": torch.tensor(groups),
        "num_generations": rows // len(set(groups)),
        "totals": Totals(tokens=sum(lengths), sequences=rows, prompts=len(set(groups)), max_completion_length=limit),
    }
    return Rollout(**{**settings, **overrides})


def make_forward(logps: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor | None = None) -> Forward:
    mask = torch.ones_like(logps) if mask is None else mask
    return Forward(logps_B_T=logps, entropies_B_T=entropies, old_logps_B_T=logps, mask_B_T=mask)
