"""Less weight for improbable tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..guard.parameters import checked_number
from .returns import wide

if TYPE_CHECKING:
    from ..types import Forward


class LowProbability:
    """Scale each token's advantage with its probability: `A'_t = A_t·(α·π_t + 1 - α)`.

    `π_t` is the probability of the sampled token under the policy being trained, detached. A token's gradient is the
    larger the less probable it is, so that a few improbable tokens drown the others; this evens them out. α = 0 changes
    nothing, with α = 1 the advantage is proportional to the probability.

    Source: the advantage reweighting of Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs (2505.12929).
    Their second method, which updates on improbable tokens first, is none of a hook's affairs.

    Departures: none.

    Args:
        alpha: α, in [0, 1].

    Raises:
        ConfigurationError: α is out of its range.
    """

    __name__ = "low_probability"
    per_completion = True

    def __init__(self, *, alpha: float = 0.3) -> None:
        self.alpha = checked_number("low_probability: alpha", alpha, "a number from 0 to 1", lambda x: 0 <= x <= 1)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        probabilities_B_T = forward.logps_B_T.to(wide(forward.logps_B_T.dtype)).exp()
        return (advantages_B_T * (self.alpha * probabilities_B_T + 1 - self.alpha)).to(advantages_B_T.dtype)
