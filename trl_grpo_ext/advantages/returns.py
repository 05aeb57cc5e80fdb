"""Credit by the place of a token: sums over a completion's future live tokens, and the tree of a group's prefixes.

A live token is one on the loss mask. A tool's tokens are neither in the sums nor in the distances.
"""

import torch

from ..credit.groups import compute_dtype, gather_rewards, group_mean, groups_with_prefixes
from ..errors import ConfigurationError
from ..guard.parameters import Checked, choice, number
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


class PrefixTree(Checked):
    """Credit a token with the change that it makes to the mean reward of its prefix: `A_t = V(o_≤t) - V(o_<t)`.

    `V` of a prefix is the mean reward of the group's completions that begin with it, after a completion's last token
    its own reward. Tokens where no completion of the group branches off get 0, and a completion's advantages sum to `r
    - μ`. Prefixes include all completion tokens, whoever wrote them, but only live tokens get credit: a change at a
    tool's tokens is added to the next live token, or to the last one. It suits groups that share beginnings.

    Source: TEMPO (2509.18314), which adds this temporal-difference term to GRPO's advantage (mode "add").
    Departures: in mode "replace" the term stands alone. As in the paper it is in units of the reward, while TRL's own
    advantages are in standard deviations of the group. Completions without a reward get 0 (or keep theirs).

    Args:
        mode: "replace" the incoming advantages, or "add" to them.
    """

    __name__ = "prefix_tree"
    mode: str = choice("replace", "add")

    def __post_init__(self) -> None:
        super().__post_init__()
        role = "estimator" if self.mode == "replace" else "transform"
        self.declares = HookDeclaration(role=role, independent=True)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        rewards_N = rollout.gather(rollout.rewards_B)
        live_B_T = rollout.mask_B_T > 0
        new_B_T = torch.zeros(live_B_T.shape, dtype=compute_dtype(rewards_N.dtype), device=rewards_N.device)
        for rows_B, members_N, shared_b_G in groups_with_prefixes(rollout):
            gaps_b_T = value_gaps(shared_b_G, rollout.rewards_B[rows_B], rewards_N[members_N], live_B_T.size(1))
            new_B_T[rows_B] = credit_of_live_tokens(gaps_b_T.to(new_B_T.dtype), live_B_T[rows_B])
        return (advantages_B_T + new_B_T if self.mode == "add" else new_B_T).to(advantages_B_T.dtype)


def value_gaps(shared_b_G: torch.Tensor, rewards_b: torch.Tensor, rewards_G: torch.Tensor, width: int) -> torch.Tensor:
    """`(b, T+1)`: at `t` the value of the first `t` tokens minus the completion's reward; 0 where it has none."""
    scored_b_G = (~torch.isnan(rewards_b)).unsqueeze(1) & ~torch.isnan(rewards_G)
    # Differences of rewards and not rewards: where all who share a prefix got the same, the gap is 0 to the bit.
    apart_b_G = torch.where(scored_b_G, rewards_G - rewards_b.unsqueeze(1), 0.0)

    sums_b_T = apart_b_G.new_zeros(len(apart_b_G), width + 1)
    counts_b_T = torch.zeros_like(sums_b_T)
    prefix_T = torch.arange(width + 1, device=shared_b_G.device)
    # One member after the other, so that the sum is the same to the bit wherever the same members share a prefix.
    for shared_b, apart_b, scored_b in zip(shared_b_G.T, apart_b_G.T, scored_b_G.T, strict=True):
        shares_b_T = (prefix_T <= shared_b.unsqueeze(1)) & scored_b.unsqueeze(1)
        sums_b_T += torch.where(shares_b_T, apart_b.unsqueeze(1), 0.0)
        counts_b_T += shares_b_T
    return sums_b_T / counts_b_T.clamp(min=1)


def credit_of_live_tokens(gaps_b_T: torch.Tensor, live_b_T: torch.Tensor) -> torch.Tensor:
    """How each live token closes the gap between the group's mean and the completion's reward; garbage elsewhere."""
    width = live_b_T.size(1)
    after_each_T = torch.arange(1, width + 1, device=live_b_T.device)
    last_live_b_T = torch.where(live_b_T, after_each_T, 0).cummax(dim=1).values
    start_b_T = torch.cat([torch.zeros_like(last_live_b_T[:, :1]), last_live_b_T[:, :-1]], dim=1)
    after_b_T = torch.where(live_tokens_after(live_b_T) == 0, 0.0, gaps_b_T[:, 1:])
    return after_b_T - gaps_b_T.gather(1, start_b_T)
