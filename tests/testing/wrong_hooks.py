"""Hooks of which each breaks one rule, and some that keep them all."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.testing.wrong_aggregations import noise
from trl_grpo_ext.types import HookDeclaration


class Transform:
    """What most of the following are: the advantages times a factor. Right as it is."""

    declares = HookDeclaration(role="transform")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T * self.factor(rollout)

    def factor(self, rollout: Any) -> Any:
        return 2.0


class AtForward:
    """The same at the loss forward."""

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T * self.factor(forward, forward.mask_B_T > 0)

    def factor(self, forward: Any, live_B_T: torch.Tensor) -> Any:
        return 2.0


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


class LikelihoodRatio(AtForward):
    """gspo_token as it is meant: the mean over live tokens, bounded."""

    declares = HookDeclaration(independent=True)

    def factor(self, forward: Any, live_B_T: torch.Tensor) -> Any:
        ratio_B_T = torch.where(live_B_T, forward.logps_B_T - forward.old_logps_B_T, 0.0).to(forward.mask_B_T.dtype)
        mean_B = ratio_B_T.sum(1) / live_B_T.sum(1).clamp(min=1)
        return mean_B.clamp(-20, 20).exp().unsqueeze(1)


SOUND = [Right(), Spans(), Estimates(), Masks(), Shapes(), LikelihoodRatio()]


class By(Transform):
    """A transform by a function of the advantages and the rollout, with other declarations."""

    def __init__(self, function: Callable[[torch.Tensor, Any], Any], **declared: Any) -> None:
        self.function = function
        self.declares = replace(self.declares, **declared)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return self.function(advantages_B_T, rollout)


class AtForwardBy(AtForward):
    """A forward hook that multiplies with a function of the context."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def factor(self, forward: Any, live_B_T: torch.Tensor) -> Any:
        return self.function(forward).to(forward.mask_B_T.dtype)


class RoundsTheMean:
    declares = HookDeclaration(role="estimator")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        rewards_N, groups_N = rollout.gather(rollout.rewards_B), rollout.gather(rollout.group_ids_B)
        means_B = torch.stack([rewards_N[groups_N == group].nanmean() for group in rollout.group_ids_B])
        return column(rollout.rewards_B - means_B).expand_as(advantages_B_T)


class SaysIndependent(AtForward):
    declares = HookDeclaration(independent=True)

    def factor(self, forward: Any, live_B_T: torch.Tensor) -> Any:
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


class RemembersSilently(Transform):
    """Without a state_dict, so that only the advantages tell."""

    scale = 1.0

    def factor(self, rollout: Any) -> Any:
        if not rollout.training:
            self.scale = 2.0
        return self.scale


def first_of_a_group(advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
    groups_N = rollout.gather(rollout.group_ids_B)
    first_N = torch.cat([groups_N[:1] == groups_N[:1], groups_N[1:] != groups_N[:-1]])
    return advantages_B_T + column(first_N[rollout.local_rows].to(advantages_B_T.dtype))


def gather_sometimes(advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
    if bool((rollout.lengths_B == rollout.lengths_B[0]).all()) or float(rollout.lengths_B.max()) > 3:
        rollout.gather(rollout.lengths_B)
    return advantages_B_T * 2.0


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
    ("hook.run", By(lambda a_B_T, rollout: rollout.columns["difficulty"])),
    ("hook.run", By(lambda a_B_T, rollout: a_B_T - torch.where(a_B_T != 0, rollout.ref_logps_B_T, 0.0))),
    ("hook.run", By(lambda a_B_T, rollout: a_B_T.sum(dim=1))),
    ("hook.role", By(lambda a_B_T, rollout: a_B_T * 2.0, role="estimator")),
    ("hook.role", By(lambda a_B_T, rollout: Estimates().on_rollout(a_B_T, rollout))),
    ("hook.role", By(lambda a_B_T, rollout: torch.where(a_B_T.abs() < 0.5, 0.0, a_B_T), last=True)),
    ("hook.equal_rewards", RoundsTheMean),
    ("hook.dtype", AtForwardBy(lambda forward: torch.from_numpy(forward.entropies_B_T.numpy() > 0.5))),  # no bfloat16
    ("hook.dtype", By(lambda a_B_T, rollout: 2.0 * a_B_T.double())),
    ("hook.padding", AtForwardBy(centred_columns)),
    ("hook.odd_batches", By(spread)),
    ("hook.long", By(unbounded_ratio, needs=("ref_logps",))),
    ("hook.run", AtForwardBy(lambda forward: forward.entropies_B_T.clamp_(max=10.0))),
    ("hook.order", By(first_of_a_group)),
    ("hook.order", By(lambda a_B_T, rollout: a_B_T * column(1.0 + rollout.group_ids_B).to(a_B_T.dtype))),
    ("hook.ranks", By(lambda a_B_T, rollout: a_B_T - rollout.rewards_B.nan_to_num().mean())),
    ("hook.ranks", By(gather_sometimes)),
    ("hook.micro_batches", SaysIndependent),
    ("hook.determinism", By(lambda a_B_T, rollout: a_B_T * (2.0 + noise()))),
    *(("hook.state", plugin) for plugin in (Forgets, StateIsNoJSON)),
    *(("hook.evaluation", plugin) for plugin in (CountsEvaluations, RemembersSilently)),
]

HANGS: list[tuple[str, Any]] = [("hook.run", By(lambda a_B_T, rollout: time.sleep(1000)))]
