"""Token mean in which hard prompts' successes and easy prompts' failures count more (GRPO-LEAD)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..types import Rollout


class DifficultyWeighted:
    """A token mean with each completion scaled by how surprising its outcome is: `w = v(x_i) / Σ_j |o_j|`.

    `v(x) = A + (B - A) / (1 + exp(k (x - x0)))` falls from B to A. With ρ the solved share of the group, `x = ρ` for a
    completion with a positive advantage and `x = 1 - ρ` for the others: a right answer to a hard prompt counts most,
    and so does a wrong answer to an easy one.

    Source: the difficulty-aware advantage reweighting of GRPO-LEAD (2504.09696).

    Departures: the authors scale the advantage and we the token's loss, so a KL penalty is scaled, too. A completion's
    advantage is the sum over its tokens, after the rollout stage of the hooks. ρ is the share of the scored completions
    of the group (live or not) whose reward is above `threshold`, 0 where none is scored. The token mean is over the
    generation batch and all ranks.

    Args:
        low: A, the factor of what was to be expected; not negative.
        high: B, the factor of what was not; at least `low`.
        midpoint: x0, the share at which the factor is half-way between.
        steepness: k, positive.
        reward: Name of the reward function that says what is solved; by default the weighted total of all.
        threshold: A completion solves its prompt where its reward is greater than this.

    Raises:
        ConfigurationError: A parameter is out of its range; from `weights`, the run has no reward function of that
            name, or the rollout holds no advantages.
    """

    __name__ = "difficulty_weighted"

    def __init__(
        self,
        *,
        low: float = 0.4,
        high: float = 1.5,
        midpoint: float = 0.75,
        steepness: float = 10.0,
        reward: str | None = None,
        threshold: float = 0.0,
    ) -> None:
        numbers = {"low": low, "high": high, "midpoint": midpoint, "steepness": steepness, "threshold": threshold}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigurationError(f"difficulty_weighted: {name} must be a finite number, got {value!r}.")
        if low < 0:
            raise ConfigurationError(f"difficulty_weighted: low must not be negative, got {low!r}.")
        if high < low:
            raise ConfigurationError(
                f"difficulty_weighted: high must be at least low, got high={high!r} and low={low!r}; otherwise easy "
                "prompts' successes would count most. Swap them."
            )
        if steepness <= 0:
            raise ConfigurationError(f"difficulty_weighted: steepness must be positive, got {steepness!r}.")
        if reward is not None and not isinstance(reward, str):
            raise ConfigurationError(
                f"difficulty_weighted: reward must be the name of a reward function, got {reward!r}."
            )
        self.low, self.high, self.midpoint, self.steepness = low, high, midpoint, steepness
        self.reward = reward
        self.threshold = threshold

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, the same for all tokens of a completion."""
        if rollout.advantages_B_T is None:
            raise ConfigurationError(
                "difficulty_weighted: rollout.advantages_B_T is None, and the weights depend on the advantages' signs. "
                "The trainer sets it; a rollout made by hand must, too."
            )
        rewards_N = rollout.gather(self._rewards(rollout))
        groups_N = rollout.gather(rollout.group_ids_B)
        scored_B_N = (rollout.group_ids_B.unsqueeze(1) == groups_N) & ~torch.isnan(rewards_N)
        solved_B = (scored_B_N & (rewards_N > self.threshold)).sum(dim=1)
        solved_share_B = solved_B / scored_B_N.sum(dim=1).clamp(min=1).to(rollout.mask_B_T.dtype)
        positive_B = (rollout.advantages_B_T * rollout.mask_B_T).sum(dim=1) > 0
        expected_B = torch.where(positive_B, solved_share_B, 1 - solved_share_B)
        surprise_B = torch.sigmoid(-self.steepness * (expected_B - self.midpoint))
        factors_B = self.low + (self.high - self.low) * surprise_B
        return rollout.mask_B_T * factors_B.unsqueeze(1) / max(rollout.totals.tokens, 1)

    def _rewards(self, rollout: Rollout) -> torch.Tensor:
        if self.reward is None:
            return rollout.rewards_B
        names = list(rollout.reward_names)
        if self.reward not in names:
            raise ConfigurationError(
                f"difficulty_weighted: this run has no reward function {self.reward!r}; it has {', '.join(names)}."
            )
        return rollout.rewards_B_K[:, names.index(self.reward)]
