"""Batches of odd shape for tests of token credit, and the same batch on several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn.functional import pad

from tests.contexts import Ranks, cut, make_forward, make_rollout
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Forward, Rollout

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
    result: Rows = flow.apply_rollout_hooks(incoming, [hook(name, **parameters)], rollout).tolist()
    return result


@st.composite
def rollouts(draw: Any, most_rows: int = 6, longest: int = 6) -> Rollout:
    """Rows of two groups in any order, with tokens of tools, empty rows, missing rewards and few distinct tokens."""
    rows = draw(st.integers(1, most_rows))
    lengths = draw(st.lists(st.integers(0, longest), min_size=rows, max_size=rows))
    width = max(*lengths, 1) + draw(st.integers(0, 2))
    groups = draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))
    groups = [sorted(set(groups)).index(group) for group in groups]
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.25, -2.0, math.nan]), min_size=rows, max_size=rows))

    def table(values: Any) -> Any:
        return draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=rows, max_size=rows))

    of_the_model = torch.tensor(table(st.sampled_from([1.0, 1.0, 0.0])), dtype=torch.float64)
    completion = make_rollout(lengths, rewards, groups, width=width).mask_B_T
    logps = st.floats(-4, 0)
    return make_rollout(
        lengths,
        rewards,
        groups,
        width=width,
        mask_B_T=completion * of_the_model,
        tool_mask_B_T=of_the_model,
        completion_ids_B_T=torch.tensor(table(st.integers(0, 2))),
        old_logps_B_T=torch.tensor(table(logps), dtype=torch.float64),
        ref_logps_B_T=torch.tensor(table(logps), dtype=torch.float64),
        teacher_logps_B_T={"teacher": torch.tensor(table(logps), dtype=torch.float64)},
        truncated_B=torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows))),
    )


def live_places(rollout: Rollout | Forward, row: int) -> list[int]:
    """Where a row's live tokens are."""
    return [place for place, live in enumerate(rollout.mask_B_T[row].tolist()) if live]


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
        return flow.apply_rollout_hooks(incoming[part.local_rows], own, part)

    width = rollout.mask_B_T.size(1)
    rows: Rows = torch.cat([pad(result, (0, width - result.size(1))) for result in ranks.run(run)]).tolist()
    return rows


def forward_of(rollout: Rollout, **overrides: Any) -> Forward:
    """A micro-batch of a rollout's rows."""
    assert rollout.old_logps_B_T is not None
    assert rollout.ref_logps_B_T is not None
    settings: dict[str, Any] = {
        "old_logps_B_T": rollout.old_logps_B_T,
        "rewards_B": rollout.rewards_B,
        "group_baselines_B": rollout.group_baselines_B,
        "gather": rollout.gather,
    }
    logps_B_T = rollout.ref_logps_B_T  # any other policy
    return make_forward(logps_B_T, -logps_B_T, rollout.mask_B_T, **{**settings, **overrides})
