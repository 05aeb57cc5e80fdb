"""Batches of odd shape for tests of token credit, and the same batch on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad

from tests.contexts import Ranks, cut
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Rollout

Rows = list[list[float]]


@cache
def _class_of(name: str) -> type:
    """Loading takes a look at every installed distribution: once is enough."""
    (loaded,) = load_advantage_hooks([name])
    return type(loaded)


def hook(name: str, **parameters: Any) -> Any:
    return _class_of(name)(**parameters)


def after_rollout(rollout: Rollout, advantages: Sequence[float], name: str, **parameters: Any) -> Rows:
    """The advantages `(B, T)` that a hook makes of one per completion."""
    incoming = torch.tensor(list(advantages), dtype=torch.float64)
    result: Rows = flow.apply_hooks(incoming, [hook(name, **parameters)], rollout).tolist()
    return result


def narrowed(rollout: Rollout) -> Rollout:
    """The same rows, padded to the longest of them only, as each rank has them."""
    width = max(int(rollout.completion_mask_B_T.sum(dim=1).max()), 1)
    changed: dict[str, Any] = {
        field.name: getattr(rollout, field.name)[:, :width]
        for field in fields(rollout)
        if field.name.endswith("_B_T") and isinstance(getattr(rollout, field.name), torch.Tensor)
    }
    changed["teacher_logps_B_T"] = {name: table[:, :width] for name, table in rollout.teacher_logps_B_T.items()}
    return replace(rollout, **changed)


def on_ranks(rollout: Rollout, sizes: Sequence[int], advantages: Sequence[float], hooks: Sequence[Any]) -> Rows:
    """What several ranks make of it, put together again; each rank has its own hook, and its own `T`."""
    incoming = torch.tensor(list(advantages), dtype=torch.float64)
    parts = [narrowed(part) for part in cut(rollout, sizes)]
    ranks = Ranks(parts)
    starts = {part.local_rows.start: of_rank for part, of_rank in zip(ranks.rollouts, hooks, strict=True)}

    def run(part: Rollout) -> torch.Tensor:
        own = [starts[part.local_rows.start]]
        return flow.apply_hooks(incoming[part.local_rows], own, part)

    width = rollout.mask_B_T.size(1)
    rows: Rows = torch.cat([pad(result, (0, width - result.size(1))) for result in ranks.run(run)]).tolist()
    return rows
