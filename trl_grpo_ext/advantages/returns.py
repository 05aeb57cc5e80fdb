"""Sums over what is still to come in a completion, counted in live tokens, and the hook that is such a sum.

A live token is one on the loss mask. What a tool wrote in between is neither in the sums nor in the distances.
"""

from __future__ import annotations

import torch

from ..guard.parameters import checked_number
from ..types import Rollout


class GroupMeanGAE:
    """GAE without a critic: every live token's value is the mean reward `μ` of the completion's group.

    With the reward `R` at the completion's last live token `L` and the value 0 behind it,

    - `δ_t = γ·μ - μ` for `t < L`, and `δ_L = R - μ`,
    - `A_t = Σ_{s≥t} (γλ)^(s-t) δ_s`,

    where `s-t` counts live tokens. So the credit for the outcome fades with the distance to the end: λ says how fast.
    With γ = λ = 1 every token gets `R - μ`. It replaces the advantages that come in.

    Source: Generalized Advantage Estimation (1506.02438).

    Departures: the value is the group's mean for every token instead of a learnt function of the prefix. A completion
    that no reward function scored gets advantage 0 and is not in the mean.

    Args:
        gamma: γ, discount per token, in (0, 1].
        gae_lambda: λ, in [0, 1].

    Raises:
        ConfigurationError: A parameter is out of its range.
    """

    __name__ = "group_mean_gae"
    role = "estimator"

    def __init__(self, *, gamma: float = 1.0, gae_lambda: float = 0.95) -> None:
        self.gamma = checked_number("group_mean_gae: gamma", gamma, "above 0 and at most 1", lambda x: 0 < x <= 1)
        self.gae_lambda = checked_number(
            "group_mean_gae: gae_lambda", gae_lambda, "a number from 0 to 1", lambda x: 0 <= x <= 1
        )

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        live_B_T = rollout.mask_B_T > 0
        dtype = wide(rollout.rewards_B.dtype)
        scored_B = ~torch.isnan(rollout.rewards_B)
        rewards_B = torch.where(scored_B, rollout.rewards_B, 0.0).to(dtype)
        means_B = torch.where(scored_B, rollout.group_baselines_B, 0.0).to(dtype)
        last_B_T = live_tokens_behind(live_B_T) == 0
        on_the_way_B = (self.gamma - 1) * means_B
        deltas_B_T = torch.where(last_B_T, (rewards_B - means_B).unsqueeze(1), on_the_way_B.unsqueeze(1))
        new_B_T = discounted_returns(deltas_B_T, live_B_T, self.gamma * self.gae_lambda)
        return new_B_T.to(advantages_B_T.dtype)


def discounted_returns(values_B_T: torch.Tensor, live_B_T: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return-to-go `G_t = Σ_{s≥t} γ^(s-t) v_s` over live tokens, where `s-t` counts live tokens.

    Args:
        values_B_T: `v`; ignored off the live tokens, whatever stands there.
        live_B_T: Which tokens are live, bool.
        gamma: γ, in [0, 1].

    Returns:
        `(B, T)`, zero off the live tokens, in float32 or the wider dtype of `values_B_T`.
    """
    zero = torch.zeros((), dtype=wide(values_B_T.dtype), device=values_B_T.device)
    live_first_B_T = (~live_B_T).to(torch.uint8).argsort(dim=1, stable=True)
    returns_B_T = torch.where(live_B_T, values_B_T.to(zero.dtype), zero).gather(1, live_first_B_T)
    # By doubling: before a round each entry sums `reach` tokens, after it twice as many. log2(T) rounds, no powers that
    # overflow, and every term is only ever added, so padding changes no bit.
    reach = 1
    while reach < returns_B_T.size(1):
        further_B_T = torch.zeros_like(returns_B_T)
        further_B_T[:, :-reach] = gamma**reach * returns_B_T[:, reach:]
        returns_B_T = returns_B_T + further_B_T
        reach *= 2
    in_place_B_T = torch.zeros_like(returns_B_T).scatter(1, live_first_B_T, returns_B_T)
    return torch.where(live_B_T, in_place_B_T, zero)


def live_tokens_behind(live_B_T: torch.Tensor) -> torch.Tensor:
    """How many live tokens of the completion follow each token, `(B, T)`, integer; 0 at the last live one."""
    return live_B_T.sum(dim=1, keepdim=True) - live_B_T.cumsum(dim=1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 or, where it is wider, `dtype`."""
    return torch.promote_types(dtype, torch.float32)
