"""Sums over a completion's past or future live tokens, and the estimators that use them.

A live token is one on the loss mask. A tool's tokens are neither in the sums nor in the distances.
"""

from __future__ import annotations

import torch

from ..credit.groups import gather_rewards, group_extremes, group_mean
from ..errors import ConfigurationError
from ..guard.parameters import checked_number
from ..types import Rollout


class GroupMeanGAE:
    """GAE without a critic: every live token's value is the mean reward `μ` of the completion's group.

    With the reward `R` at the completion's last live token `L` and the value 0 after it,

    - `δ_t = γ·μ - μ` for `t < L`, and `δ_L = R - μ`,
    - `A_t = Σ_{s≥t} (γλ)^(s-t) δ_s`,

    where `s-t` counts live tokens. So the credit for the outcome fades with the distance to the end, as fast as λ says.
    With γ = λ = 1 every token gets `R - μ`. In a group of equal rewards all get exactly 0 if γ is 1.

    With one λ for all, the beginning of a long completion gets no credit: λ = 0.95 leaves 0.6 % of it after 100 tokens.
    With `length_alpha` each completion has its own `λ = max(1 - 1/(α·l), 0)` for its `l` live tokens, so the credit
    fades over the same share of any completion.

    Source: Generalized Advantage Estimation (1506.02438); the λ by length is VAPO's (2504.05118), whose α is 0.05.

    Departures: the value is the group's mean for every token instead of a learnt function of the prefix, where VAPO has
    a critic. Its λ would be negative below 1/α tokens and is 0 there. A completion without a reward gets
    advantage 0 and is not in the mean.

    Args:
        gamma: γ, discount per token, in (0, 1].
        gae_lambda: λ, in [0, 1].
        length_alpha: α, positive, in place of `gae_lambda`. None means the same λ for all.
    """

    __name__ = "group_mean_gae"
    role = "estimator"
    per_group = True

    def __init__(self, *, gamma: float = 1.0, gae_lambda: float = 0.95, length_alpha: float | None = None) -> None:
        self.gamma = checked_number("group_mean_gae: gamma", gamma, "above 0 and at most 1", lambda x: 0 < x <= 1)
        self.gae_lambda = checked_number("group_mean_gae: gae_lambda", gae_lambda, "from 0 to 1", lambda x: 0 <= x <= 1)
        self.length_alpha = length_alpha
        if length_alpha is not None:
            checked_number("group_mean_gae: length_alpha", length_alpha, "a positive number", lambda x: x > 0)
            if gae_lambda != 0.95:
                raise ConfigurationError(
                    f"group_mean_gae: gae_lambda={gae_lambda!r} has no effect with length_alpha={length_alpha!r}."
                )

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        live_B_T = rollout.mask_B_T > 0
        rewards_N, groups_N = gather_rewards(rollout)
        scored_N = ~torch.isnan(rewards_N)
        means_N = group_mean(rewards_N, groups_N)  # equal rewards are their mean, to the last bit
        at_the_end_B, means_B = (
            torch.where(scored_N, values_N, 0.0)[rollout.local_rows] for values_N in (rewards_N - means_N, means_N)
        )
        last_B_T = live_tokens_after(live_B_T) == 0
        on_the_way_B = (self.gamma - 1) * means_B
        deltas_B_T = torch.where(last_B_T, at_the_end_B.unsqueeze(1), on_the_way_B.unsqueeze(1))
        new_B_T = discounted_returns(deltas_B_T, live_B_T, self.gamma * self._lambda(live_B_T, deltas_B_T.dtype))
        return new_B_T.to(advantages_B_T.dtype)

    def _lambda(self, live_B_T: torch.Tensor, dtype: torch.dtype) -> float | torch.Tensor:
        """The λ of all completions, or each one's, `(B, 1)`."""
        if self.length_alpha is None:
            return self.gae_lambda
        lengths_B_1 = live_B_T.sum(dim=1, keepdim=True).clamp(min=1).to(dtype)
        return (1 - 1 / (self.length_alpha * lengths_B_1)).clamp(min=0)


class OptimalTokenBaseline:
    """A completion's reward minus a baseline for each token: `A_{i,t} = r_i - Σ_j W_{j,t} r_j / Σ_j W_{j,t}`.

    The sums run over the group's scored completions that have a `t`-th live token. `W_{j,t} = Σ_{s≤t} (1 - π_s)`
    measures how much completion j has left to chance so far, with `π_s` the probability of its s-th live token under
    the policy that generated. This baseline has the least variance for each token if the squared norms of the tokens'
    gradients add up to W. The longest completion's tokens beyond all others get 0, because there is nothing to compare
    them with. It needs the old policy's log-probabilities, which cost a forward pass if TRL does not compute them.

    Source: The Optimal Token Baseline (2602.07078), `optimal_token_baseline` of verl, where the squared norm of token
    s is taken as that of its gradient in the logits, `1 - 2π_s + Σ_v π_v²`.

    Departures: `Σ_v π_v²`, over the whole vocabulary, is not among what TRL's forward pass returns. It is the
    expectation of the sampled token's own `π_s`, which stands for it here, so `1 - π_s` has the expectation of the
    authors' term, and the variance of one sample. Tokens are counted by live ones, and not by place. No importance
    weights of the sampler are in W. A completion without a reward gets advantage 0 and is in no baseline.
    Where every W is 0, the baseline is the mean.
    """

    __name__ = "optimal_token_baseline"
    role = "estimator"
    per_group = True
    needs = ("old_logps",)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        if rollout.old_logps_B_T is None:
            raise ConfigurationError("optimal_token_baseline: rollout.old_logps_B_T must be given, got None.")
        rewards_N, groups_N = gather_rewards(rollout)
        live_B_T = rollout.mask_B_T > 0
        order_B_T = live_tokens_first(live_B_T)
        left_to_chance_B_T = -torch.expm1(rollout.old_logps_B_T.to(rewards_N.dtype)).clamp(max=0.0)
        energies_B_S = torch.where(live_B_T, left_to_chance_B_T, 0.0).gather(1, order_B_T).cumsum(dim=1)
        energies_N_S = rollout.gather(energies_B_S)
        lengths_N = rollout.gather(live_B_T.sum(dim=1))
        steps_S = torch.arange(energies_N_S.size(1), device=lengths_N.device)
        scored_N_1 = ~torch.isnan(rewards_N).unsqueeze(1)
        present_N_S = ((steps_S < lengths_N.unsqueeze(1)) & scored_N_1).to(rewards_N.dtype)

        counts_N_S = column_sums(present_N_S, groups_N)
        energy_N_S = column_sums(present_N_S * energies_N_S, groups_N)
        weights_N_S = torch.where(energy_N_S > 0, energies_N_S, 1.0) * present_N_S
        # Above the group's lowest reward, so that equal rewards are their own baseline to the last bit.
        lowest_N, _ = group_extremes(rewards_N, groups_N)
        above_N_1 = (rewards_N - lowest_N).nan_to_num(nan=0.0).unsqueeze(1)
        weighted_N_S = column_sums(weights_N_S * above_N_1, groups_N)
        sums_N_S = column_sums(weights_N_S, groups_N)
        baselines_N_S = weighted_N_S / torch.where(sums_N_S > 0, sums_N_S, 1.0)  # 0 only where no completion is as long
        apart_N_S = torch.where((present_N_S > 0) & (counts_N_S > 1), above_N_1 - baselines_N_S, 0.0)
        apart_B_S = apart_N_S[rollout.local_rows, : order_B_T.size(1)]
        return torch.zeros_like(apart_B_S).scatter(1, order_B_T, apart_B_S).to(advantages_B_T.dtype)


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


def column_sums(table_N_S: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Each row's group's sum in every column, `(N, S)`."""
    return torch.zeros_like(table_N_S).index_add(0, groups_N, table_N_S)[groups_N]


def live_tokens_first(live_B_T: torch.Tensor) -> torch.Tensor:
    """The indices of a completion's tokens, live ones first and in order, `(B, T)`, integer."""
    return (~live_B_T).to(torch.uint8).argsort(dim=1, stable=True)


def live_tokens_after(live_B_T: torch.Tensor) -> torch.Tensor:
    """How many live tokens of the completion follow each token, `(B, T)`, integer; 0 at the last live one."""
    return live_B_T.sum(dim=1, keepdim=True) - live_B_T.cumsum(dim=1)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 or, where it is wider, `dtype`."""
    return torch.promote_types(dtype, torch.float32)
