"""Signal: whether there is anything to learn from a completion. Only this module decides it.

A completion has signal if its advantage after the rollout stage of the hooks is not exactly 0 on every token that
counts; a group has signal if one of its completions has. `groups/zero_variance`, `Forward.zero_variance_B`,
`skip_zero_variance` and compact updates use this. There is no threshold: estimators give exact zeros if a group's
rewards are equal, because the mean of equal numbers is exactly that number (`groups.group_mean`). TRL's own advantages
have rounding errors there; with hooks, an aggregation or compact updates they are set to 0 (`rewards_are_equal`).

Tokens without signal have no policy gradient, yet they enlarge the denominator of a mean and so make every other token
count less. `skip_zero_variance: true` on any aggregation by weights leaves out groups without signal:

    loss_aggregation: {name: token_mean, skip_zero_variance: true}
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..types import Rollout
from .flow import expand_advantages, plugin_label
from .groups import group_extremes, group_is_equal, weighted_rewards


def has_signal(advantages: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """Whether each completion has signal, `(B,)`, bool.

    Args:
        advantages: `(B,)` or `(B, T)`.
        mask_B_T: Where tokens count, not 0.
    """
    return (expand_advantages(advantages, mask_B_T) != 0).any(dim=1)


def groups_have_signal(signal_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Whether each completion's group has signal, `(N,)`, bool.

    Args:
        signal_N: Whether each completion of all ranks has, bool.
        groups_N: Groups, numbered from 0.
    """
    _, highest_N = group_extremes(signal_N.float(), groups_N)
    return highest_N > 0


def rewards_are_equal(
    rewards_N_K: torch.Tensor, weights_K: torch.Tensor, groups_N: torch.Tensor, multi_objective_aggregation: str
) -> torch.Tensor:
    """Where TRL's own advantages are 0 but for rounding, `(N,)`, bool: in groups with equal rewards.

    There TRL computes `(r - mean) / (0 + 1e-4)`, which magnifies the rounding error ten thousand times. TRL's setting
    decides what must be equal: the weighted sums under `sum_then_normalize`, each function's rewards under
    `normalize_then_sum`, where different rewards with equal sums still have advantages.

    Args:
        rewards_N_K: Each function's rewards, of all ranks; NaN for none.
        weights_K: Weights.
        groups_N: Groups, numbered from 0.
        multi_objective_aggregation: TRL's setting.
    """
    if multi_objective_aggregation == "normalize_then_sum":
        compared = list(rewards_N_K[:, weights_K != 0].unbind(dim=1))
    else:
        compared = [weighted_rewards(rewards_N_K, weights_K)]
    equal_N = torch.ones_like(groups_N, dtype=torch.bool)
    for values_N in compared:
        equal_N &= group_is_equal(values_N, groups_N)
    return equal_N


def signal_table(rollout: Rollout) -> torch.Tensor:
    """What decides about signal, per completion, `(B, 3)`: whether it has signal, its group, its live tokens.

    Raises:
        ValueError: `rollout.advantages_B_T` is None.
    """
    if rollout.advantages_B_T is None:
        raise ValueError("Signal is decided by the advantages, and rollout.advantages_B_T is None.")
    columns = [has_signal(rollout.advantages_B_T, rollout.mask_B_T), rollout.group_ids_B, rollout.lengths_B]
    return torch.stack([column.to(torch.float32) for column in columns], dim=1)


def signal_of(table_N_C: torch.Tensor) -> torch.Tensor:
    """Whether each completion's group has signal, `(N,)`, from the `signal_table` of all ranks."""
    groups_N = torch.unique(table_N_C[:, 1].long(), return_inverse=True)[1]
    return groups_have_signal(table_N_C[:, 0] > 0, groups_N)


def groups_of(table_N_C: torch.Tensor) -> torch.Tensor:
    """Which groups have signal, `(Q,)`, in the order of their ids, from the `signal_table` of all ranks."""
    ids_N = table_N_C[:, 1].long()
    signal_Q = torch.zeros(int(ids_N.max()) + 1, dtype=torch.bool, device=ids_N.device)
    signal_Q[ids_N] = signal_of(table_N_C)
    return signal_Q[torch.unique(ids_N)]  # a number may be left out


def share_without_signal(table_N_C: torch.Tensor) -> float:
    """Share of groups without signal, from the `signal_table` of all ranks."""
    return 1.0 - float(groups_of(table_N_C).double().mean())


def with_signal_only(rollout: Rollout) -> Rollout:
    """The rollout as if groups without signal had not been sampled: with empty masks, and in no count."""
    table_N_C = rollout.gather(signal_table(rollout))
    signal_N = signal_of(table_N_C)
    return replace(
        rollout,
        mask_B_T=rollout.mask_B_T * signal_N[rollout.local_rows].unsqueeze(1),
        totals=replace(
            rollout.totals,
            tokens=round(float(table_N_C[signal_N, 2].double().sum())),
            sequences=int(signal_N.sum()),
            prompts=int(groups_of(table_N_C).sum()),
        ),
    )


class SkipZeroVariance:
    """An aggregation by weights that ignores groups without signal. Their tokens get weight 0.

    A KL penalty on those tokens vanishes too. Forward hooks run too late to count, so hooks that give such groups
    advantages (`makes_signal`) cannot be combined with it.

    Args:
        aggregation: An object with `weights`.
    """

    skips_zero_variance = True

    def __init__(self, aggregation: Any) -> None:
        self.aggregation = aggregation
        self.per_step = getattr(aggregation, "per_step", False)
        self.__name__ = f"{plugin_label(aggregation)}, skip_zero_variance"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`."""
        weights_B_T: torch.Tensor = self.aggregation.weights(with_signal_only(rollout))
        return weights_B_T
