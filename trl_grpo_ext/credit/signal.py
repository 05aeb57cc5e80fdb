"""Signal: whether there is anything to learn from a completion or a group. In training only this module decides it.

| where | what decides |
| --- | --- |
| `skip_zero_variance`, the filter `signal`, `groups/zero_variance` | a group has signal if its rewards before any shaper differ and a token that counts has an advantage |
| `Forward.zero_variance_B` | all scored rewards of the group are equal before any shaper, and all its advantages are 0 |
| compact updates | a row has signal if a token that counts has an advantage |

With hooks before the forward stage that `makes_signal`, only the advantages after the rollout stage decide the first
line. There is no threshold: the mean of equal numbers is exactly that number (`groups.group_mean`). TRL's own
advantages have rounding errors there, which are set to 0 (`rewards_are_equal`).
"""  # noqa: E501

from dataclasses import replace
from typing import Any

import torch

from ..types import AggregationDeclaration, Rollout
from .flow import expand_advantages, plugin_label
from .groups import group_extremes, group_is_equal, weighted_rewards


def has_signal(advantages: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """Whether each completion has an advantage, `(B,)` or `(B, T)`, on a token that counts; `(B,)`, bool."""
    return (expand_advantages(advantages, mask_B_T) != 0).any(dim=1)


def groups_have_signal(signal_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Whether any completion of each row's group has signal, `(N,)`, bool."""
    return group_extremes(signal_N.float(), groups_N)[1] > 0


def rewards_are_equal(
    rewards_N_K: torch.Tensor, weights_K: torch.Tensor, groups_N: torch.Tensor, multi_objective_aggregation: str
) -> torch.Tensor:
    """Where TRL's own advantages are 0 but for rounding, `(N,)`, bool: in groups with equal rewards.

    There TRL computes `(r - mean) / (0 + 1e-4)`, which magnifies the rounding error. The weighted sums must be equal
    under `sum_then_normalize`, each function's rewards under `normalize_then_sum`.
    """
    compared = [weighted_rewards(rewards_N_K, weights_K)]
    if multi_objective_aggregation == "normalize_then_sum":
        compared = list(rewards_N_K[:, weights_K != 0].unbind(dim=1))
    equal_N = torch.ones_like(groups_N, dtype=torch.bool)
    for values_N in compared:
        equal_N &= group_is_equal(values_N, groups_N)
    return equal_N


def signal_table(rollout: Rollout) -> torch.Tensor:
    """What decides about signal, per completion, `(B, 5)`, to be gathered over all ranks.

    Whether it has an advantage, whether its group's rewards are uninformative (-1 where only the advantages count), its
    group, live tokens and raw reward.
    """
    assert rollout.advantages_B_T is not None  # they decide
    has_B = has_signal(rollout.advantages_B_T, rollout.mask_B_T)
    silent_B = rollout.uninformative_B
    if silent_B is None:
        silent_B = torch.full_like(rollout.group_ids_B, -1)
    columns = [has_B, silent_B, rollout.group_ids_B, rollout.lengths_B, rollout.raw_rewards_B]
    return torch.stack([column.to(torch.float32) for column in columns], dim=1)


def signal_of(table_N_C: torch.Tensor) -> torch.Tensor:
    """Whether each completion's group has signal, `(N,)`, from the `signal_table` of all ranks."""
    return groups_have_signal((table_N_C[:, 0] > 0) & (table_N_C[:, 1] <= 0), _groups(table_N_C))


def zero_variance_of(table_N_C: torch.Tensor) -> torch.Tensor:
    """`Forward.zero_variance_B` of the completions of all ranks, `(N,)`, from their `signal_table`."""
    groups_N = _groups(table_N_C)
    return ~groups_have_signal(table_N_C[:, 0] > 0, groups_N) & group_is_equal(table_N_C[:, 4], groups_N)


def groups_of(table_N_C: torch.Tensor) -> torch.Tensor:
    """Which groups have signal, `(Q,)`, in the order of their ids, from the `signal_table` of all ranks."""
    groups_N = _groups(table_N_C)
    signal_Q = torch.zeros(int(groups_N.max()) + 1, dtype=torch.bool, device=groups_N.device)
    signal_Q[groups_N] = signal_of(table_N_C)
    return signal_Q


def with_signal_only(rollout: Rollout) -> Rollout:
    """The rollout as if groups without signal had not been sampled: with empty masks, and in no count."""
    table_N_C = rollout.gather(signal_table(rollout))
    signal_N = signal_of(table_N_C)
    return replace(
        rollout,
        mask_B_T=rollout.mask_B_T * signal_N[rollout.local_rows].unsqueeze(1),
        totals=replace(
            rollout.totals,
            tokens=round(float(table_N_C[signal_N, 3].double().sum())),
            sequences=int(signal_N.sum()),
            prompts=int(groups_of(table_N_C).sum()),
        ),
    )


def _groups(table_N_C: torch.Tensor) -> torch.Tensor:
    groups_N: torch.Tensor = torch.unique(table_N_C[:, 2].long(), return_inverse=True)[1]
    return groups_N


class SkipZeroVariance:
    """An aggregation by weights that ignores groups without signal: their tokens get weight 0, also in a KL penalty."""

    def __init__(self, aggregation: Any) -> None:
        self.aggregation = aggregation
        self.declares = AggregationDeclaration.of(aggregation)
        self.__name__ = f"{plugin_label(aggregation)}, skip_zero_variance"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`."""
        weights_B_T: torch.Tensor = self.aggregation.weights(with_signal_only(rollout))
        return weights_B_T
