"""Token credit from the tree that a group's completions form."""

from __future__ import annotations

import torch

from ..credit.groups import compute_dtype, groups_with_prefixes
from ..guard.parameters import Checked, choice
from ..types import HookDeclaration, Rollout
from .returns import live_tokens_after


class PrefixTree(Checked):
    """Credit a token with the change that it makes to the mean reward of its prefix: `A_t = V(o_≤t) - V(o_<t)`.

    `V` of a prefix is the mean reward of the group's completions that begin with it, after a completion's last token
    its own reward. Tokens where no completion of the group branches off get 0, and a completion's advantages sum to `r
    - μ`. Prefixes include all completion tokens, whoever wrote them, but only live tokens get credit: a change at a
    tool's tokens is added to the next live token, or to the last one. It suits groups that share beginnings: low
    temperatures, templates.

    Source: TEMPO (2509.18314), which adds this temporal-difference term to GRPO's advantage (mode "add").
    Departures: in mode "replace" the term stands alone. As in the paper it is in units of the reward, while TRL's own
    advantages are in standard deviations of the group. Completions without a reward get 0 ("add": keep the incoming
    advantages) and are in no mean.

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
