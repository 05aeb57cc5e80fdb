"""Estimators: from the rewards of a group to one advantage for each completion, the same on all of its tokens.

The mathematics are functions of arrays: rewards `(N,)`, NaN where a completion has none, and groups `(N,)`, whole
numbers from 0 to `N - 1`, to advantages `(N,)`. A completion without a reward gets 0 and is left out of all statistics.
In a group of equal rewards every difference from the mean is exactly 0.

    leave_one_out(torch.tensor([1.0, 0.0, 0.0, 3.0]), torch.tensor([0, 0, 0, 0]))  # 0, -4/3, -4/3, 8/3

The hooks hand over the rewards and groups of all ranks. A chain has at most one estimator; it runs before every
transform, on the shaped rewards, and its advantages replace TRL's.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import field

import torch

from ..credit.groups import gather_rewards, group_apart, group_count, group_extremes, group_mean, group_std, group_sum
from ..errors import PluginOutputError
from ..guard.parameters import Checked, checked_choice, choice, number, text, whole
from ..types import HookDeclaration, Rollout


def _where_scored(advantages_N: torch.Tensor, rewards_N: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(rewards_N), 0.0, advantages_N)


def raw_reward(rewards_N: torch.Tensor) -> torch.Tensor:
    """`A_i = r_i`, as in REINFORCE without a baseline (Williams, 1992)."""
    return _where_scored(rewards_N, rewards_N)


def centred(rewards_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """`A_i = r_i - μ` with the group's mean μ, as in Dr. GRPO (2503.20783)."""
    return group_apart(rewards_N, groups_N)


def normalised(
    rewards_N: torch.Tensor, groups_N: torch.Tensor, epsilon: float = 1e-4, std_floor: float = 0.0, std: str = "sample"
) -> torch.Tensor:
    """`A_i = (r_i - μ) / (max(σ, std_floor) + ε)`, GRPO (2402.03300); `std` is "sample" (n - 1) or "population" (n)."""
    stds_N = group_std(rewards_N, groups_N)
    if std == "population":
        counts_N = group_count(rewards_N, groups_N).clamp(min=1)
        stds_N = stds_N * ((counts_N - 1) / counts_N).sqrt()
    apart_N = rewards_N - group_mean(rewards_N, groups_N)
    return _where_scored(apart_N / (stds_N.clamp(min=std_floor) + epsilon), rewards_N)


def max_only(rewards_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """`A_i = r_i` where `r_i` is the group's highest reward, else 0 (CS336, 2025, lecture 17)."""
    _, highest_N = group_extremes(rewards_N, groups_N)
    return torch.where(rewards_N == highest_N, rewards_N, 0.0)


def leave_one_out(rewards_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """`A_i = r_i - mean_{j≠i} r_j` in the group, RLOO (2402.14740), eq. 6; 0 for a group's only scored completion."""
    counts_N = group_count(rewards_N, groups_N)
    # Of n rewards with the mean μ, r minus the mean of the n - 1 others is n/(n - 1) · (r - μ).
    return group_apart(rewards_N, groups_N) * counts_N / (counts_N - 1).clamp(min=1)


def batch_whitening(
    rewards_N: torch.Tensor, groups_N: torch.Tensor, baseline: str = "group", std_floor: float = 0.1
) -> torch.Tensor:
    """`A_i = (r_i - b_i) / max(σ, std_floor)`, σ over the batch, b of "group" or "batch"; REINFORCE++ (2501.03262)."""
    batch_N = torch.zeros_like(groups_N)  # one group of all
    apart_N = rewards_N - group_mean(rewards_N, groups_N if baseline == "group" else batch_N)
    return _where_scored(apart_N / group_std(apart_N, batch_N).clamp(min=std_floor), rewards_N)


def decoupled_normalisation(
    rewards_N_K: torch.Tensor, weights_K: torch.Tensor, groups_N: torch.Tensor, epsilon: float = 1e-4
) -> torch.Tensor:
    """`A_i = s_i / (σ + ε)` with `s_i = Σ_k w_k·(r_ik - μ_k)/(σ_k + ε)`, σ over the batch, GDPO (2601.05242)."""
    sums_N = torch.zeros_like(rewards_N_K[:, 0])
    for weight, of_one_N in zip(weights_K.tolist(), rewards_N_K.unbind(dim=1), strict=True):
        sums_N += weight * group_apart(of_one_N, groups_N, epsilon)
    nobody_N = torch.isnan(rewards_N_K).all(dim=1)
    scored_N = sums_N.masked_fill(nobody_N, torch.nan)
    return torch.where(nobody_N, 0.0, sums_N / (group_std(scored_N, torch.zeros_like(groups_N)) + epsilon))


def optimal_baseline(rewards_N: torch.Tensor, groups_N: torch.Tensor, lengths_N: torch.Tensor) -> torch.Tensor:
    """`A_i = r_i - Σ_j L_j r_j / Σ_j L_j` in the group, OPO (2505.23585); the mean where all lengths are 0."""
    # Lengths of unscored completions do not count, so that a group may be left without any.
    has_tokens_N = group_sum(torch.where(torch.isnan(rewards_N), 0.0, lengths_N), groups_N) > 0
    weights_N = torch.where(has_tokens_N, lengths_N, 1.0)
    return _where_scored(rewards_N - group_mean(rewards_N, groups_N, weights_N), rewards_N)


def mean_relative(rewards_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """`A_i = (r_i - μ) / μ`, MaxRL (2602.02710); 0 where μ is 0. Negative rewards are a `PluginOutputError`."""
    lowest = float(rewards_N.nan_to_num(nan=0.0).min())
    if lowest < 0:
        raise PluginOutputError(f"mean_relative: rewards must not be negative, got {lowest:g}. Take centred, say.")
    means_N = group_mean(rewards_N, groups_N)
    return group_apart(rewards_N, groups_N) / torch.where(means_N > 0, means_N, 1.0)


def pass_at_k(rewards_N: torch.Tensor, groups_N: torch.Tensor, k: int = 4, threshold: float = 0.5) -> torch.Tensor:
    """What a completion, a success above the threshold, adds to the sets of k in its group (2508.10751)."""
    succeeds_N = rewards_N > threshold
    counts_N_2 = torch.stack([group_count(rewards_N, groups_N), group_sum(succeeds_N.to(rewards_N), groups_N)], 1)
    pairs_N = [(int(n), int(c)) for n, c in counts_N_2.tolist()]
    credit_of = {(n, c): pass_at_k_advantages(n, c, k) for n, c in set(pairs_N)}
    credits_N_2 = rewards_N.new_tensor([credit_of[pair] for pair in pairs_N])
    return _where_scored(torch.where(succeeds_N, credits_N_2[:, 0], credits_N_2[:, 1]), rewards_N)


def pass_at_k_advantages(n: int, c: int, k: int) -> tuple[float, float]:
    """Advantages of a success and of a failure if c of a group's n completions succeed (2508.10751).

    In whole numbers up to the last step, so that nothing overflows. With `f = 1 - R̄` a success gets `√(f / (1 - f))`.
    """
    sets = math.comb(n, k)
    failing = math.comb(n - c, k)  # both 0 where n < k
    if failing in (0, sets):
        return 0.0, 0.0
    success = math.sqrt(failing / (sets - failing))
    return success, -success * c / (n - c)


class _Estimator:
    """One advantage per completion, from the rewards: by `function`, or by a method of its own."""

    declares = HookDeclaration(role="estimator", independent=True)
    function: Callable[..., torch.Tensor]

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        rewards_N, groups_N = gather_rewards(rollout, shaped=self.declares.uses_total_reward)
        new_N = self._advantages(rewards_N, groups_N, rollout)
        return new_N[rollout.local_rows].to(advantages_B_T.dtype).unsqueeze(1).expand_as(advantages_B_T)

    def _advantages(self, rewards_N: torch.Tensor, groups_N: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """The advantages `(N,)` of all ranks' completions, 0 where the reward is NaN."""
        parameters = {name: getattr(self, name) for name in getattr(self, "__dataclass_fields__", ())}
        return self.function(rewards_N, groups_N, **parameters)


class RawReward(_Estimator):
    """A completion's reward as it is: `A_i = r_i`.

    Unbiased, with the largest variance: with rewards of 0 and 1 only successes have a gradient.

    Source: REINFORCE (Williams, 1992), with the baseline left out.
    """

    __name__ = "raw_reward"
    function = staticmethod(lambda rewards_N, groups_N: raw_reward(rewards_N))


class Centred(_Estimator):
    """A completion's reward minus the mean reward of its group: `A_i = r_i - μ`.

    A division by the group's standard deviation would make prompts that are nearly always or never solved count more.

    Source: Dr. GRPO (2503.20783), its advantage. The other half of the method is the aggregation `constant_length`.
    """

    __name__ = "centred"
    function = staticmethod(centred)


class Normalised(Checked, _Estimator):
    """A completion's reward in standard deviations from the mean of its group: `A_i = (r_i - μ) / (max(σ, floor) + ε)`.

    Without a floor these are TRL's own advantages under `scale_rewards="group"`; it bounds the stretch of a group.

    Source: GRPO (2402.03300), outcome supervision.
    Departures: the paper has no ε and does not say which σ; as in TRL, σ has n - 1 and ε is 1e-4. The floor is ours.

    Args:
        epsilon: ε, in units of the reward; positive.
        std_floor: The least σ to divide by, in units of the reward; not negative. 0.1 bounds the factor to 10.
        std: "sample" divides the sum of squares by n - 1, "population" by n.
    """

    __name__ = "normalised"
    function = staticmethod(normalised)
    epsilon: float = number(1e-4, "a positive number", lambda x: x > 0)
    std_floor: float = number(0.0, "at least 0", lambda x: x >= 0)
    std: str = choice("sample", "population")


class MaxOnly(_Estimator):
    """Credit only the best of a group, each with its reward: `A_i = r_i` where `r_i = max_j r_j`, else 0.

    Nothing pushes away from failures. With negative rewards it would push away from the best completion.

    Source: one of the four "deltas" of Stanford CS336 (2025), lecture 17.
    """

    __name__ = "max_only"
    function = staticmethod(max_only)


class LeaveOneOut(_Estimator):
    """A completion's reward minus the mean reward of the others in its group: `A_i = r_i - mean_{j≠i} r_j`.

    The baseline does not contain the completion's own reward, so the policy gradient is unbiased.

    Source: RLOO (2402.14740), eq. 6.
    Departures: the only scored completion of a group gets 0.
    """

    __name__ = "leave_one_out"
    function = staticmethod(leave_one_out)


class BatchWhitening(Checked, _Estimator):
    """Subtract a baseline, then divide by one standard deviation for all: `A_i = (r_i - b_i) / max(σ, floor)`.

    σ (n - 1) is of `r - b` over the scored completions of all ranks; the floor counts where nearly all rewards agree.

    Source: REINFORCE++ (2501.03262): with the group's mean as baseline its variant REINFORCE++-baseline.
    Departures: the floor is ours. OpenRLHF and verl take σ, and a mean that they subtract, over tokens: that is
    `centred` (or `raw_reward`), then `whiten`.

    Args:
        baseline: What b is: "group", the mean reward of the completion's group, or "batch", the mean over all.
        std_floor: The least divisor, in units of the reward; positive.
    """

    __name__ = "batch_whitening"
    function = staticmethod(batch_whitening)
    declares = HookDeclaration(role="estimator")
    baseline: str = choice("group", "batch")
    std_floor: float = number(0.1, "a positive number", lambda x: x > 0)


class DecoupledNormalisation(Checked, _Estimator):
    """Normalise each reward function in its group by itself, then sum: `A_i = s_i / (σ + ε)`.

    With `s_i = Σ_k w_k·(r_ik - μ_k)/(σ_k + ε)`: μ_k and σ_k are of function k over the group, σ (n - 1) of the sums
    over the scored completions of all ranks. These are TRL's advantages under
    `multi_objective_aggregation="normalize_then_sum"`. What is added to the total reward is none of them.

    Source: GDPO (2601.05242).
    Departures: σ is over completions, as in TRL; verl takes it over tokens, which is this and then `whiten`.

    Args:
        epsilon: ε, positive.
    """

    __name__ = "decoupled_normalisation"
    declares = HookDeclaration(role="estimator", uses_total_reward=False)
    epsilon: float = number(1e-4, "a positive number", lambda x: x > 0)

    def _advantages(self, rewards_N: torch.Tensor, groups_N: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        rewards_N_K = rollout.gather(rollout.rewards_B_K.to(rewards_N.dtype))
        return decoupled_normalisation(rewards_N_K, rollout.reward_weights_K, groups_N, self.epsilon)


class RunningBaseline(Checked, _Estimator):
    """A completion's reward minus a running mean of rewards of its role: `A_i = r_i - b_c`.

    After each reward, `b_c ← γ·b_c + (1 - γ)·r`; a batch with n completions of a role moves its baseline by `γ^n` to
    the mean of theirs. It needs no group, so the completions of a prompt need not be comparable, as in self-play. Each
    value `c` of a column (a game and a player, say) has a baseline of its own. They start at 0 and are saved.

    Source: role-conditioned advantage estimation (RAE) of SPIRAL (2506.24119), whose γ is 0.95.
    Departures: the authors move a baseline game by game; here a batch is compared with what earlier ones left.

    Args:
        decay: γ, from 0 (the last batch alone) to below 1.
        column: The column that names the role. None: one baseline for all.
    """

    __name__ = "running_baseline"
    declares = HookDeclaration(role="estimator")
    decay: float = number(0.95, "a number from 0 to below 1", lambda x: 0 <= x < 1)
    column: str | None = text(None)
    baselines: dict[int, float] = field(init=False, default_factory=dict)

    def state_dict(self) -> dict[str, float]:
        return {str(role): baseline for role, baseline in self.baselines.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.baselines = {int(role): float(baseline) for role, baseline in state.items()}

    def _advantages(self, rewards_N: torch.Tensor, groups_N: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        sums_B = [0] * len(rollout.prompts)
        if self.column is not None:
            column = checked_choice("running_baseline: column", self.column, [*rollout.columns])
            # Ranks cannot exchange texts, so a role is known by its checksum.
            sums_B = [zlib.crc32(repr(role).encode()) for role in rollout.columns[column]]
        roles_N = rollout.gather(torch.tensor(sums_B, device=rewards_N.device)).tolist()
        advantages_N = rewards_N - rewards_N.new_tensor([self.baselines.get(role, 0.0) for role in roles_N])
        of_role: dict[int, list[float]] = defaultdict(list)
        for role, reward in zip(roles_N, rewards_N.tolist(), strict=True):
            if rollout.training and not math.isnan(reward):
                of_role[role].append(reward)
        for role, rewards in of_role.items():
            kept = self.decay ** len(rewards)
            mean = math.fsum(rewards) / len(rewards)
            self.baselines[role] = kept * self.baselines.get(role, 0.0) + (1 - kept) * mean
        return _where_scored(advantages_N, rewards_N)


class OptimalBaseline(_Estimator):
    """A completion's reward minus the length-weighted mean reward of its group: `A_i = r_i - Σ_j L_j r_j / Σ_j L_j`.

    Of the constant baselines this gives the least variance, if the squared norm of a completion's gradient grows with
    its length `L`, which counts the tokens in the loss. With equal lengths it is `centred`.

    Source: On-Policy RL with Optimal Reward Baseline (2505.23585).
    Departures: in a group whose scored completions have no token that counts, the baseline is the mean.
    """

    __name__ = "optimal_baseline"

    def _advantages(self, rewards_N: torch.Tensor, groups_N: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        lengths_N = rollout.gather(rollout.lengths_B).to(rewards_N.dtype)
        return optimal_baseline(rewards_N, groups_N, lengths_N)


class MeanRelative(_Estimator):
    """How much better than its group a completion is, as a share of the group's mean: `A_i = (r_i - μ) / μ`.

    With rewards of 0 and 1 this is the gradient of the logarithm of the success rate, up to terms that vanish as groups
    grow. One success among G completions gets `G - 1`, every failure -1.

    Source: Maximum Likelihood Reinforcement Learning (2602.02710).
    Departures: the paper has rewards of 0 and 1; this takes any non-negative ones. A group without a success gets 0.
    """

    __name__ = "mean_relative"
    function = staticmethod(mean_relative)


class PassAtK(Checked, _Estimator):
    """Credit a completion by what it adds to sets of k: whether any of a prompt's k completions succeeds.

    All `C(n, k)` sets of k out of a group's n completions are worth 1 if they hold one of the c successes and 0 if not,
    normalised by the mean `R̄ = 1 - C(n-c, k) / C(n, k)` and `σ = √(R̄ (1 - R̄))`. A completion gets the mean over its
    sets: a success `(1 - R̄) / σ`, a failure `(1 - R̄ - C(n-c-1, k-1) / C(n-1, k-1)) / σ`; all 0 if no completion
    succeeds, or every set holds a success. k = 1 is `normalised` with `std: population` and no ε.

    Source: Pass@k Training for Adaptively Balancing Exploration and Exploitation (2508.10751), the analytical solution.
    Departures: a group that has fewer than k scored completions gets 0.

    Args:
        k: Size of the sets; at least 1, and at most the size of a group, `num_generations`.
        threshold: A completion succeeds where its reward, before any shaper, is greater than this.
    """

    __name__ = "pass_at_k"
    function = staticmethod(pass_at_k)
    declares = HookDeclaration(
        role="estimator", independent=True, uses_total_reward=False, conformance={"parameters": {"k": 2}}
    )
    k: int = whole(4, lowest=1)
    threshold: float = number(0.5, "a finite number")

    def _advantages(self, rewards_N: torch.Tensor, groups_N: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        if rollout.training and self.k > rollout.num_generations:
            raise PluginOutputError(f"pass_at_k: k={self.k} is above num_generations={rollout.num_generations}.")
        return super()._advantages(rewards_N, groups_N, rollout)
