"""Generation batches in plain Python, and the tensors made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.contexts import make_rollout, mask_of
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Rollout, StepTotals, Totals, implements

LIMIT = 8
OPTIMIZER_STEPS = 2.0
REWARD_NAMES = ("solved", "style")
PADDING_ID = 0
"""Also a real token's id, so that only lengths can tell padding."""


@dataclass(frozen=True)
class Completion:
    """Lists of one number per token; `live` tells which of them count in the loss."""

    losses: Sequence[float]
    live: Sequence[bool]
    ids: Sequence[int]
    group: int
    advantage: float = 0.0
    rewards: tuple[float, float] = (0.0, 0.0)

    @property
    def size(self) -> int:
        return sum(self.live)

    @property
    def reward(self) -> float:
        scores = [reward for reward in self.rewards if not math.isnan(reward)]
        return sum(scores) if scores else math.nan


Batch = Sequence[Completion]


def completion(losses: Sequence[float], ids: str = "", group: int = 0, **settings: Any) -> Completion:
    """All tokens live; `ids` spells one letter per token."""
    numbers = [ord(letter) for letter in ids] or [PADDING_ID] * len(losses)
    return Completion(losses, [True] * len(losses), numbers, group, **settings)


def width_of(batch: Batch) -> int:
    return max(1, *(len(row.ids) for row in batch), 1)


def table(rows: Sequence[Sequence[Any]], width: int, padding: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[*row, *([padding] * (width - len(row)))] for row in rows], dtype=dtype)


def losses_of(batch: Batch, width: int | None = None) -> torch.Tensor:
    """A leaf."""
    width = width_of(batch) if width is None else width
    return table([row.losses for row in batch], width, 0.0, torch.float64).requires_grad_()


def mask_of_batch(batch: Batch, width: int | None = None) -> torch.Tensor:
    return table([row.live for row in batch], width_of(batch) if width is None else width, False, torch.float64)


def totals_of(batch: Batch, **overrides: Any) -> Totals:
    settings = {
        "tokens": sum(row.size for row in batch),
        "sequences": len(batch),
        "prompts": len({row.group for row in batch}),
        "max_completion_length": LIMIT,
        "optimizer_steps": OPTIMIZER_STEPS,
    }
    return Totals(**{**settings, **overrides})


def step_totals(batch: Batch, micro_batches: int = 1, processes: int = 1) -> Totals:
    """Where the whole batch is one optimizer step."""
    step = StepTotals(tokens=sum(row.size for row in batch), sequences=len(batch), micro_batches=micro_batches)
    return totals_of(batch, step=step, processes=processes, micro_batches=micro_batches, optimizer_steps=1.0)


def rollout_of(rows: Batch, batch: Batch | None = None, width: int | None = None, **overrides: Any) -> Rollout:
    """The rollout of a rank that holds `rows` of `batch` (by default all of it)."""
    batch = rows if batch is None else batch
    mask_B_T = mask_of_batch(rows, width)
    width = mask_B_T.size(1)
    rewards_B_K = torch.tensor([row.rewards for row in rows], dtype=torch.float64)
    settings: dict[str, Any] = {
        "mask_B_T": mask_B_T,
        "completion_mask_B_T": mask_of([len(row.ids) for row in rows], width),
        "completion_ids_B_T": table([row.ids for row in rows], width, PADDING_ID, torch.long),
        "advantages_B_T": mask_B_T * torch.tensor([[row.advantage] for row in rows], dtype=torch.float64),
        "rewards_B_K": rewards_B_K,
        "rewards_B": torch.tensor([row.reward for row in rows], dtype=torch.float64),
        "reward_names": REWARD_NAMES,
        "reward_weights_K": torch.ones(2, dtype=torch.float64),
        "num_generations": len(batch) // len({row.group for row in batch}),
        "totals": totals_of(batch),
    }
    return make_rollout([row.size for row in rows], groups=[row.group for row in rows], **{**settings, **overrides})


_LOADED: dict[str, Any] = {}


def loaded(selection: Any) -> Any:
    """The aggregation, loaded once: each time takes a look at every installed distribution."""
    key = repr(selection)
    if key not in _LOADED:
        _LOADED[key] = load_loss_aggregation(selection)
    return _LOADED[key]


def loss_and_gradient(selection: Any, batch: Batch, width: int | None = None) -> tuple[float, torch.Tensor]:
    """The loss where the batch is one micro-batch of one rank, and its slope `(N, T)` in the token losses."""
    aggregation, loss_B_T = loaded(selection), losses_of(batch, width)
    rollout = rollout_of(batch, width=width)
    if implements(aggregation, "weights"):
        weights_B_T = flow.token_weights(aggregation, rollout)
        loss = (weights_B_T * torch.where(rollout.mask_B_T > 0, loss_B_T, 0.0)).sum()
    else:
        loss = flow.reduced_loss(aggregation, loss_B_T, rollout.mask_B_T, step_totals(batch))
    (gradient_B_T,) = torch.autograd.grad(loss, loss_B_T)
    return loss.item(), gradient_B_T
