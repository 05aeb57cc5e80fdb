"""Hooks of which each breaks one rule, and some that keep them all."""

import time
from collections.abc import Callable
from typing import Any

import torch

from tests.testing.wrong_aggregations import noise
from trl_grpo_ext.types import HookDeclaration


class AtForward:
    """A forward hook that multiplies with a function of the context."""

    def __init__(self, function: Callable[[Any], Any], **declared: Any) -> None:
        self.function = function
        self.declares = HookDeclaration(**declared)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T * self.function(forward).to(forward.mask_B_T.dtype)


def column(values_B: torch.Tensor) -> torch.Tensor:
    return values_B.nan_to_num().unsqueeze(1)


class Right:
    """Both stages, with a state, a need and a gather."""

    declares = HookDeclaration(role="transform", needs=("ref_logps",), independent=True)

    def __init__(self) -> None:
        self.batches = 0

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        scale = 1.0 + 0.1 * self.batches
        if rollout.training:
            self.batches += 1
        longest = rollout.gather(rollout.lengths_B).max().clamp(min=1.0)
        ref_B_T = torch.where(rollout.mask_B_T > 0, rollout.ref_logps_B_T, 0.0)
        return (scale * advantages_B_T + 0.1 * ref_B_T / longest).to(advantages_B_T.dtype)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T * (1.0 + forward.entropies_B_T)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["batches"]


class NamesFigure(Right):
    """Has a metric with the name of one that the run logs of its forward stage."""

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        self.metrics = {"forward/mean": 0.5}
        return super().on_rollout(advantages_B_T, rollout)


class Spans:
    """Credit by characters."""

    declares = HookDeclaration(role="transform", needs=("offsets",))

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> list[Any]:
        return [[(0, 1, 0.5)] if text else None for text in rollout.texts]


class Estimates:
    declares = HookDeclaration(role="estimator")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        above_B = rollout.rewards_B - rollout.group_baselines_B
        return column(above_B).to(advantages_B_T.dtype).expand_as(advantages_B_T)


class Masks:
    """A mask that goes by the sign."""

    declares = HookDeclaration(role="transform", last=True)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return torch.where(rollout.truncated_B.unsqueeze(1), advantages_B_T.clamp(max=0), advantages_B_T)


class Shapes:
    """A shaper that looks at all ranks."""

    declares = HookDeclaration(needs=("old_logps",))

    def on_rewards(self, rollout: Any) -> torch.Tensor:
        longest = rollout.gather(rollout.lengths_B).max().clamp(min=1.0)
        return 0.1 * torch.where(rollout.mask_B_T > 0, rollout.old_logps_B_T, 0.0) / longest


def likelihood_ratio(forward: Any) -> torch.Tensor:
    """gspo_token as it is meant: the mean over live tokens, bounded."""
    live_B_T = forward.mask_B_T > 0
    ratio_B_T = torch.where(live_B_T, forward.logps_B_T - forward.old_logps_B_T, 0.0).to(forward.mask_B_T.dtype)
    mean_B = ratio_B_T.sum(1) / live_B_T.sum(1).clamp(min=1)
    return mean_B.clamp(-20, 20).exp().unsqueeze(1)


SOUND = [Right(), Spans(), Estimates(), Masks(), Shapes(), AtForward(likelihood_ratio, independent=True)]


class By:
    """A transform by a function of the advantages and the rollout, with other declarations."""

    def __init__(self, function: Callable[[torch.Tensor, Any], Any], **declared: Any) -> None:
        self.on_rollout = function
        self.declares = HookDeclaration(**{"role": "transform", **declared})


class RoundsTheMean:
    declares = HookDeclaration(role="estimator")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        rewards_N, groups_N = rollout.gather(rollout.rewards_B), rollout.gather(rollout.group_ids_B)
        means_B = torch.stack([rewards_N[groups_N == group].nanmean() for group in rollout.group_ids_B])
        return column(rollout.rewards_B - means_B).expand_as(advantages_B_T)


def mean_over_rows(forward: Any) -> torch.Tensor:
    live_B_T = forward.mask_B_T > 0
    return torch.where(live_B_T, forward.logps_B_T, 0.0).sum() / live_B_T.sum().clamp(min=1)


class Forgets(Right):
    def load_state_dict(self, state: Any) -> None:
        """Nothing."""


class StateIsNoJSON(Right):
    def state_dict(self) -> dict[str, Any]:
        return {"batches": torch.tensor(self.batches)}


class CountsEvaluations(Right):
    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        result = super().on_rollout(advantages_B_T, rollout)
        self.batches += not rollout.training
        return result


class RemembersSilently:
    """Without a state_dict, so that only the advantages tell."""

    declares = HookDeclaration(role="transform")
    scale = 1.0

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        if not rollout.training:
            self.scale = 2.0
        return advantages_B_T * self.scale


def first_of_a_group(advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
    groups_N = rollout.gather(rollout.group_ids_B)
    first_N = torch.cat([groups_N[:1] == groups_N[:1], groups_N[1:] != groups_N[:-1]])
    return advantages_B_T + column(first_N[rollout.local_rows].to(advantages_B_T.dtype))


def spread(advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
    above_B = rollout.rewards_B - rollout.group_baselines_B
    return advantages_B_T + (above_B / above_B.abs()).unsqueeze(1)


def unbounded_ratio(advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
    """OpenRLHF/OpenRLHF#1293: a sequence's ratio as the exponential of an unbounded sum."""
    sums_B = torch.where(rollout.mask_B_T > 0, -rollout.ref_logps_B_T, 0.0).sum(1)
    return advantages_B_T * sums_B.exp().unsqueeze(1).to(advantages_B_T.dtype)


def centred_columns(forward: Any) -> torch.Tensor:
    """MakazhanAlpamys/Soup#723: log-ratios less their mean over the batch, before any mask."""
    ratio_B_T = forward.logps_B_T - forward.old_logps_B_T
    return torch.where(forward.mask_B_T > 0, ratio_B_T - ratio_B_T.mean(0, keepdim=True), 0.0).exp()


BREAKS: list[tuple[str, Any]] = [
    ("hook.run", By(lambda a_B_T, rollout: a_B_T - torch.where(a_B_T != 0, rollout.ref_logps_B_T, 0.0))),
    ("hook.run", By(lambda a_B_T, rollout: a_B_T.sum(dim=1))),
    ("hook.run", NamesFigure),
    ("hook.role", By(lambda a_B_T, rollout: a_B_T * 2.0, role="estimator")),
    ("hook.role", By(lambda a_B_T, rollout: Estimates().on_rollout(a_B_T, rollout))),
    ("hook.role", By(lambda a_B_T, rollout: torch.where(a_B_T.abs() < 0.5, 0.0, a_B_T), last=True)),
    ("hook.equal_rewards", RoundsTheMean),
    ("hook.dtype", AtForward(lambda forward: torch.from_numpy(forward.entropies_B_T.numpy() > 0.5))),  # no bfloat16
    ("hook.dtype", By(lambda a_B_T, rollout: 2.0 * a_B_T.double())),
    ("hook.padding", AtForward(centred_columns)),
    ("hook.odd_batches", By(spread)),
    ("hook.long", By(unbounded_ratio, needs=("ref_logps",))),
    ("hook.run", AtForward(lambda forward: forward.entropies_B_T.clamp_(max=10.0))),
    ("hook.order", By(first_of_a_group)),
    ("hook.ranks", By(lambda a_B_T, rollout: a_B_T - rollout.rewards_B.nan_to_num().mean())),
    ("hook.micro_batches", AtForward(mean_over_rows, independent=True)),
    ("hook.determinism", By(lambda a_B_T, rollout: a_B_T * (2.0 + noise()))),
    *(("hook.state", plugin) for plugin in (Forgets, StateIsNoJSON)),
    *(("hook.evaluation", plugin) for plugin in (CountsEvaluations, RemembersSilently)),
]

HANGS: list[tuple[str, Any]] = [("hook.run", By(lambda a_B_T, rollout: time.sleep(1000)))]
