"""Group filters of which each breaks one rule, and two that keep them all."""

from __future__ import annotations

from typing import Any

import torch

from trl_grpo_ext.credit.groups import gather_groups, group_mean


class Right:
    """Groups that are solved now and then."""

    def keep(self, rollout: Any) -> torch.Tensor:
        means_N = group_mean(rollout.gather(rollout.rewards_B).nan_to_num(), gather_groups(rollout))
        return (means_N > 0)[rollout.local_rows]


class ReadsAdvantages:
    """Right as well, with a reason."""

    reads_advantages = True

    def keep(self, rollout: Any) -> list[bool | str]:
        sizes_B = torch.where(rollout.mask_B_T > 0, rollout.advantages_B_T, 0.0).abs().sum(dim=1)
        means_N = group_mean(rollout.gather(sizes_B), gather_groups(rollout))
        return [mean > 0 or "no advantage" for mean in means_N[rollout.local_rows].tolist()]


class Neither:
    """Nothing."""


class ReadsWithoutSayingSo:
    def keep(self, rollout: Any) -> torch.Tensor:
        kept: torch.Tensor = rollout.advantages_B_T.abs().sum(dim=1) > 0
        return kept


class OnePerGroup:
    def keep(self, rollout: Any) -> torch.Tensor:
        return torch.ones(rollout.totals.prompts, dtype=torch.bool)


class Numbers:
    def keep(self, rollout: Any) -> list[str]:
        return [f"a mean reward of {reward} is not what this filter keeps" for reward in rollout.rewards_B.tolist()]


class NoReward:
    def keep(self, rollout: Any) -> torch.Tensor:
        if bool(rollout.gather(rollout.rewards_B).isnan().any()):
            raise ValueError("a completion without a reward")
        return Right().keep(rollout)


class EachByItself:
    def keep(self, rollout: Any) -> torch.Tensor:
        kept: torch.Tensor = rollout.rewards_B > 0.3
        return kept


class Unpadded:
    def keep(self, rollout: Any) -> torch.Tensor:
        longest = rollout.gather(rollout.completion_mask_B_T.sum(dim=1)).max()
        return torch.full((len(rollout.texts),), bool(rollout.mask_B_T.size(1) <= longest))


class SumsThePadding:
    def keep(self, rollout: Any) -> torch.Tensor:
        means_N = group_mean(rollout.gather(rollout.old_logps_B_T.abs().sum(dim=1)), gather_groups(rollout))
        return (means_N < 1e3)[rollout.local_rows]


class OwnRows:
    def keep(self, rollout: Any) -> torch.Tensor:
        groups_B = torch.unique(rollout.group_ids_B, return_inverse=True)[1]
        return group_mean(rollout.rewards_B.nan_to_num(), groups_B) > 0.4


class GathersSometimes:
    def keep(self, rollout: Any) -> torch.Tensor:
        if rollout.local_rows.start in (0, None):
            rollout.gather(rollout.rewards_B)
        return torch.ones(len(rollout.texts), dtype=torch.bool)


class InPlace:
    def keep(self, rollout: Any) -> torch.Tensor:
        rollout.mask_B_T.mul_(1.0)
        return torch.ones(len(rollout.texts), dtype=torch.bool)


class Lambda(Right):
    def __init__(self) -> None:
        self.key = lambda value: value


class Draws:
    """Another answer at each call, the same for all of a group."""

    def keep(self, rollout: Any) -> torch.Tensor:
        return torch.full((len(rollout.texts),), bool(torch.rand(()) < 0.5))


SOUND = [Right(), ReadsAdvantages()]

BREAKS: list[tuple[str, type]] = [
    ("filter.form", Neither),
    ("filter.run", ReadsWithoutSayingSo),
    ("filter.shape", OnePerGroup),
    ("filter.shape", Numbers),
    ("filter.determinism", Draws),
    ("filter.odd_batches", NoReward),
    ("filter.groups", EachByItself),
    ("filter.padding", Unpadded),
    ("filter.masked_values", SumsThePadding),
    ("filter.ranks", OwnRows),
    ("filter.gathers", GathersSometimes),
    ("filter.inputs", InPlace),
    ("filter.pickle", Lambda),
]
