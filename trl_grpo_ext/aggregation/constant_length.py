"""Token sums over a constant length (Dr. GRPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from ..types import Rollout


class ConstantLength:
    """Every token counts the same and nothing depends on the batch: `w = 1 / (N L_max)`.

    Like `seq_mean_token_sum` without its length bias, on a scale that does not depend on the generation limit.

    Source: Dr. GRPO (2503.20783), eq. 2 and listing 1. Equals the reduction of TRL's `loss_type="dr_grpo"`.

    Departures: none; the paper also leaves the advantages unscaled, which is TRL's `scale_rewards="none"`.

    Args:
        length: `L_max` in tokens; by default the run's `max_completion_length`.

    Raises:
        ConfigurationError: `length` is not a positive integer.
    """

    __name__ = "constant_length"

    def __init__(self, *, length: int | None = None) -> None:
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise ConfigurationError(f"constant_length: length must be a positive number of tokens, got {length!r}.")
        self.length = length

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`, `1 / (N L_max)` on the mask."""
        length = rollout.totals.max_completion_length if self.length is None else self.length
        return rollout.mask_B_T / (max(rollout.totals.sequences, 1) * length)
