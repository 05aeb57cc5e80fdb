"""Gains and losses at weights of their own (weighted REINFORCE)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError
from ..guard.parameters import checked_number

if TYPE_CHECKING:
    from ..types import Rollout


class SignScaling:
    """Multiply positive advantages by one factor and negative ones by another: `A' = λ⁺·max(A, 0) + λ⁻·min(A, 0)`.

    Pushing away from what failed keeps the rest of the distribution in place, where pulling towards what succeeded
    narrows it. A small λ⁺ therefore keeps entropy and pass@k for large k. λ⁺ = 0 learns from failures alone, λ⁻ = 0
    from successes alone. It acts on the advantages that come in, token by token, so it stands behind the hook, or TRL's
    own advantages, that it scales.

    Source: The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning (2506.01347), Weighted-REINFORCE,
    whose λ is 0.1.

    Departures: the paper scales rewards of 1 and -1, with no baseline: that is `raw_reward` in front of this hook, with
    such rewards. Here any advantages are scaled.

    Args:
        positive: λ⁺, not negative.
        negative: λ⁻, not negative; not 0 if `positive` is.

    Raises:
        ConfigurationError: A parameter is out of its range.
    """

    __name__ = "sign_scaling"

    def __init__(self, *, positive: float = 0.1, negative: float = 1.0) -> None:
        wanted = "a finite number that is not negative"
        self.positive = checked_number("sign_scaling: positive", positive, wanted, lambda x: x >= 0)
        self.negative = checked_number("sign_scaling: negative", negative, wanted, lambda x: x >= 0)
        if positive == negative == 0:
            raise ConfigurationError(
                f"sign_scaling: negative must be greater than 0 where positive is 0, got {negative!r}; "
                "otherwise nothing would be learnt."
            )

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        return self.positive * advantages_B_T.clamp(min=0) + self.negative * advantages_B_T.clamp(max=0)
