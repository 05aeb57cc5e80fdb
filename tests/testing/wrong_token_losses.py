"""Token losses of which each breaks one rule, and some that keep them all. Most are a function of the terms."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from tests.testing.wrong_aggregations import noise
from trl_grpo_ext.types import LossTerms, Rollout, TokenLossDeclaration


class Right:
    """REINFORCE, with a measure."""

    declares = TokenLossDeclaration(replaces=True, independent=True, needs_advantage=True)

    def loss(self, terms: LossTerms) -> Any:
        return -terms.advantages_B_T * terms.ratio_B_T

    def measures(self, terms: LossTerms) -> Mapping[str, Any]:
        return {"moved": terms.ratio_B_T - 1.0}


class MeasuresMean(Right):
    def measures(self, terms: LossTerms) -> Mapping[str, Any]:
        return {"mean": terms.ratio_B_T}


class Pays:
    """A loss by a function, which declares what it is given."""

    def __init__(self, function: Callable[[LossTerms], Any], **declared: Any) -> None:
        self.loss = function
        self.declares = TokenLossDeclaration(**declared)


class Carries:
    """Weighs the squared log-ratio by a function of the generation batch."""

    declares = TokenLossDeclaration(independent=True, needs=("old_logps",))

    def __init__(self, function: Callable[[Rollout], Any]) -> None:
        self.function = function

    def on_rollout(self, rollout: Rollout) -> Any:
        return {"weight": self.function(rollout)}

    def loss(self, terms: LossTerms) -> torch.Tensor:
        return terms.carried_B_T["weight"] * (terms.logps_B_T - terms.old_logps_B_T).square()


def surprise(rollout: Rollout) -> torch.Tensor:
    """How improbable a token was, against the mean over all ranks."""
    assert rollout.old_logps_B_T is not None
    sums_B = torch.where(rollout.mask_B_T > 0, rollout.old_logps_B_T, 0.0).sum(dim=1)
    mean = rollout.gather(sums_B).sum() / max(rollout.totals.tokens, 1)
    return rollout.old_logps_B_T / mean if bool(mean) else rollout.mask_B_T


def of_own_rows(rollout: Rollout) -> torch.Tensor:
    return rollout.mask_B_T / rollout.mask_B_T.sum().clamp(min=1.0)


def to_reference(terms: LossTerms) -> torch.Tensor:
    assert terms.ref_logps_B_T is not None
    return (terms.logps_B_T - terms.ref_logps_B_T).square()


def through_numpy(terms: LossTerms) -> torch.Tensor:
    return torch.from_numpy(numpy.exp(-terms.old_logps_B_T.numpy())) * terms.logps_B_T


class InFloat32(Right):
    """The same in float32, whatever the terms are in."""

    def loss(self, terms: LossTerms) -> Any:
        return super().loss(terms).float()

    def measures(self, terms: LossTerms) -> Mapping[str, Any]:
        return {"clipped": (terms.ratio_B_T > 1.05).float()}


SOUND = [Right(), InFloat32(), Pays(to_reference, needs=("ref_logps",)), Carries(surprise)]

BREAKS: list[tuple[str, Any]] = [
    ("token-loss.run", Pays(lambda terms: terms.logps_B_T - terms.ref_logps_B_T)),
    ("token-loss.run", Pays(lambda terms: terms.logps_B_T.sum(dim=1))),
    ("token-loss.run", MeasuresMean),
    ("token-loss.determinism", Pays(lambda terms: terms.logps_B_T * (1.0 + noise()))),
    ("token-loss.run", Pays(lambda terms: terms.logps_B_T.detach())),
    # Its slope is infinite where nothing has moved: in the first step on every generation batch.
    ("token-loss.odd_batches", Pays(lambda terms: (terms.logps_B_T - terms.old_logps_B_T).abs().sqrt())),
    ("token-loss.odd_batches", Pays(lambda terms: terms.logps_B_T / terms.advantages_B_T.abs().sum())),
    ("token-loss.padding", Pays(lambda terms: terms.logps_B_T / terms.mask_B_T.size(1))),
    ("token-loss.padding", Pays(lambda terms: terms.logps_B_T * terms.completion_ids_B_T.sum(dim=1, keepdim=True))),
    ("token-loss.long", Pays(lambda terms: terms.logps_B_T / terms.old_logps_B_T.sum(dim=1, keepdim=True).exp())),
    ("token-loss.dtype", Pays(through_numpy)),
    ("token-loss.ranks", Carries(of_own_rows)),
    ("token-loss.run", Carries(lambda rollout: rollout.mask_B_T.mul_(1.0))),
]
