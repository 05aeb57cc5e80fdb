"""Rewards for the steps of a completion, summed or by the worst step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import torch

from ..credit.groups import gather_groups, group_mean
from ..errors import ConfigurationError
from ..guard.parameters import checked_choice, checked_number, checked_text
from ..types import HookDeclaration, Rollout, Span, check_spans


class ProcessRewards:
    """Credit each token with the rewards of its step and all later steps, minus a baseline.

    A reward function that returns `SpanScore`s gives a completion's steps their rewards `r_j`: each span is a step (in
    order of its end), worth its value. A completion scored without spans is one step. A step's reward lies at its last
    token, and with `s(t)` the first step that ends at token `t` or later:

        G_t = Σ_{j ≥ s(t)} γ^(j - s(t)) · r_j            form "sum"
        G_t = Σ_{j ≥ s(t)} γ^(j - s(t)) · r*_j           form "min", r*_j = softmax(-r/T)_j · r_j over all steps
        A_t = coefficient · (G_t - b),   b = mean of G at the first token over the group's scored completions

    In the minimum form a low temperature gives nearly all weight to the worst step. So tokens before it get its reward,
    and tokens after it about nothing. "Low" is relative to the rewards: 0.1 suits those between -1 and 1.

    Source: PURE (2504.15275) for the minimum form, its transformed rewards `r*`, and the temperature 0.1 of its
    authors' configuration, for rewards between -1 and 1; the plain sum of the rewards to go is that of process
    supervision in GRPO (2402.03300).

    Departures: the papers' own baselines and normalisations are not taken over: here it is one number per group, the
    mean return of whole completions. γ counts steps, not tokens. Tokens after the last step get 0, and so do
    completions that the function did not score. The function's weight in the total reward is not used.

    Args:
        reward: Name of the reward function. None means the only one that returns spans, or the only one.
        form: "min" or "sum".
        temperature: T of the minimum form, positive, in units of the reward.
        gamma: γ, from 0 to 1.
        baseline: "group" or "none".
        mode: "replace" the incoming advantages, or "add" to them.
        coefficient: Factor on the result.
    """

    __name__ = "process_rewards"

    def __init__(
        self,
        *,
        reward: str | None = None,
        form: str = "min",
        temperature: float = 0.1,
        gamma: float = 1.0,
        baseline: str = "group",
        mode: str = "replace",
        coefficient: float = 1.0,
    ) -> None:
        self.reward = None if reward is None else checked_text("process_rewards: reward", reward)
        self.form = checked_choice("process_rewards: form", form, ("min", "sum"))
        self.baseline = checked_choice("process_rewards: baseline", baseline, ("group", "none"))
        self.mode = checked_choice("process_rewards: mode", mode, ("replace", "add"))
        self.declares = HookDeclaration(
            role="estimator" if self.mode == "replace" else "transform",
            needs=("offsets",),
            makes_signal=True,
            uses_total_reward=False,
        )
        self.temperature = checked_number("process_rewards: temperature", temperature, "positive", lambda v: v > 0)
        self.gamma = checked_number("process_rewards: gamma", gamma, "from 0 to 1", lambda v: 0 <= v <= 1)
        self.coefficient = checked_number("process_rewards: coefficient", coefficient, "a finite number")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        precise = torch.promote_types(rollout.rewards_B_K.dtype, torch.float32)
        column = self._column(rollout)
        spans = rollout.reward_spans.get(rollout.reward_names[column], [None] * len(rollout.texts))
        live = (rollout.lengths_B > 0).tolist()
        rows, firsts = [], []
        for row, reward in enumerate(rollout.rewards_B_K[:, column].tolist()):
            to_go, returns = [], []
            if not math.isnan(reward):
                ends, rewards = self._steps(rollout.texts[row], spans[row] or [], reward, row)
                to_go = rewards_to_go(
                    min_form(rewards, self.temperature) if self.form == "min" else rewards, self.gamma
                )
                returns = spread_returns(to_go, last_tokens(rollout.offsets(row), ends)) if live[row] else []
            firsts.append(to_go[0] if to_go else math.nan)
            rows.append([*returns, *[math.nan] * (advantages_B_T.size(1) - len(returns))])
        # NaN is where nothing is placed.
        values_B_T = advantages_B_T.new_tensor(rows, dtype=precise).view_as(advantages_B_T)
        if self.baseline == "group":
            means_N = group_mean(rollout.gather(values_B_T.new_tensor(firsts)), gather_groups(rollout))
            values_B_T = values_B_T - means_N[rollout.local_rows].unsqueeze(1)
        values_B_T = torch.where(torch.isnan(values_B_T), 0.0, self.coefficient * values_B_T).to(advantages_B_T.dtype)
        return advantages_B_T + values_B_T if self.mode == "add" else values_B_T

    def _column(self, rollout: Rollout) -> int:
        """The reward function's column, agreed on by all ranks."""
        names = list(rollout.reward_names)
        if self.reward is not None:
            if self.reward not in names:
                raise ConfigurationError(f"process_rewards: reward must be one of {names}, got {self.reward!r}.")
            return names.index(self.reward)
        points = rollout.rewards_B_K.new_tensor([float(name in rollout.reward_spans) for name in names])
        points_K = (rollout.gather(points.expand_as(rollout.rewards_B_K)) > 0).any(dim=0).tolist()
        pointing = [k for k, points in enumerate(points_K) if points]
        if len(pointing) == 1 or len(names) == 1:
            return (pointing or [0])[0]
        raise ConfigurationError(
            f"process_rewards: reward must be given where {len(pointing)} of the reward functions, {names}, have spans."
        )

    def _steps(self, text: str, spans: Sequence[Span], reward: float, row: int) -> tuple[list[int], list[float]]:
        """Where each step ends in the text, and its reward."""
        check_spans(spans, text, row)
        scores = sorted((end, value) for _, end, value in spans) or [(len(text), reward)]
        return [end for end, _ in scores], [value for _, value in scores]


def last_tokens(offsets: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[int]:
    """For each end of a span, the token that completes it, or the last silent one right after; -1 without tokens."""
    with_text = [token for token, (start, end) in enumerate(offsets) if end > start]
    starts = [offsets[token][0] for token in with_text]
    following = [*with_text[1:], len(offsets)]  # the token that is the next to write
    return [following[bisect_left(starts, max(end, 1)) - 1] - 1 for end in ends]


def min_form(rewards: Sequence[float], temperature: float) -> list[float]:
    """`softmax(-r/T)_j · r_j`: at a low temperature nearly all weight is on the lowest reward."""
    lowest = min(rewards, default=0.0)
    weights = [math.exp((lowest - reward) / temperature) for reward in rewards]
    total = math.fsum(weights)
    return [weight / total * reward for weight, reward in zip(weights, rewards, strict=True)]


def rewards_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """`Σ_{j ≥ s} γ^(j - s) · r_j` for each step `s`."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + gamma * (returns[-1] if returns else 0.0))
    return returns[::-1]


def spread_returns(returns: Sequence[float], lasts: Sequence[int]) -> list[float]:
    """Give each token the return of the first step that ends at it or later; tokens after the last step are left
    out."""
    tokens: list[float] = []
    for value, last in zip(returns, lasts, strict=True):
        tokens += [value] * (last + 1 - len(tokens))
    return tokens
