"""Groups without signal: every completion got the same reward, so nothing in the group says what was better.

Their tokens have no policy gradient, yet they stand in the denominator of a mean and make every other token count less.
`skip_zero_variance: true` beside any aggregation by weights leaves them out of it:

    loss_aggregation: {name: token_mean, skip_zero_variance: true}
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..types import Rollout
from .groups import group_extremes, rewards_differ

ROUNDING = 1e-3
"""Advantages up to this size, on the same scale, are what rounding leaves of zero: TRL divides by a std of 0 + 1e-4."""


def groups_have_signal(
    rewards_N: torch.Tensor, largest_advantages_N: torch.Tensor, group_ids_N: torch.Tensor
) -> torch.Tensor:
    """Which groups give a gradient.

    A group has signal if its rewards differ, or if hooks gave some token of it an advantage all the same (a KL term in
    the reward, a teacher).

    Args:
        rewards_N: Rewards of all ranks' completions; NaN, where no function gave one, is left out.
        largest_advantages_N: The largest |A| of each completion's live tokens.
        group_ids_N: `0` to `Q - 1`.

    Returns:
        `(Q,)`, bool.
    """
    groups_N = torch.unique(group_ids_N, return_inverse=True)[1]  # a number may be left out
    _, largest_reward_N = group_extremes(rewards_N.abs(), groups_N)
    scale_N = largest_reward_N.nan_to_num(nan=1.0).clamp(min=1.0)
    _, largest_advantage_N = group_extremes(largest_advantages_N, groups_N)
    signal_N = rewards_differ(rewards_N, groups_N) | (largest_advantage_N > ROUNDING * scale_N)
    signal_Q = signal_N.new_zeros(int(group_ids_N.max()) + 1)
    signal_Q[group_ids_N] = signal_N
    return signal_Q


def signal_table(rollout: Rollout) -> torch.Tensor:
    """What decides about signal, of each completion, `(B, 4)`: reward, largest |A|, group, live tokens.

    Raises:
        ValueError: `rollout.advantages_B_T` is None.
    """
    if rollout.advantages_B_T is None:
        raise ValueError("Signal is decided by the advantages, and rollout.advantages_B_T is None.")
    largest_B = (rollout.advantages_B_T * rollout.mask_B_T).abs().amax(dim=1)
    columns = [rollout.rewards_B, largest_B, rollout.group_ids_B, rollout.lengths_B]
    return torch.stack([column.to(torch.float32) for column in columns], dim=1)


def signal_of(table_N_C: torch.Tensor) -> torch.Tensor:
    """Which groups have signal, `(Q,)`, from the `signal_table` of all ranks."""
    return groups_have_signal(table_N_C[:, 0], table_N_C[:, 1], table_N_C[:, 2].long())


def share_without_signal(table_N_C: torch.Tensor) -> float:
    """Share of the groups that are without signal, from the `signal_table` of all ranks."""
    return 1.0 - float(signal_of(table_N_C).float().mean())


def with_signal_only(rollout: Rollout) -> Rollout:
    """The rollout as if groups without signal had never been sampled: their masks are empty, and no count has them."""
    table_N_C = rollout.gather(signal_table(rollout))
    signal_Q = signal_of(table_N_C)
    signal_N = signal_Q[table_N_C[:, 2].long()]
    return replace(
        rollout,
        mask_B_T=rollout.mask_B_T * signal_N[rollout.local_rows].unsqueeze(1),
        totals=replace(
            rollout.totals,
            tokens=round(float(table_N_C[signal_N, 3].double().sum())),
            sequences=int(signal_N.sum()),
            prompts=int(signal_Q.sum()),
        ),
    )


class SkipZeroVariance:
    """An aggregation by weights that does not see groups without signal. Their tokens get weight 0.

    A KL penalty on those tokens goes with them. What a hook does at the loss forward is not known yet and not counted.

    Args:
        aggregation: An object with `weights`.
    """

    def __init__(self, aggregation: Any) -> None:
        self.aggregation = aggregation
        self.per_step = getattr(aggregation, "per_step", False)
        self.__name__ = f"{getattr(aggregation, '__name__', type(aggregation).__name__)}, skip_zero_variance"

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`."""
        weights_B_T: torch.Tensor = self.aggregation.weights(with_signal_only(rollout))
        return weights_B_T
