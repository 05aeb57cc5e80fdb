"""Aggregations of which each breaks one rule, and two that keep them all."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy
import torch


class Right:
    """A token mean by weights."""

    def weights(self, rollout: Any) -> torch.Tensor:
        return rollout.mask_B_T / max(rollout.totals.tokens, 1)


class RightReduce:
    """The same, of the optimizer step."""

    needs_step_totals = True

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Any) -> torch.Tensor:
        total = torch.where(mask_B_T > 0, loss_B_T, 0.0).sum()
        return total * totals.processes * totals.step.micro_batches / max(totals.step.tokens, 1)


class LocalReduce:
    """Right as well: the mean of a micro-batch."""

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Any) -> torch.Tensor:
        return torch.where(mask_B_T > 0, loss_B_T, 0.0).sum() / mask_B_T.sum().clamp(min=1.0)


class Both(Right, RightReduce):
    """Which of the two is meant?"""


class Raises:
    def weights(self, rollout: Any) -> torch.Tensor:
        raise KeyError("difficulty")


class OnePerCompletion:
    def weights(self, rollout: Any) -> torch.Tensor:
        return rollout.lengths_B.unsqueeze(1)


class AFloat:
    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Any) -> Any:
        return float((loss_B_T * mask_B_T).sum())


class DividesByTheSpread:
    def weights(self, rollout: Any) -> torch.Tensor:
        above_B = (rollout.rewards_B - rollout.group_baselines_B).abs()
        return torch.where(rollout.mask_B_T > 0, (1.0 / above_B).unsqueeze(1), 0.0)


class Advantage:
    def weights(self, rollout: Any) -> torch.Tensor:
        return rollout.mask_B_T * rollout.advantages_B_T


class Everywhere:
    def weights(self, rollout: Any) -> torch.Tensor:
        return torch.ones_like(rollout.mask_B_T) / max(rollout.totals.tokens, 1)


class Nil:
    def weights(self, rollout: Any) -> torch.Tensor:
        return torch.zeros_like(rollout.mask_B_T)


class MeanOfEachRow:
    def weights(self, rollout: Any) -> torch.Tensor:
        if not rollout.totals.tokens:
            return torch.zeros_like(rollout.mask_B_T)
        return rollout.mask_B_T / rollout.lengths_B.unsqueeze(1) / rollout.totals.sequences


class NobodyIsLive:
    def weights(self, rollout: Any) -> torch.Tensor:
        return rollout.mask_B_T / torch.tensor(float(rollout.totals.tokens))


class PerMicroBatch:
    def weights(self, rollout: Any) -> torch.Tensor:
        return rollout.mask_B_T / rollout.totals.micro_batches / max(rollout.totals.tokens, 1)


class ForgetsMicroBatches:
    needs_step_totals = True

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Any) -> torch.Tensor:
        return torch.where(mask_B_T > 0, loss_B_T, 0.0).sum() * totals.processes / max(totals.step.tokens, 1)


class TokensOfThisRank:
    def weights(self, rollout: Any) -> torch.Tensor:
        return rollout.mask_B_T / rollout.mask_B_T.sum().clamp(min=1.0)


class ForgetsRanks:
    needs_step_totals = True

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Any) -> torch.Tensor:
        return torch.where(mask_B_T > 0, loss_B_T, 0.0).sum() * totals.step.micro_batches / max(totals.step.tokens, 1)


class GathersSometimes:
    def weights(self, rollout: Any) -> torch.Tensor:
        if float(rollout.lengths_B.max()) > 4:
            rollout.gather(rollout.lengths_B)
        return rollout.mask_B_T / max(rollout.totals.tokens, 1)


class CountsRows:
    def weights(self, rollout: Any) -> torch.Tensor:
        rows = rollout.gather(torch.ones_like(rollout.lengths_B)).sum()
        return rollout.mask_B_T / rollout.lengths_B.clamp(min=1.0).unsqueeze(1) / rows


class DividesByTheWidth:
    def weights(self, rollout: Any) -> torch.Tensor:
        return rollout.mask_B_T / rollout.mask_B_T.size(1) / rollout.totals.sequences


class CountsPlaces:
    def weights(self, rollout: Any) -> torch.Tensor:
        first = rollout.local_rows.start or 0
        places_B = first + torch.arange(len(rollout.mask_B_T))
        return rollout.mask_B_T * (1.0 + places_B).unsqueeze(1)


class SumsThePadding:
    def weights(self, rollout: Any) -> torch.Tensor:
        likely_B = rollout.old_logps_B_T.sum(dim=1).exp()
        return torch.where(rollout.mask_B_T > 0, likely_B.unsqueeze(1), 0.0)


class Detaches:
    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Any) -> torch.Tensor:
        return torch.where(mask_B_T > 0, loss_B_T, 0.0).sum().detach()


class Squares:
    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Any) -> torch.Tensor:
        return torch.where(mask_B_T > 0, loss_B_T, 0.0).square().sum()


class DeclaredSquares(Squares):
    homogeneous = False


class UsesTheStep:
    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Any) -> torch.Tensor:
        return torch.where(mask_B_T > 0, loss_B_T, 0.0).sum() / max(totals.step.tokens, 1)


class InPlace:
    def weights(self, rollout: Any) -> torch.Tensor:
        return rollout.mask_B_T.mul_(1.0) / max(rollout.totals.tokens, 1)


class Noisy:
    """Too little for the rules that compare up to the last digits."""

    def weights(self, rollout: Any) -> torch.Tensor:
        return rollout.mask_B_T * (1.0 + 1e-9 * int.from_bytes(os.urandom(2)) / 2**16)


class Lambda(Right):
    def __init__(self) -> None:
        self.key = lambda value: value


class Exits:
    def weights(self, rollout: Any) -> torch.Tensor:
        raise SystemExit(0)


class Sleeps:
    def weights(self, rollout: Any) -> torch.Tensor:
        time.sleep(1000)
        return rollout.mask_B_T


class ThroughNumpy:
    """numpy knows no bfloat16."""

    def weights(self, rollout: Any) -> torch.Tensor:
        surprise_B_T = torch.from_numpy(1.0 - numpy.exp(rollout.old_logps_B_T.numpy()))
        live_B_T = rollout.mask_B_T > 0
        return torch.where(live_B_T, surprise_B_T, 0.0).to(rollout.mask_B_T.dtype) / max(rollout.totals.tokens, 1)


class Grows:
    """More than float32 can hold at a hundred tokens."""

    def weights(self, rollout: Any) -> torch.Tensor:
        return rollout.mask_B_T * (2.0**rollout.lengths_B).unsqueeze(1)


class OneRankReduces(Right):
    def weights(self, rollout: Any) -> torch.Tensor:
        from torch import distributed

        if distributed.is_initialized() and float(rollout.lengths_B.max()) > 3:
            distributed.all_reduce(rollout.lengths_B.clone())
        return super().weights(rollout)


SOUND = [Right(), RightReduce(), LocalReduce(), DeclaredSquares()]

BREAKS: list[tuple[str, type]] = [
    ("aggregation.form", Both),
    ("aggregation.run", Raises),
    ("aggregation.shape", OnePerCompletion),
    ("aggregation.shape", AFloat),
    ("aggregation.finite", DividesByTheSpread),
    ("aggregation.non_negative", Advantage),
    ("aggregation.mask", Everywhere),
    ("aggregation.live", Nil),
    ("aggregation.empty_rows", MeanOfEachRow),
    ("aggregation.nothing_live", NobodyIsLive),
    ("aggregation.micro_batches", PerMicroBatch),
    ("aggregation.micro_batches", ForgetsMicroBatches),
    ("aggregation.ranks", TokensOfThisRank),
    ("aggregation.ranks", ForgetsRanks),
    ("aggregation.gathers", GathersSometimes),
    ("aggregation.totals", CountsRows),
    ("aggregation.padding", DividesByTheWidth),
    ("aggregation.row_permutation", CountsPlaces),
    ("aggregation.masked_values", SumsThePadding),
    ("aggregation.gradient", Detaches),
    ("aggregation.homogeneous", Squares),
    ("aggregation.step_totals", UsesTheStep),
    ("aggregation.inputs", InPlace),
    ("aggregation.determinism", Noisy),
    ("aggregation.pickle", Lambda),
    ("aggregation.run", Exits),
    ("aggregation.dtype", ThroughNumpy),
    ("aggregation.long", Grows),
    ("aggregation.gathers", OneRankReduces),
]

HANGS: list[tuple[str, type]] = [("aggregation.run", Sleeps)]
