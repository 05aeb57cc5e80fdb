"""Batches made of lists of token losses, the loss of an aggregation on them, and its weights.

The losses are mostly `[1, 3], [2, 2, 0, 4], [6]`: completions of 2, 4 and 1 tokens, together 7, with the token sums
4, 8 and 6 and the token means 2, 2 and 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.contexts import make_rollout, mask_of, padded
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Rollout, StepTotals, implements


@dataclass(frozen=True)
class Completion:
    """Lists of one number per token; `live` tells which of them count in the loss."""

    losses: Sequence[float]
    live: Sequence[bool]
    ids: Sequence[int]
    group: int
    advantage: float = 0.0
    rewards: tuple[float, float] = (0.0, 0.0)


Batch = Sequence[Completion]


def completion(losses: Sequence[float], ids: str = "", group: int = 0, **settings: Any) -> Completion:
    """All tokens live; `ids` spells one letter per token, and without it all are 0, as padding is."""
    numbers = [ord(letter) for letter in ids] or [0] * len(losses)
    return Completion(losses, [True] * len(losses), numbers, group, **settings)


def rollout_of(batch: Batch, width: int | None = None) -> Rollout:
    """The rollout of one rank, which feeds two optimizer steps."""
    width = max(1, *(len(row.ids) for row in batch), 1) if width is None else width
    mask_B_T = padded([row.live for row in batch], width)
    rollout = make_rollout(
        [sum(row.live) for row in batch],
        [sum(row.rewards) for row in batch],
        [row.group for row in batch],
        mask_B_T=mask_B_T,
        completion_mask_B_T=mask_of([len(row.ids) for row in batch], width),
        completion_ids_B_T=padded([row.ids for row in batch], width).long(),
        advantages_B_T=mask_B_T * torch.tensor([[row.advantage] for row in batch], dtype=torch.float64),
        rewards_B_K=torch.tensor([row.rewards for row in batch], dtype=torch.float64),
        reward_names=("solved", "style"),
        reward_weights_K=torch.ones(2, dtype=torch.float64),
    )
    return replace(rollout, totals=replace(rollout.totals, optimizer_steps=2.0))


def loss_and_gradient(selection: Any, batch: Batch, width: int | None = None) -> tuple[float, torch.Tensor]:
    """The loss where the batch is one micro-batch of one rank, and its slope `(N, T)` in the token losses."""
    aggregation, rollout = load_loss_aggregation(selection), rollout_of(batch, width)
    loss_B_T = padded([row.losses for row in batch], rollout.mask_B_T.size(1)).requires_grad_()
    if implements(aggregation, "weights"):
        weights_B_T = flow.token_weights(aggregation, rollout)
        loss = (weights_B_T * torch.where(rollout.mask_B_T > 0, loss_B_T, 0.0)).sum()
    else:
        step = StepTotals(tokens=rollout.totals.tokens, sequences=len(batch), micro_batches=1)
        totals = replace(rollout.totals, step=step, micro_batches=1, optimizer_steps=1.0)
        loss = flow.reduced_loss(aggregation, loss_B_T, rollout.mask_B_T, totals)
    (gradient_B_T,) = torch.autograd.grad(loss, loss_B_T)
    return loss.item(), gradient_B_T


BATCH = [
    completion([1, 3], ids="AB", advantage=1.0, rewards=(1.0, 0.0)),
    completion([2, 2, 0, 4], ids="ACDE", advantage=-2.0, rewards=(0.0, 0.0)),
    completion([6], ids="F", advantage=1.0, rewards=(1.0, 0.0)),
]
"""One group: right, wrong, right; the first two begin with the same token."""


def weights_of(selection: Any, batch: Batch) -> list[list[float]]:
    return flow.token_weights(load_loss_aggregation(selection), rollout_of(batch)).tolist()


def in_groups(groups: list[int]) -> Batch:
    return [replace(row, group=group) for row, group in zip(BATCH, groups, strict=True)]
