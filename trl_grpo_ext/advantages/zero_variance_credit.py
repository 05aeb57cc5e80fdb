"""Credit by entropy where all completions of a prompt got the same reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..guard.parameters import checked_number
from .returns import wide

if TYPE_CHECKING:
    from ..types import Forward


class ZeroVarianceCredit:
    """Learn from prompts that are always, or never, solved: there a token's entropy `H_t` makes its advantage.

    In groups whose rewards are all equal, for which GRPO's advantage is 0:

    - right completions: `A_t = α·H_t`,
    - wrong ones: `A_t = -α·(max_s H_s - H_t)`, with the maximum over the completion's live tokens.

    So decisions are rewarded more than routine, and mistakes are punished where the policy was sure of itself, which
    leaves it free to explore. Other completions, and those that no reward function scored, keep the advantages that
    come in. A completion is right if its reward is above `correct_above`.

    Entropies are those of the policy being trained, in nats. This hook acts at the loss forward: aggregations that
    leave groups without signal out (`skip_zero_variance`) have taken these tokens out of the loss by then; do not
    combine.

    Source: RL-ZVP (2509.21880).

    Departures: right is a threshold on the weighted total of the rewards, where the paper has rewards of 0 and 1.

    Args:
        alpha: α, advantage per nat; positive.
        correct_above: Rewards above it are right.

    Raises:
        ConfigurationError: A parameter is out of its range.
    """

    __name__ = "zero_variance_credit"
    needs = ("entropies",)

    def __init__(self, *, alpha: float = 0.1, correct_above: float = 0.5) -> None:
        self.alpha = checked_number("zero_variance_credit: alpha", alpha, "a positive number", lambda x: x > 0)
        self.correct_above = checked_number(
            "zero_variance_credit: correct_above", correct_above, "a finite number", lambda x: True
        )

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        live_B_T = forward.mask_B_T > 0
        entropies_B_T = torch.where(live_B_T, forward.entropies_B_T, 0.0).to(wide(forward.entropies_B_T.dtype))
        highest_B = entropies_B_T.amax(dim=1, keepdim=True)
        right_B = (forward.rewards_B > self.correct_above).unsqueeze(1)
        credit_B_T = self.alpha * torch.where(right_B, entropies_B_T, entropies_B_T - highest_B)
        equal_B = forward.zero_variance_B & ~torch.isnan(forward.rewards_B)
        return torch.where(equal_B.unsqueeze(1), credit_B_T.to(advantages_B_T.dtype), advantages_B_T)
