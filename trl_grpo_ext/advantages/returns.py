"""Sums over a completion's future live tokens, and the estimator that uses them.

A live token is one on the loss mask. A tool's tokens are neither in the sums nor in the distances.
"""

from __future__ import annotations

import torch

from ..credit.groups import compute_dtype, gather_rewards, group_mean
from ..errors import ConfigurationError
from ..guard.parameters import Checked, number
from ..types import HookDeclaration, Rollout


class GroupMeanGAE(Checked):
    """GAE without a critic: every live token's value is the mean reward `μ` of the completion's group.

    With the reward `R` at the completion's last live token `L` and the value 0 after it,

    - `δ_t = γ·μ - μ` for `t < L`, and `δ_L = R - μ`,
    - `A_t = Σ_{s≥t} (γλ)^(s-t) δ_s`,

    where `s-t` counts live tokens. So the credit for the outcome fades with the distance to the end, as fast as λ says:
    λ = 0.95 leaves 0.6 % of it after 100 tokens. With `length_alpha` each completion has its own `λ = max(1 - 1/(α·l),
    0)` for its `l` live tokens, so the credit fades over the same share of any completion.

    Source: Generalized Advantage Estimation (1506.02438); the λ by length is VAPO's (2504.05118), whose α is 0.05.
    Departures: the value is the group's mean for every token instead of a learnt function of the prefix. VAPO's λ would
    be negative below 1/α tokens and is 0 there. A completion without a reward gets 0 and is not in the mean.

    Args:
        gamma: γ, discount per token, in (0, 1].
        gae_lambda: λ, in [0, 1].
        length_alpha: α, positive, in place of `gae_lambda`. None means the same λ for all.
    """

    __name__ = "group_mean_gae"
    declares = HookDeclaration(role="estimator", independent=True)
    gamma: float = number(1.0, "above 0 and at most 1", lambda x: 0 < x <= 1)
    gae_lambda: float = number(0.95, "from 0 to 1", lambda x: 0 <= x <= 1)
    length_alpha: float | None = number(None, "a positive number", lambda x: x > 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length_alpha is not None and self.gae_lambda != 0.95:
            raise ConfigurationError("group_mean_gae: gae_lambda has no effect with length_alpha; give one of them.")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        live_B_T = rollout.mask_B_T > 0
        rewards_N, groups_N = gather_rewards(rollout)
        rewards_B = rewards_N[rollout.local_rows]
        means_B = group_mean(rewards_N, groups_N)[rollout.local_rows]
        lambda_: float | torch.Tensor = self.gae_lambda
        if self.length_alpha is not None:  # each completion's own, (B, 1)
            lengths_B_1 = live_B_T.sum(dim=1, keepdim=True).clamp(min=1).to(rewards_B.dtype)
            lambda_ = (1 - 1 / (self.length_alpha * lengths_B_1)).clamp(min=0)
        return group_mean_gae(rewards_B, means_B, live_B_T, self.gamma, lambda_).to(advantages_B_T.dtype)


def group_mean_gae(
    rewards_B: torch.Tensor,
    means_B: torch.Tensor,
    live_B_T: torch.Tensor,
    gamma: float = 1.0,
    gae_lambda: float | torch.Tensor = 0.95,
) -> torch.Tensor:
    """GAE (1506.02438) with the group's mean reward `means_B` as every live token's value, `(B, T)`.

    `gae_lambda` is one number, or `(B, 1)`. NaN rewards get 0. A reward that is the mean gets exactly 0 if γ is 1.
    """
    scored_B = ~torch.isnan(rewards_B)
    at_the_end_B = torch.where(scored_B, rewards_B - means_B, 0.0)
    on_the_way_B = (gamma - 1) * torch.where(scored_B, means_B, 0.0)
    last_B_T = live_tokens_after(live_B_T) == 0
    deltas_B_T = torch.where(last_B_T, at_the_end_B.unsqueeze(1), on_the_way_B.unsqueeze(1))
    return discounted_returns(deltas_B_T, live_B_T, gamma * gae_lambda)


def discounted_returns(values_B_T: torch.Tensor, live_B_T: torch.Tensor, gamma: float | torch.Tensor) -> torch.Tensor:
    """Return-to-go `G_t = Σ_{s≥t} γ^(s-t) v_s` over live tokens, where `s-t` counts live tokens."""
    zero = torch.zeros((), dtype=compute_dtype(values_B_T.dtype), device=values_B_T.device)
    live_first_B_T = live_tokens_first(live_B_T)
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


def live_tokens_first(live_B_T: torch.Tensor) -> torch.Tensor:
    """The indices of a completion's tokens, live ones first and in order, `(B, T)`, integer."""
    return (~live_B_T).to(torch.uint8).argsort(dim=1, stable=True)


def live_tokens_after(live_B_T: torch.Tensor) -> torch.Tensor:
    """How many live tokens of the completion follow each token, `(B, T)`, integer; 0 at the last live one."""
    return live_B_T.sum(dim=1, keepdim=True) - live_B_T.cumsum(dim=1)
