"""Contexts made by hand, for tests of hooks and aggregations without a trainer; the kit for authors has them too."""

from collections.abc import Sequence

import torch

from trl_grpo_ext.testing.builders import Ranks, cut, make_forward, make_rollout, mask_of

__all__ = ["Ranks", "cut", "make_forward", "make_rollout", "mask_of", "padded"]


def padded(rows: Sequence[Sequence[float]], width: int | None = None) -> torch.Tensor:
    width = max(len(row) for row in rows) if width is None else width
    return torch.tensor([[*row, *([0.0] * (width - len(row)))] for row in rows], dtype=torch.float64)
