"""Aggregations of which each breaks one rule, and some that keep them all."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy
import torch

from trl_grpo_ext.types import AggregationDeclaration


class Right:
    """A token mean by weights."""

    def weights(self, rollout: Any) -> torch.Tensor:
        return rollout.mask_B_T / max(rollout.totals.tokens, 1)


class Weighs:
    """Weights by a function of the rollout."""

    def __init__(self, function: Callable[[Any], Any], *needs: str) -> None:
        self.weights = function
        self.declares = AggregationDeclaration(needs=needs)


class LocalReduce:
    """The mean of a micro-batch. Right as well."""

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Any) -> Any:
        return torch.where(mask_B_T > 0, loss_B_T, 0.0).sum() / mask_B_T.sum().clamp(min=1.0)


class Reduces:
    """The sum of the losses as a function makes it, of the totals."""

    def __init__(self, function: Callable[[torch.Tensor, Any], Any], *needs: str) -> None:
        self.function = function
        self.declares = AggregationDeclaration(needs=needs)

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Any) -> Any:
        return self.function(torch.where(mask_B_T > 0, loss_B_T, 0.0).sum(), totals)


def token_mean(total: torch.Tensor, totals: Any) -> torch.Tensor:
    """The token mean of the optimizer step."""
    return total * totals.processes * totals.step.micro_batches / max(totals.step.tokens, 1)


def likely(rollout: Any) -> Any:
    """In float32, whatever the rollout is in."""
    return torch.where(rollout.mask_B_T > 0, rollout.old_logps_B_T.exp(), 0.0).float()


SOUND = [Right(), Weighs(likely, "old_logps"), Reduces(token_mean, "step_totals"), LocalReduce()]


def gather_sometimes(rollout: Any) -> Any:
    if float(rollout.lengths_B.max()) > 4:
        rollout.gather(rollout.lengths_B)
    return rollout.mask_B_T


def rows_of_all_ranks(rollout: Any) -> Any:
    rows = rollout.gather(torch.ones_like(rollout.lengths_B)).sum()
    return rollout.mask_B_T / rollout.lengths_B.clamp(min=1.0).unsqueeze(1) / rows


def places(rollout: Any) -> Any:
    places_B = (rollout.local_rows.start or 0) + torch.arange(len(rollout.mask_B_T))
    return rollout.mask_B_T * (1.0 + places_B).unsqueeze(1)


def padding_too(rollout: Any) -> Any:
    return torch.where(rollout.mask_B_T > 0, rollout.old_logps_B_T.sum(dim=1).exp().unsqueeze(1), 0.0)


def through_numpy(rollout: Any) -> Any:
    """numpy knows no bfloat16."""
    surprise_B_T = torch.from_numpy(1.0 - numpy.exp(rollout.old_logps_B_T.numpy()))
    return torch.where(rollout.mask_B_T > 0, surprise_B_T, 0.0).to(rollout.mask_B_T.dtype)


def noise() -> float:
    """Too little for the rules that compare up to the last digits."""
    return 1e-9 * int.from_bytes(os.urandom(2)) / 2**16


tokens_of_this_rank = Weighs(lambda rollout: rollout.mask_B_T / rollout.mask_B_T.sum().clamp(min=1.0))

BREAKS: list[tuple[str, Any]] = [
    ("aggregation.run", Weighs(lambda rollout: rollout.lengths_B.unsqueeze(1))),
    ("aggregation.run", Weighs(lambda rollout: rollout.mask_B_T * rollout.advantages_B_T)),
    ("aggregation.run", Weighs(lambda rollout: rollout.mask_B_T.mul_(1.0))),
    ("aggregation.run", Weighs(likely)),  # which declares nothing
    # huggingface/trl#6369, the other way round: what is masked is counted
    ("aggregation.run", Weighs(lambda rollout: rollout.completion_mask_B_T)),
    ("aggregation.run", Reduces(lambda total, totals: total.detach())),
    ("aggregation.determinism", Weighs(lambda rollout: rollout.mask_B_T * (1.0 + noise()))),
    ("aggregation.odd_batches", Weighs(lambda rollout: rollout.mask_B_T / torch.tensor(float(rollout.totals.tokens)))),
    ("aggregation.live", Weighs(lambda rollout: torch.zeros_like(rollout.mask_B_T))),
    ("aggregation.padding", Weighs(lambda rollout: rollout.mask_B_T / rollout.mask_B_T.size(1))),
    ("aggregation.padding", Weighs(padding_too, "old_logps")),
    ("aggregation.long", Weighs(lambda rollout: rollout.mask_B_T * (2.0**rollout.lengths_B).unsqueeze(1))),
    ("aggregation.dtype", Weighs(through_numpy, "old_logps")),
    ("aggregation.micro_batches", Weighs(lambda rollout: rollout.mask_B_T / rollout.totals.micro_batches)),
    ("aggregation.micro_batches", Reduces(lambda t, s: token_mean(t, s) / s.step.micro_batches, "step_totals")),
    ("aggregation.order", Weighs(places)),
    ("aggregation.ranks", tokens_of_this_rank),
    ("aggregation.ranks", Reduces(lambda t, s: token_mean(t, s) / s.processes, "step_totals")),
    ("aggregation.ranks", Weighs(gather_sometimes)),
    ("aggregation.totals", Weighs(rows_of_all_ranks)),
]

HANGS: list[tuple[str, Any]] = [("aggregation.run", Weighs(lambda rollout: time.sleep(1000)))]
