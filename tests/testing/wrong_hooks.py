"""Hooks of which each breaks one rule, and one that keeps them all."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch

from trl_grpo_ext.errors import PluginOutputError


class Right:
    """Both stages, with a state, a need and a gather."""

    needs = ("ref_logps",)
    per_completion = True
    role = "transform"

    def __init__(self) -> None:
        self.batches = 0

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        scale = 1.0 + 0.1 * self.batches
        if rollout.training:
            self.batches += 1
        lengths_N = rollout.gather(rollout.lengths_B)
        longest = lengths_N.max().clamp(min=1.0)
        ref_B_T = torch.where(rollout.mask_B_T > 0, rollout.ref_logps_B_T, 0.0)
        return (scale * advantages_B_T + 0.1 * ref_B_T / longest).to(advantages_B_T.dtype)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T * (1.0 + forward.entropies_B_T)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["batches"]


class Spans:
    """Right too: credit by characters."""

    needs = ("offsets",)
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> list[Any]:
        return [[(0, 1, 0.5)] if text else None for text in rollout.texts]


class NoNegativeRewards:
    """Right too: it refuses in words what it cannot take."""

    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        if bool((rollout.rewards_B < 0).any()):
            raise PluginOutputError("rewards must not be negative")
        return advantages_B_T * 2.0


class RaisesOnNegativeRewards:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        assert not bool((rollout.rewards_B < 0).any())
        return advantages_B_T * 2.0


class Nothing:
    """No method at all."""


class Raises:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        raise KeyError("difficulty")


class ReadsWhatItDoesNotList:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T - 0.1 * torch.where(rollout.mask_B_T > 0, rollout.ref_logps_B_T, 0.0)


class NeedsAnUnknown:
    needs = ("logits",)
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T


class OnePerCompletion:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T.sum(dim=1)


class DividesByTheSpread:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        above_B = rollout.rewards_B - rollout.group_baselines_B
        return advantages_B_T + (above_B / above_B.abs()).unsqueeze(1)


class Learns:
    role = "transform"

    def __init__(self) -> None:
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T * self.scale.to(advantages_B_T.dtype)


class InPlaceInTheContext:
    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T * forward.entropies_B_T.clamp_(max=10.0)


class PaysTheFirstOfAGroup:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        groups_N = rollout.gather(rollout.group_ids_B)
        first_N = torch.cat([groups_N[:1] == groups_N[:1], groups_N[1:] != groups_N[:-1]])
        return advantages_B_T + first_N[rollout.local_rows].to(advantages_B_T.dtype).unsqueeze(1)


class CalculatesWithGroupIds:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T * (1 + rollout.group_ids_B).to(advantages_B_T.dtype).unsqueeze(1)


class MeanOfThisRank:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T - rollout.rewards_B.nan_to_num().mean()


class GathersSometimes:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        if bool((rollout.lengths_B == rollout.lengths_B[0]).all()) or float(rollout.lengths_B.max()) > 3:
            rollout.gather(rollout.lengths_B)
        return advantages_B_T * 2.0


class SaysPerCompletion:
    per_completion = True

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        logps_B_T = torch.where(forward.mask_B_T > 0, forward.logps_B_T, 0.0)
        return advantages_B_T - logps_B_T.sum() / forward.mask_B_T.sum().clamp(min=1.0)


class WantsOneNumber:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        live_B_T = rollout.mask_B_T > 0
        for row, live in zip(advantages_B_T, live_B_T, strict=True):
            if len(row[live].unique()) > 1:
                raise ValueError("the advantages of a completion differ")
        return advantages_B_T * 2.0


class Noisy:
    """Too little for the rules that compare up to the last digits."""

    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T + 1e-9 * int.from_bytes(os.urandom(2)) / 2**16


class Forgets(Right):
    def load_state_dict(self, state: Any) -> None:
        """Nothing."""


class StateIsNoJSON(Right):
    def state_dict(self) -> dict[str, Any]:
        return {"batches": torch.tensor(self.batches)}


class HalfAState(Right):
    load_state_dict = None  # type: ignore[assignment]


class CountsEvaluations(Right):
    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        result = super().on_rollout(advantages_B_T, rollout)
        self.batches += not rollout.training
        return result


class RemembersSilently:
    """Without a state_dict, so that only the advantages tell."""

    role = "transform"

    def __init__(self) -> None:
        self.factor = 1.0

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        if not rollout.training:
            self.factor = 2.0
        return advantages_B_T * self.factor


class SaysItIsAnEstimator:
    role = "estimator"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T + rollout.rewards_B.nan_to_num().unsqueeze(1)


class Overwrites:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return rollout.rewards_B.nan_to_num().unsqueeze(1).expand_as(advantages_B_T)


class MasksTheSmall:
    role = "transform"
    last = True

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return torch.where(advantages_B_T.abs() < 0.5, 0.0, advantages_B_T)


class RoundsTheMean:
    role = "estimator"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        rewards_N, groups_N = rollout.gather(rollout.rewards_B), rollout.gather(rollout.group_ids_B)
        means_B = torch.stack([rewards_N[groups_N == group].nanmean() for group in rollout.group_ids_B])
        return (rollout.rewards_B - means_B).nan_to_num().unsqueeze(1).expand_as(advantages_B_T)


class NoRole:
    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T * 2.0


class Estimates:
    """Right too: an estimator."""

    role = "estimator"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        above_B = (rollout.rewards_B - rollout.group_baselines_B).nan_to_num()
        return above_B.to(advantages_B_T.dtype).unsqueeze(1).expand_as(advantages_B_T)


class Masks:
    """Right too: a mask that goes by the sign."""

    role = "transform"
    last = True

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return torch.where(rollout.truncated_B.unsqueeze(1), advantages_B_T.clamp(max=0), advantages_B_T)


class Shapes:
    """Right too: a shaper that looks at all ranks."""

    needs = ("old_logps",)

    def on_rewards(self, rollout: Any) -> torch.Tensor:
        longest = rollout.gather(rollout.lengths_B).max().clamp(min=1.0)
        return 0.1 * torch.where(rollout.mask_B_T > 0, rollout.old_logps_B_T, 0.0) / longest


class Lambda:
    role = "transform"

    def __init__(self) -> None:
        self.key = lambda value: value

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T * 2.0


class Transform:
    """What most of the following are."""

    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T * self.factor(rollout)

    def factor(self, rollout: Any) -> Any:
        return 2.0


class Exits(Transform):
    def factor(self, rollout: Any) -> Any:
        raise SystemExit(0)


class Sleeps(Transform):
    def factor(self, rollout: Any) -> Any:
        time.sleep(1000)


class ThroughNumpy:
    """numpy knows no bfloat16."""

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        entropies = forward.entropies_B_T.numpy()
        return advantages_B_T * torch.from_numpy(entropies > 0.5).to(advantages_B_T.dtype)


class UnboundedRatio:
    """OpenRLHF/OpenRLHF#1293: a sequence's ratio as the exponential of an unbounded sum."""

    needs = ("old_logps", "ref_logps")
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        live_B_T = rollout.mask_B_T > 0
        ratio_B = torch.where(live_B_T, -rollout.ref_logps_B_T, 0.0).sum(1).exp()
        return advantages_B_T * ratio_B.unsqueeze(1).to(advantages_B_T.dtype)


class CentresColumns:
    """MakazhanAlpamys/Soup#723: log-ratios less their mean over the batch, before any mask."""

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        ratio_B_T = forward.logps_B_T - forward.old_logps_B_T
        centred_B_T = torch.where(forward.mask_B_T > 0, ratio_B_T - ratio_B_T.mean(dim=0, keepdim=True), 0.0)
        return advantages_B_T * centred_B_T.exp().to(advantages_B_T.dtype)


class SequenceRatioOverTheWidth:
    """gspo_token with the mean over all columns: the ratio drifts to 1 as the batch gets wider."""

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        ratio_B_T = torch.where(forward.mask_B_T > 0, forward.logps_B_T - forward.old_logps_B_T, 0.0)
        return advantages_B_T * ratio_B_T.mean(dim=1, keepdim=True).exp().to(advantages_B_T.dtype)


class OneRankReduces(Transform):
    def factor(self, rollout: Any) -> Any:
        from torch import distributed

        count = rollout.truncated_B.sum()
        if distributed.is_initialized() and rollout.local_rows.start == 0:
            distributed.all_reduce(count)
        return 2.0


class GroupsOfThisRank(Transform):
    """Reshapes its own rows into groups, of which it may have half."""

    def factor(self, rollout: Any) -> Any:
        lengths_B = rollout.lengths_B
        longest = torch.stack([lengths_B[rollout.group_ids_B == g].max() for g in rollout.group_ids_B])
        return (lengths_B / longest.clamp(min=1)).unsqueeze(1)


class Threaded(Transform):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class TheSameTensor(Transform):
    """Gives back what came in."""

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T


class LikelihoodRatio:
    """gspo_token as it is meant: the mean over live tokens, bounded."""

    per_completion = True

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        live_B_T = forward.mask_B_T > 0
        ratio_B_T = torch.where(live_B_T, forward.logps_B_T - forward.old_logps_B_T, 0.0).to(advantages_B_T.dtype)
        mean_B = ratio_B_T.sum(1) / live_B_T.sum(1).clamp(min=1)
        return advantages_B_T * mean_B.clamp(-20, 20).exp().unsqueeze(1)


class NoneOfTheTruncated(Transform):
    def factor(self, rollout: Any) -> Any:
        return (~rollout.truncated_B).to(rollout.mask_B_T.dtype).unsqueeze(1)


SOUND = [
    *(Right(), Spans(), NoNegativeRewards(), Estimates(), Masks(), Shapes()),
    *(TheSameTensor(), LikelihoodRatio(), NoneOfTheTruncated()),
]


BREAKS: list[tuple[str, type]] = [
    ("hook.form", Nothing),
    ("hook.form", NoRole),
    ("hook.run", Raises),
    ("hook.needs", ReadsWhatItDoesNotList),
    ("hook.needs", NeedsAnUnknown),
    ("hook.shape", OnePerCompletion),
    ("hook.role", SaysItIsAnEstimator),
    ("hook.role", Overwrites),
    ("hook.role", MasksTheSmall),
    ("hook.equal_rewards", RoundsTheMean),
    ("hook.finite", RaisesOnNegativeRewards),
    ("hook.gradient", Learns),
    ("hook.inputs", InPlaceInTheContext),
    ("hook.row_permutation", PaysTheFirstOfAGroup),
    ("hook.group_permutation", CalculatesWithGroupIds),
    ("hook.split", MeanOfThisRank),
    ("hook.gathers", GathersSometimes),
    ("hook.micro_batches", SaysPerCompletion),
    ("hook.composition", WantsOneNumber),
    ("hook.determinism", Noisy),
    ("hook.state", Forgets),
    ("hook.state", StateIsNoJSON),
    ("hook.state", HalfAState),
    ("hook.evaluation", CountsEvaluations),
    ("hook.evaluation", RemembersSilently),
    ("hook.pickle", Lambda),
    ("hook.run", Exits),
    ("hook.dtype", ThroughNumpy),
    ("hook.long", UnboundedRatio),
    ("hook.mask", CentresColumns),
    ("hook.padding", SequenceRatioOverTheWidth),
    ("hook.finite", DividesByTheSpread),
    ("hook.gathers", OneRankReduces),
    ("hook.split", GroupsOfThisRank),
    ("hook.pickle", Threaded),
]

HANGS: list[tuple[str, type]] = [("hook.run", Sleeps)]
