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


class NeedsAString:
    needs = "offsets"
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T


class OnePerCompletion:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T.sum(dim=1)


class Double:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T.double()


class SumsThePadding:
    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T + forward.logps_B_T.sum(dim=1, keepdim=True)


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


class InPlace:
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T.mul_(2.0)


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


class DividesByTheWidth:
    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T / advantages_B_T.size(1)


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


class ShapesTheWidth:
    def on_rewards(self, rollout: Any) -> torch.Tensor:
        return rollout.lengths_B / rollout.mask_B_T.size(1)


class ShapesOnePerGroup:
    def on_rewards(self, rollout: Any) -> torch.Tensor:
        return rollout.rewards_B.nan_to_num()[:1]


class ShapesWithThisRanksMean:
    def on_rewards(self, rollout: Any) -> torch.Tensor:
        return rollout.rewards_B.nan_to_num().mean() - rollout.lengths_B


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


class ToBfloat16(Transform):
    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return (advantages_B_T * 2.0).to(torch.bfloat16)


class MixesDtypes:
    """Refused by torch where log-probabilities are of another type than the mask."""

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        means_B = torch.linalg.vecdot(forward.entropies_B_T.nan_to_num() * (forward.mask_B_T > 0), forward.mask_B_T)
        return advantages_B_T * means_B.unsqueeze(1).to(advantages_B_T.dtype)


class UnboundedRatio:
    """OpenRLHF/OpenRLHF#1293: a sequence's ratio as the exponential of an unbounded sum."""

    needs = ("old_logps", "ref_logps")
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        live_B_T = rollout.mask_B_T > 0
        ratio_B = torch.where(live_B_T, -rollout.ref_logps_B_T, 0.0).sum(1).exp()
        return advantages_B_T * ratio_B.unsqueeze(1).to(advantages_B_T.dtype)


class Vanishes:
    """A product of probabilities."""

    needs = ("old_logps",)
    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        live_B_T = rollout.mask_B_T > 0
        likelihood_B = torch.where(live_B_T, rollout.old_logps_B_T, 0.0).sum(1).exp()
        return advantages_B_T / likelihood_B.unsqueeze(1).to(advantages_B_T.dtype)


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


class PoisonedBaseline:
    """huggingface/trl#5773: a completion without a reward makes its group's mean NaN."""

    role = "estimator"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        rewards_N, groups_N = rollout.gather(rollout.rewards_B), rollout.gather(rollout.group_ids_B)
        pairs = zip(rewards_N, groups_N, strict=True)
        above_B = torch.stack([(r - rewards_N[groups_N == group]).mean() for r, group in pairs])[rollout.local_rows]
        return above_B.to(advantages_B_T.dtype).unsqueeze(1).expand_as(advantages_B_T)


class SpreadOfOne:
    """The same thread: the spread of a single value that was scored is NaN."""

    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        rewards_N, groups_N = rollout.gather(rollout.rewards_B), rollout.gather(rollout.group_ids_B)
        spread_N = torch.stack([rewards_N[(groups_N == g) & ~rewards_N.isnan()].std() for g in groups_N])
        return advantages_B_T / (spread_N[rollout.local_rows].unsqueeze(1) + 1e-4).to(advantages_B_T.dtype)


class BroadcastsRows:
    """hiyouga/EasyR1#596, huggingface/trl#6095: `(B,)` against `(B, T)`."""

    role = "transform"

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T.sum(dim=1) * rollout.lengths_B.unsqueeze(1)


class OneRankReduces(Transform):
    def factor(self, rollout: Any) -> Any:
        from torch import distributed

        count = rollout.truncated_B.sum()
        if distributed.is_initialized() and rollout.local_rows.start == 0:
            distributed.all_reduce(count)
        return 2.0


class ByPlace(Transform):
    def factor(self, rollout: Any) -> Any:
        return 1.0 / torch.arange(1, len(rollout.texts) + 1, dtype=rollout.mask_B_T.dtype).unsqueeze(1)


class GroupsOfThisRank(Transform):
    """Reshapes its own rows into groups, of which it may have half."""

    def factor(self, rollout: Any) -> Any:
        lengths_B = rollout.lengths_B
        longest = torch.stack([lengths_B[rollout.group_ids_B == g].max() for g in rollout.group_ids_B])
        return (lengths_B / longest.clamp(min=1)).unsqueeze(1)


CALLS: list[int] = []


class CountsCalls(Transform):
    def factor(self, rollout: Any) -> Any:
        CALLS.append(1)
        return 1.0 + len(CALLS)


class Threaded(Transform):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class AbsentColumn(Transform):
    def factor(self, rollout: Any) -> Any:
        return rollout.columns["difficulty"][0]


class OnePerRun(Transform):
    def factor(self, rollout: Any) -> Any:
        raise NotImplementedError


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


class Doubles(Transform):
    """Computes in float64 whatever comes, and prints."""

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        print("advantages", advantages_B_T.shape)
        return (advantages_B_T.double() * 0.3).to(advantages_B_T.dtype)


SOUND = [TheSameTensor(), LikelihoodRatio(), NoneOfTheTruncated(), Doubles()]


BREAKS: list[tuple[str, type]] = [
    ("hook.form", Nothing),
    ("hook.form", NoRole),
    ("hook.run", Raises),
    ("hook.needs", ReadsWhatItDoesNotList),
    ("hook.needs", NeedsAnUnknown),
    ("hook.needs", NeedsAString),
    ("hook.shape", OnePerCompletion),
    ("hook.shape", ShapesOnePerGroup),
    ("hook.role", SaysItIsAnEstimator),
    ("hook.role", Overwrites),
    ("hook.role", MasksTheSmall),
    ("hook.equal_rewards", RoundsTheMean),
    ("hook.dtype", Double),
    ("hook.mask", SumsThePadding),
    ("hook.finite", DividesByTheSpread),
    ("hook.finite", RaisesOnNegativeRewards),
    ("hook.gradient", Learns),
    ("hook.inputs", InPlace),
    ("hook.inputs", InPlaceInTheContext),
    ("hook.row_permutation", PaysTheFirstOfAGroup),
    ("hook.group_permutation", CalculatesWithGroupIds),
    ("hook.padding", DividesByTheWidth),
    ("hook.padding", ShapesTheWidth),
    ("hook.split", MeanOfThisRank),
    ("hook.split", ShapesWithThisRanksMean),
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
    ("hook.run", AbsentColumn),
    ("hook.run", OnePerRun),
    ("hook.dtype", ThroughNumpy),
    ("hook.dtype", ToBfloat16),
    ("hook.dtype", MixesDtypes),
    ("hook.long", UnboundedRatio),
    ("hook.long", Vanishes),
    ("hook.mask", CentresColumns),
    ("hook.padding", SequenceRatioOverTheWidth),
    ("hook.finite", PoisonedBaseline),
    ("hook.finite", SpreadOfOne),
    ("hook.shape", BroadcastsRows),
    ("hook.gathers", OneRankReduces),
    ("hook.row_permutation", ByPlace),
    ("hook.split", GroupsOfThisRank),
    ("hook.determinism", CountsCalls),
    ("hook.pickle", Threaded),
]

HANGS: list[tuple[str, type]] = [("hook.run", Sleeps)]
