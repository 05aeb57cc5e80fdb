"""Rewards for the steps of a completion, summed or by the worst step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..credit.groups import gather_groups, group_mean
from ..errors import ConfigurationError
from ..guard.parameters import Checked, choice, number, text
from ..types import HookDeclaration, PartTable, Rollout


class ProcessRewards(Checked):
    """Credit each token with the rewards of its step and all later steps, minus a baseline.

    Each scored part of a function's `Parts` is a step (in order of its last token) whose reward `r_j` is its score
    times its weight. A part without a place ends where the completion ends, and a completion scored without parts is
    one step. With `s(t)` the first step that ends at token `t` or later (the special tokens after it included):

        G_t = Σ_{j ≥ s(t)} γ^(j - s(t)) · r_j            form "sum"
        G_t = Σ_{j ≥ s(t)} γ^(j - s(t)) · r*_j           form "min", r*_j = softmax(-r/T)_j · r_j over all steps
        A_t = coefficient · (G_t - b),   b = mean of G at the first token over the group's scored completions

    In the minimum form a low temperature, relative to the rewards, gives nearly all weight to the worst step.

    Source: PURE (2504.15275) for the minimum form, with its authors' temperature of 0.1 for rewards between -1 and 1;
    the plain sum is process supervision in GRPO (2402.03300).
    Departures: the baseline is one number per group, the mean return of whole completions. γ counts steps, not tokens.
    Tokens after the last step, and completions that the function did not score, get 0. Its weight is not used.

    Args:
        reward: Name of the reward function. None means the only one that returns parts, or the only one.
        form: "min" or "sum".
        temperature: T of the minimum form, positive, in units of the reward.
        gamma: γ, from 0 to 1.
        baseline: "group" or "none".
        mode: "replace" the incoming advantages, or "add" to them.
        coefficient: Factor on the result.
    """

    __name__ = "process_rewards"
    reward: str | None = text(None)
    form: str = choice("min", "sum")
    temperature: float = number(0.1, "positive", lambda v: v > 0)
    gamma: float = number(1.0, "from 0 to 1", lambda v: 0 <= v <= 1)
    baseline: str = choice("group", "none")
    mode: str = choice("replace", "add")
    coefficient: float = number(1.0, "a finite number")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.declares = HookDeclaration(
            role="estimator" if self.mode == "replace" else "transform",
            needs=("offsets",),
            makes_signal=True,
            uses_total_reward=False,
        )

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        precise = torch.promote_types(rollout.rewards_B_K.dtype, torch.float32)
        column = self._column(rollout)
        steps = _steps(rollout.parts.get(rollout.reward_names[column]), rollout)
        live = (rollout.lengths_B > 0).tolist()
        values_B_T = advantages_B_T.new_full(advantages_B_T.shape, math.nan, dtype=precise)  # where nothing is placed
        firsts_B = values_B_T.new_full((len(live),), math.nan)
        for row, reward in enumerate(rollout.rewards_B_K[:, column].tolist()):
            if math.isnan(reward):
                continue
            offsets = rollout.offsets(row)
            ends, rewards = zip(*(steps[row] or [(len(offsets), reward)]), strict=True)
            to_go = rewards_to_go(min_form(rewards, self.temperature) if self.form == "min" else rewards, self.gamma)
            firsts_B[row] = to_go[0]
            if live[row]:
                returns = spread_returns(to_go, after_silence(offsets, ends))
                values_B_T[row, : len(returns)] = values_B_T.new_tensor(returns)
        if self.baseline == "group":
            means_N = group_mean(rollout.gather(firsts_B), gather_groups(rollout))
            values_B_T = values_B_T - means_N[rollout.local_rows].unsqueeze(1)
        values_B_T = torch.where(torch.isnan(values_B_T), 0.0, self.coefficient * values_B_T).to(advantages_B_T.dtype)
        return advantages_B_T + values_B_T if self.mode == "add" else values_B_T

    def _column(self, rollout: Rollout) -> int:
        """The reward function's column, agreed on by all ranks."""
        names = list(rollout.reward_names)
        pointing = [name for name in names if name in rollout.parts]  # the same on all ranks
        known = names if len(names) == 1 else pointing
        if self.reward is None and len(known) == 1:
            return names.index(known[0])
        if self.reward not in names:
            raise ConfigurationError(
                f"process_rewards: reward must be one of {names}, of which {len(pointing)} have parts, got "
                f"{self.reward!r}."
            )
        return names.index(self.reward)


def _steps(table: PartTable | None, rollout: Rollout) -> list[list[tuple[int, float]]]:
    """Of each completion, where its steps end (the token after) and their rewards, in order."""
    if table is None:
        return [[] for _ in rollout.texts]
    ends: dict[tuple[int, int], int] = {}
    for row, part, _, end in table.ranges_R_4.tolist():
        ends[row, part] = max(end, ends.get((row, part), 0))
    written = rollout.completion_mask_B_T.sum(dim=1).long().tolist()
    steps = []
    for row, worth in enumerate((table.scores_B_M * table.weights_B_M).tolist()):
        found = [(ends.get((row, part), written[row]), one) for part, one in enumerate(worth) if not math.isnan(one)]
        steps.append(sorted(found, key=lambda step: step[0]))
    return steps


def after_silence(offsets: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[int]:
    """For each end of a step, the last token of those after it that wrote nothing, such as the end of the sequence."""
    lasts = []
    for end in ends:
        while end < len(offsets) and offsets[end][0] == offsets[end][1]:
            end += 1
        lasts.append(end - 1)
    return lasts


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
