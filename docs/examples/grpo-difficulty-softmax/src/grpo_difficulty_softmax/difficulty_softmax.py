"""Token mean over the prompts that teach something, the harder ones counting more (DGPO)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from trl_grpo_ext.errors import ConfigurationError

if TYPE_CHECKING:
    from trl_grpo_ext import Rollout

_EQUAL = 1e-6
"""Rewards of a group that differ by no more, relative to the largest of them or to 1, are equal."""
_NOTHING = 1e-3
"""Advantages up to this size, on the same scale, are what rounding leaves of zero."""


class DifficultySoftmax:
    """Weigh prompt q's tokens by `λ_q / Σ_{i in valid} |o_i|`, with `λ = Q_v · softmax over valid prompts of -μ/T`.

    μ_q is the mean score of the prompt's completions: the harder the prompt, the lower. Valid are the `Q_v` prompts
    whose completions differ in reward. The λ of valid prompts have mean 1. With scores between 0 and 1 the hardest
    counts up to `exp(1/T)` times as much as the easiest: 1.65 times at T = 2. Where all valid prompts are equally hard,
    and where none is valid, this is a token mean.

    All prompts of the generation batch compete, on whichever rank they are, so the weights need a view of all of it.

    Source: difficulty-aware question-level weighting (DQW) with the valid-token mean, the two parts of DGPO that are
    about weights, from "Harder Is Better" (MathForge, arXiv:2601.20614). Written after the paper's abstract and the
    authors' trainer in their repository AMAP-ML/MathForge (`grpo_trainer.py`, options `enable_dgpo` and
    `dgpo_dqw_temp`); the paper's own equations were not at hand. As there, a prompt that nobody solved (μ = 0), valid
    because of another reward function, takes part with μ = 1: hard, but with nothing right to learn from.

    Departures: the authors scale the advantage and we the token's loss, so a KL penalty is scaled, too, and is left out
    with the prompts that are not valid. A prompt is valid, too, where a hook gave some token an advantage although all
    rewards are equal. Prompts without a live token are left out of the softmax. DGPO's third part, advantages divided
    by their mean size in the group, is an affair of the advantages and not in here.

    Args:
        temperature: T, positive; the authors train with 2.
        reward: Name of the reward function that says how hard a prompt is, with scores from 0 to 1; by default the
            run's first.

    Raises:
        ConfigurationError: A parameter is out of its range; from `weights`, the run has no reward function of that
            name, or the rollout holds no advantages.
    """

    __name__ = "difficulty_softmax"

    def __init__(self, *, temperature: float = 2.0, reward: str | None = None) -> None:
        number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not number or not math.isfinite(temperature) or temperature <= 0:
            raise ConfigurationError(
                f"difficulty_softmax: temperature must be a positive number, got {temperature!r}; the lower, the more "
                "the hardest prompts count."
            )
        if reward is not None and not isinstance(reward, str):
            raise ConfigurationError(
                f"difficulty_softmax: reward must be the name of a reward function, got {reward!r}."
            )
        self.temperature = float(temperature)
        self.reward = reward

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, the same for all tokens of a prompt's completions."""
        if rollout.advantages_B_T is None:
            raise ConfigurationError(
                "difficulty_softmax: rollout.advantages_B_T is None, and they say which prompts teach something. The "
                "trainer sets it; a rollout made by hand must, too."
            )
        # In double precision and by scatter: the same sums on every rank, however the groups are spread.
        largest_B = (rollout.advantages_B_T * rollout.mask_B_T).abs().amax(dim=1)
        columns = [self._scores(rollout), rollout.rewards_B, largest_B, rollout.lengths_B]
        scores_N, rewards_N, largest_N, lengths_N = (rollout.gather(column).double() for column in columns)
        group_N = torch.unique(rollout.gather(rollout.group_ids_B), return_inverse=True)[1]

        live_Q = _of_groups(group_N, lengths_N, "sum") > 0
        valid_Q = live_Q & _have_signal(group_N, rewards_N, largest_N)
        if not valid_Q.any():
            valid_Q = live_Q
        scored_N = ~torch.isnan(scores_N)
        mean_Q = _of_groups(group_N, torch.where(scored_N, scores_N, 0.0), "sum")
        mean_Q = mean_Q / _of_groups(group_N, scored_N.double(), "sum").clamp(min=1.0)
        mean_Q = torch.where(torch.isclose(mean_Q, torch.zeros_like(mean_Q)), 1.0, mean_Q)  # as the authors do
        share_Q = torch.softmax(torch.where(valid_Q, -mean_Q / self.temperature, -torch.inf), dim=0)
        share_Q = torch.where(valid_Q, share_Q, 0.0)  # where nothing is live at all, the softmax of nothing
        tokens = (lengths_N * valid_Q[group_N]).sum().clamp(min=1.0)
        weights_N = share_Q[group_N] * valid_Q.sum() / tokens
        return rollout.mask_B_T * weights_N[rollout.local_rows].to(rollout.mask_B_T.dtype).unsqueeze(1)

    def _scores(self, rollout: Rollout) -> torch.Tensor:
        names = list(rollout.reward_names)
        if self.reward is not None and self.reward not in names:
            raise ConfigurationError(
                f"difficulty_softmax: this run has no reward function {self.reward!r}; it has {', '.join(names)}."
            )
        return rollout.rewards_B_K[:, names.index(self.reward) if self.reward is not None else 0]


def _have_signal(group_N: torch.Tensor, rewards_N: torch.Tensor, largest_N: torch.Tensor) -> torch.Tensor:
    """Which groups' rewards differ, or have some advantage all the same, `(Q,)`."""
    missing_N = torch.isnan(rewards_N)
    highest_Q = _of_groups(group_N, rewards_N.masked_fill(missing_N, -torch.inf), "amax")
    lowest_Q = _of_groups(group_N, rewards_N.masked_fill(missing_N, torch.inf), "amin")
    scale_Q = _of_groups(group_N, rewards_N.masked_fill(missing_N, 0.0).abs(), "amax").clamp(min=1.0)
    advantage_Q = _of_groups(group_N, largest_N, "amax")
    return (highest_Q - lowest_Q > _EQUAL * scale_Q) | (advantage_Q > _NOTHING * scale_Q)


def _of_groups(group_N: torch.Tensor, values_N: torch.Tensor, how: str) -> torch.Tensor:
    """Sum, maximum or minimum over each group, `(Q,)`."""
    groups = int(group_N.max()) + 1
    start_Q = values_N.new_zeros(groups)
    return start_Q.scatter_reduce(0, group_N, values_N, how, include_self=False)
