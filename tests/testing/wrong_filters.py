"""Group filters of which each breaks one rule, and two that keep them all. Most are a function of the rollout."""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy
import torch

from trl_grpo_ext.credit.groups import gather_groups, group_mean
from trl_grpo_ext.types import FilterDeclaration


class Right:
    """Groups that are solved now and then."""

    def keep(self, rollout: Any) -> Any:
        return solved(rollout)


class ReadsAdvantages:
    """Right as well, with a reason."""

    declares = FilterDeclaration(needs=("advantages",))

    def keep(self, rollout: Any) -> list[bool | str]:
        sizes_B = torch.where(rollout.mask_B_T > 0, rollout.advantages_B_T, 0.0).abs().sum(dim=1)
        means_N = group_mean(rollout.gather(sizes_B), gather_groups(rollout))
        return [mean > 0 or "no advantage" for mean in means_N[rollout.local_rows].tolist()]


class Keeps:
    """A filter by a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.keep = function


def solved(rollout: Any) -> torch.Tensor:
    means_N = group_mean(rollout.gather(rollout.rewards_B).nan_to_num(), gather_groups(rollout))
    return (means_N > 0)[rollout.local_rows]


def all_alike(rollout: Any, kept: bool = True) -> torch.Tensor:
    return torch.full((len(rollout.texts),), kept)


def no_reward(rollout: Any) -> torch.Tensor:
    if bool(rollout.gather(rollout.rewards_B).isnan().any()):
        raise ValueError("a completion without a reward")
    return solved(rollout)


def unpadded(rollout: Any) -> torch.Tensor:
    longest = rollout.gather(rollout.completion_mask_B_T.sum(dim=1)).max()
    return all_alike(rollout, bool(rollout.mask_B_T.size(1) <= longest))


def own_rows(rollout: Any) -> torch.Tensor:
    groups_B = torch.unique(rollout.group_ids_B, return_inverse=True)[1]
    return group_mean(rollout.rewards_B.nan_to_num(), groups_B) > 0.4


CALLS = count()
SOUND = [Right(), ReadsAdvantages(), Keeps(lambda rollout: [numpy.bool_(one) for one in solved(rollout)])]

BREAKS: list[tuple[str, Any]] = [
    ("filter.run", Keeps(lambda rollout: rollout.advantages_B_T.abs().sum(dim=1) > 0)),  # which it does not declare
    ("filter.run", Keeps(lambda rollout: torch.ones(rollout.totals.prompts, dtype=torch.bool))),
    ("filter.run", Keeps(lambda rollout: ["a reason of more characters than fit" * 3 for r in rollout.rewards_B])),
    ("filter.determinism", Keeps(lambda rollout: all_alike(rollout, next(CALLS) % 2 == 0))),
    ("filter.odd_batches", Keeps(no_reward)),
    ("filter.run", Keeps(lambda rollout: rollout.rewards_B > 0.3)),
    ("filter.padding", Keeps(unpadded)),
    ("filter.ranks", Keeps(own_rows)),
]
