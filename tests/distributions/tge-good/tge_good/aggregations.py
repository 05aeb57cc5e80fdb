"""An aggregation."""

from typing import Any


class FirstToken:
    """Mean over sequences of the loss of the first token."""

    def weights(self, rollout: Any) -> Any:
        mask_B_T = rollout.mask_B_T
        return (mask_B_T.cumsum(dim=1) == 1) * mask_B_T / rollout.totals.sequences
