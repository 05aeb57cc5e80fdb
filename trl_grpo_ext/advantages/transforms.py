"""Shapers and transforms: they change rewards by a schedule, and advantages by size, sign, or what was written."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..credit.groups import compute_dtype, gather_groups, group_extremes, without_rounding
from ..errors import ConfigurationError
from ..guard.parameters import Checked, checked_choice, checked_number, checked_whole, choice, number, whole
from ..types import HookDeclaration, Rollout
from .policies import logps_of


class Whiten(Checked):
    """Advantages in standard deviations from their mean over the batch: `A' = (A - mean) / (σ + 1e-8)`.

    Mean and σ (n - 1) are taken over the completions of all ranks, each with the mean of its tokens' advantages, or
    over their live tokens. Advantages that are all equal become exactly 0. If the incoming ones do not average to 0, a
    group of equal rewards gets an advantage.

    `[raw_reward, kl_in_reward, {name: whiten, over: tokens}]` is REINFORCE++; with `centred` REINFORCE++-baseline.

    Source: REINFORCE++ (2501.03262), whose implementations whiten over tokens: verl with n - 1, OpenRLHF with n.
    Departures: the divisor is `σ + 1e-8`, where verl has `√(σ² + 1e-8)`. A completion that has neither a reward nor an
    advantage, or no live token, stays as it is and is left out of mean and σ.

    Args:
        over: "completions" or "tokens".
    """

    __name__ = "whiten"
    declares = HookDeclaration(role="transform")
    over: str = choice("completions", "tokens")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        live_B_T = rollout.mask_B_T > 0
        values_B_T = torch.where(live_B_T, advantages_B_T, 0.0).to(compute_dtype(advantages_B_T.dtype))
        counted_B = live_B_T.any(dim=1) & ~(torch.isnan(rollout.rewards_B) & ~values_B_T.any(dim=1))
        counted_N = rollout.gather(counted_B.to(values_B_T.dtype)) > 0
        if not bool(counted_N.any()):
            return advantages_B_T
        # Distances to the lowest: those of equal advantages are 0, and stay so.
        lowest_B = values_B_T.masked_fill(~(live_B_T & counted_B.unsqueeze(1)), torch.inf).amin(dim=1)
        lowest = rollout.gather(lowest_B)[counted_N].min()
        above_B_T = torch.where(live_B_T, values_B_T - lowest, 0.0)
        entries_B_E = above_B_T
        present_B_E = live_B_T
        if self.over == "completions":
            lengths_B = live_B_T.sum(dim=1).clamp(min=1).to(values_B_T.dtype)
            entries_B_E = (row_sums(above_B_T) / lengths_B).unsqueeze(1)
            present_B_E = live_B_T.any(dim=1, keepdim=True)
        count = rollout.gather(present_B_E.sum(dim=1).to(values_B_T.dtype))[counted_N].sum()
        mean = rollout.gather(row_sums(entries_B_E))[counted_N].sum() / count
        squares_B = row_sums(torch.where(present_B_E, (entries_B_E - mean).square(), 0.0))
        sigma = (rollout.gather(squares_B)[counted_N].sum() / (count - 1).clamp(min=1)).sqrt()
        # A mean that is what rounding leaves of 0 is 0, or it would give what has no advantage one of its size.
        apart_B_T = values_B_T if not without_rounding(lowest + mean, sigma) else above_B_T - mean
        whitened_B_T = (apart_B_T / (sigma + 1e-8)).to(advantages_B_T.dtype)
        return torch.where(counted_B.unsqueeze(1), whitened_B_T, advantages_B_T)


class ClipAdvantages(Checked):
    """Bound the advantages: `A' = min(max(A, low), high)`, token by token.

    Source: none of its own; `advantage_clip` of ROLL, whose recipes clip at 2, bounds both sides alike.
    Departures: each side has its own bound.

    Args:
        low: The least advantage, not positive.
        high: The greatest, not negative.
    """

    __name__ = "clip_advantages"
    declares = HookDeclaration(
        role="transform", independent=True, conformance={"parameters": {"low": -0.2, "high": 0.2}}
    )
    low: float = number(-2.0, "a number that is not positive", lambda x: x <= 0)
    high: float = number(2.0, "a number that is not negative", lambda x: x >= 0)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        return advantages_B_T.clamp(min=self.low, max=self.high)


class OutcomeFilter(Checked):
    """Learn from some outcomes only: the advantages of all other completions are 0.

    The filter is a mask: its zeros stay 0 at the loss forward. The tokens of rejected completions still count in the
    denominators of the loss and under a KL penalty; `skip_zero_variance` leaves out groups that are rejected whole.

    Source: A Minimalist Approach to LLM Reasoning (2504.11343). With `raw_reward` in front, `successes` is RAFT++ and
    `mixed_groups` is Reinforce-Rej.
    Departures: the authors' code keeps rewards above 0 in RAFT++, and in Reinforce-Rej the groups whose rewards differ:
    for rewards of two values it is the same. A completion without a reward is kept only with `mixed_groups`.

    Args:
        keep: "successes"; "failures"; or "mixed_groups", all completions of prompts with both.
        threshold: A completion succeeds where its reward, before any shaper, is greater than this.
    """

    __name__ = "outcome_filter"
    declares = HookDeclaration(role="transform", independent=True, last=True)
    keep: str = choice("mixed_groups", "successes", "failures")
    threshold: float = number(0.5, "a finite number")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        rewards_N = rollout.gather(rollout.raw_rewards_B)
        groups_N = gather_groups(rollout)
        succeeds_N = torch.where(torch.isnan(rewards_N), torch.nan, (rewards_N > self.threshold).to(rewards_N.dtype))
        if self.keep == "mixed_groups":
            lowest_N, highest_N = group_extremes(succeeds_N, groups_N)
            kept_N = lowest_N < highest_N
        else:
            kept_N = succeeds_N == (1.0 if self.keep == "successes" else 0.0)
        kept_B = kept_N[rollout.local_rows]
        return torch.where(kept_B.unsqueeze(1), advantages_B_T, torch.zeros_like(advantages_B_T))


def row_sums(values_B_T: torch.Tensor) -> torch.Tensor:
    """Each row's sum, added pairwise, so that trailing zeros do not change a bit."""
    while values_B_T.size(1) > 1:
        values_B_T = torch.nn.functional.pad(values_B_T, (0, values_B_T.size(1) % 2))
        values_B_T = values_B_T[:, 0::2] + values_B_T[:, 1::2]
    return values_B_T.squeeze(1)


class SignScaling(Checked):
    """Multiply positive advantages by one factor and negative ones by another: `A' = λ⁺·max(A, 0) + λ⁻·min(A, 0)`.

    Pulling towards successes narrows the distribution, so a small λ⁺ preserves entropy, and pass@k for large k. λ⁺ = 0
    learns from failures alone, λ⁻ = 0 from successes alone.

    Source: The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning (2506.01347), Weighted-REINFORCE,
    whose λ is 0.1.
    Departures: the paper scales rewards of 1 and -1, which is `raw_reward` in front of this hook, with such rewards.

    Args:
        positive: λ⁺, not negative.
        negative: λ⁻, not negative.
    """

    __name__ = "sign_scaling"
    declares = HookDeclaration(role="transform", independent=True)
    positive: float = number(0.1, "a finite number that is not negative", lambda x: x >= 0)
    negative: float = number(1.0, "a finite number that is not negative", lambda x: x >= 0)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        return self.positive * advantages_B_T.clamp(min=0) + self.negative * advantages_B_T.clamp(max=0)


class TruncationMasking(Checked):
    """Set the advantages of truncated completions to 0: `A'_t = 0` where the completion ended at the limit.

    With `keep="negative"` only credit is removed, `A'_t = min(A_t, 0)`. It is a mask: its zeros stay 0 at the loss
    forward. TRL's `mask_truncated_completions` removes the tokens from all counts and the KL penalty; here they stay.

    Source: the overlong filtering of DAPO (2503.14476), which masks the loss of truncated samples.
    Departures: the denominators, as said; `keep="negative"` is not in the paper.

    Args:
        keep: "nothing" or "negative".
    """

    __name__ = "truncation_masking"
    declares = HookDeclaration(role="transform", independent=True, last=True)
    keep: str = choice("nothing", "negative")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        kept_B_T = advantages_B_T.clamp(max=0.0) if self.keep == "negative" else torch.zeros_like(advantages_B_T)
        return torch.where(rollout.truncated_B.unsqueeze(1), kept_B_T, advantages_B_T)


class SequenceRejection(Checked):
    """Zero the advantages of completions on which the trained model and the sampler disagree.

    `A'_t = 0` where the geometric mean of the ratio, `exp(1/L · Σ_t (log π_old,t - log π_sampler,t))` over the `L` live
    tokens that the sampler has scored, is below `low` or above `high`. It is a mask: its zeros stay 0 at the loss
    forward. TRL's own correction (`vllm_importance_sampling_correction`) weighs by the ratio instead; both may act.

    Source: verl's rollout correction with the geometric mean; SkyRL, ROLL and NeMo RL have it too.
    Departures: there the tokens leave the loss mask; here they stay in its denominators.

    Args:
        low: Smallest mean ratio that is kept, not negative and below 1.
        high: Largest, above 1.
    """

    __name__ = "sequence_rejection"
    declares = HookDeclaration(
        role="transform",
        needs=("old_logps", "sampling_logps"),
        independent=True,
        last=True,
        conformance={"parameters": {"low": 0.5, "high": 2.0}},
    )
    low: float = number(0.999, "from 0 to below 1", lambda x: 0 <= x < 1)
    high: float = number(1.001, "above 1", lambda x: x > 1)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        dtype = compute_dtype(advantages_B_T.dtype)
        sampling_logps_B_T = logps_of("sampling_logps", rollout).to(dtype)
        known_B_T = (rollout.mask_B_T > 0) & ~torch.isnan(sampling_logps_B_T)
        log_ratio_B_T = logps_of("old_logps", rollout).to(dtype) - sampling_logps_B_T
        sums_B = row_sums(torch.where(known_B_T, log_ratio_B_T, 0.0))
        ratio_B = (sums_B / known_B_T.sum(dim=1).clamp(min=1)).exp()
        kept_B = (ratio_B >= self.low) & (ratio_B <= self.high)
        return torch.where(kept_B.unsqueeze(1), advantages_B_T, torch.zeros_like(advantages_B_T))


class RepetitionPenalty(Checked):
    """Subtract a constant from every token that repeats: `A'_t = A_t - p` where `t` lies in an n-gram seen before.

    "Seen before" means that the same n tokens, a tool's included, begin earlier in the same completion; the two may
    overlap. A token in several repeated n-grams is punished once.

    Source: the penalty of Demystifying Long Chain-of-Thought Reasoning in LLMs (2502.03373), appendix C.2.
    Departures: there it is a reward, discounted into the returns of the tokens before; here only of the token itself.

    Args:
        ngram: n, at least 1.
        penalty: p, positive, in units of the advantage.
    """

    __name__ = "repetition_penalty"
    declares = HookDeclaration(role="transform", independent=True, conformance={"parameters": {"ngram": 1}})
    ngram: int = whole(40, lowest=1)
    penalty: float = number(0.05, "a positive number", lambda x: x > 0)

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        repeated_B_T = repeated_tokens(rollout.completion_ids_B_T, rollout.completion_mask_B_T > 0, self.ngram)
        return advantages_B_T - self.penalty * repeated_B_T.to(advantages_B_T.dtype)


def repeated_tokens(ids_B_T: torch.Tensor, written_B_T: torch.Tensor, ngram: int) -> torch.Tensor:
    """Which tokens lie in an n-gram that also occurs earlier in the same completion, `(B, T)`, bool."""
    rows = []
    for ids, count in zip(ids_B_T.tolist(), written_B_T.sum(dim=1).tolist(), strict=True):
        repeated = [False] * len(ids)
        seen: set[tuple[int, ...]] = set()
        for start in range(count - ngram + 1):
            words = tuple(ids[start : start + ngram])
            if words in seen:
                repeated[start : start + ngram] = [True] * ngram
            seen.add(words)
        rows.append(repeated)
    return torch.tensor(rows, dtype=torch.bool, device=written_B_T.device).view_as(written_B_T)


Points = list[tuple[int, float]]


class RewardSchedule:
    """Let the weights of rewards change with the optimizer step.

    A schedule is a list of points `[step, weight]`. Between two of them the weight is on the line between them, or, in
    form "step", that of the point before; outside of them that of the nearest. Each batch is trained on as with these
    `reward_weights`, and `advantage/reward_schedule/<reward>` logs them. Other rewards keep theirs.

    Source: none of its own; asked for in TRL's issue 3036.

    Args:
        weights: The points of each reward that has a schedule, by its name; steps count from 0 and increase.
        form: "linear" or "step".
    """

    __name__ = "reward_schedule"
    declares = HookDeclaration(
        role="shaper",
        independent=True,
        changes_weights=True,
        conformance={"parameters": {"weights": {"form": [[0, 1.0], [100, 0.0]]}}},
    )

    def __init__(self, *, weights: Mapping[str, Sequence[Sequence[float]]], form: str = "linear") -> None:
        if not isinstance(weights, Mapping) or not weights:
            such = "a mapping such as {tag_format: [[0, 1.0], [200, 0.0]]}"
            raise ConfigurationError(f"reward_schedule: weights must be {such}, got {weights!r}.")
        self.weights = {str(name): _checked_points(str(name), points) for name, points in weights.items()}
        self.form = checked_choice("reward_schedule: form", form, ("linear", "step"))
        self.metrics: dict[str, float] = {}

    def weight(self, name: str, step: int) -> float:
        """The weight of a reward after `step` optimizer steps."""
        points = self.weights[name]
        place = bisect_right(points, step, key=lambda point: point[0])
        if place == 0:
            return points[0][1]
        before_step, before = points[place - 1]
        if place == len(points) or self.form == "step":
            return before
        after_step, after = points[place]
        return before + (after - before) * (step - before_step) / (after_step - before_step)

    def on_rewards(self, rollout: Rollout) -> torch.Tensor:
        names = list(rollout.reward_names)
        weights_K = rollout.reward_weights_K.clone()
        self.metrics = {name: self.weight(name, rollout.step) for name in self.weights}
        for name, weight in self.metrics.items():
            weights_K[names.index(checked_choice("reward_schedule: weights", name, names))] = weight
        return weights_K


def _checked_points(name: str, points: Any) -> Points:
    what = f"reward_schedule: weights of {name}"
    found: Points = []
    try:
        pairs = [(step, weight) for step, weight in points]
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        raise ConfigurationError(f"{what} must be a list of points [step, weight], got {points!r}.")
    for step, weight in pairs:
        step = checked_whole(f"{what}: a step", step, lowest=found[-1][0] + 1 if found else 0)
        found.append((step, checked_number(f"{what}: a weight", weight, "a finite number")))
    return found
