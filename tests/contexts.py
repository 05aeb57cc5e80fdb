"""Contexts made by hand, for tests of hooks and aggregations without a trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

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
    """One rank's generation batch; `rewards` are those of a single function, NaN for None.

    By default each token wrote one character, `c`, and every token has the id 1.
    """
    rows = len(lengths)
    rewards_B = torch.tensor([0.0] * rows if rewards is None else list(rewards), dtype=torch.float64)
    groups = [0] * rows if groups is None else list(groups)
    mask_B_T = mask_of(lengths, width)
    settings: dict[str, Any] = {
        "prompts": ["p"] * rows,
        "completions": ["c" * length for length in lengths],
        "texts": ["c" * length for length in lengths],
        "offsets": lambda row: [(i, i + 1) for i in range(lengths[row])],
        "prompt_ids_B_P": torch.ones(rows, 1, dtype=torch.long),
        "prompt_mask_B_P": torch.ones(rows, 1, dtype=torch.float64),
        "completion_ids_B_T": torch.ones(mask_B_T.shape, dtype=torch.long),
        "mask_B_T": mask_B_T,
        "completion_mask_B_T": mask_B_T,
        "truncated_B": torch.zeros(rows, dtype=torch.bool),
        "rewards_B_K": rewards_B.unsqueeze(1),
        "reward_names": ("r",),
        "reward_weights_K": torch.ones(1, dtype=torch.float64),
        "rewards_B": rewards_B,
        "group_ids_B": torch.tensor(groups),
        "group_baselines_B": torch.stack(
            [rewards_B[[other == group for other in groups]].nanmean() for group in groups]
        ),
        "num_generations": rows // len(set(groups)),
        "totals": Totals(tokens=sum(lengths), sequences=rows, prompts=len(set(groups)), max_completion_length=limit),
    }
    return Rollout(**{**settings, **overrides})


def make_forward(
    logps: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor | None = None, **overrides: Any
) -> Forward:
    """One micro-batch; unless told otherwise its rewards are 0, of groups whose rewards differ."""
    rows = logps.size(0)
    settings: dict[str, Any] = {
        "logps_B_T": logps,
        "entropies_B_T": entropies,
        "old_logps_B_T": logps,
        "mask_B_T": torch.ones_like(logps) if mask is None else mask,
        "completion_ids_B_T": torch.ones(logps.shape, dtype=torch.long),
        "rewards_B": logps.new_zeros(rows),
        "group_baselines_B": logps.new_zeros(rows),
        "zero_variance_B": torch.zeros(rows, dtype=torch.bool),
    }
    return Forward(**{**settings, **overrides})


def cut(rollout: Rollout, sizes: Sequence[int]) -> list[Rollout]:
    """The same generation batch on several ranks, which have `sizes` rows of it; for `Ranks`."""
    parts, first = [], 0
    assert sum(sizes) == len(rollout.mask_B_T)
    for size in sizes:
        rows = slice(first, first + size)
        of_rows: dict[str, Any] = {}
        for field in fields(rollout):
            value = getattr(rollout, field.name)
            of_all_rows = isinstance(value, torch.Tensor) and field.name != "reward_weights_K"
            if of_all_rows or field.name in ("prompts", "completions", "texts"):
                of_rows[field.name] = value[rows]
            elif field.name in ("columns", "reward_spans", "teacher_logps_B_T"):
                of_rows[field.name] = {key: column[rows] for key, column in value.items()}
        of_rows["offsets"] = partial(lambda shift, row: rollout.offsets(shift + row), first)
        parts.append(replace(rollout, **of_rows))
        first = rows.stop
    return parts


class Ranks:
    """Several ranks in this process, each with its part of a generation batch: their `gather` really meets.

    Args:
        parts: Each rank's rollout, with the totals of all.
    """

    def __init__(self, parts: Sequence[Rollout]) -> None:
        self._sent: list[torch.Tensor | None] = [None] * len(parts)
        self._barrier = threading.Barrier(len(parts), timeout=20)
        self.gathers = [0] * len(parts)
        self.rollouts: list[Rollout] = []
        first = 0
        for rank, part in enumerate(parts):
            rows = slice(first, first + len(part.mask_B_T))
            self.rollouts.append(replace(part, gather=partial(self._gather, rank), local_rows=rows))
            first = rows.stop

    def run(self, call: Callable[[Rollout], Any]) -> list[Any]:
        """What `call` gives on each rank. Fails where the ranks don't gather equally often."""

        def on(rollout: Rollout) -> Any:
            try:
                return call(rollout)
            except BaseException:
                self._barrier.abort()  # nobody waits for this rank
                raise

        with ThreadPoolExecutor(len(self.rollouts)) as pool:
            results = [future.result() for future in [pool.submit(on, rollout) for rollout in self.rollouts]]
        assert len(set(self.gathers)) == 1, f"the ranks gathered {self.gathers} times"
        return results

    def _gather(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self._sent[rank] = tensor
        self.gathers[rank] += 1
        self._barrier.wait()
        sent = [part for part in self._sent if part is not None]
        width = max(part.size(-1) for part in sent)
        wide = [pad(part, (0, width - part.size(1))) if part.dim() == 2 else part for part in sent]
        result = torch.cat(wide)
        self._barrier.wait()  # before anyone sends again
        return result
