"""Weights by how much the policy has moved on what follows a token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError
from ..guard.parameters import checked_number
from .returns import discounted_returns, wide

if TYPE_CHECKING:
    from ..types import Forward


class FutureKL:
    """Credit tokens whose continuation the update makes likelier: `A'_t = A_t·f_t`.

    With `d_s = log π - log π_old` of the sampled token,

    - `F_t = Σ_{s≥t} γ^(s-t)·M_s·d_s` over live tokens, with `γ = 2^(-1/half_life)`, and `M_s` 0 where `π/π_old` is
      above `ratio_cap` and else 1;
    - `f_t = clip(exp(F_t), 1 - epsilon_low, 1 + epsilon_high)`, detached;
    - where `A_t < 0` and `π/π_old` is above `safety_threshold`, `f_t` is at most 1.

    While the policy is the one that generated, every `d` is 0 and nothing changes. So this hook does something only
    where a generation batch feeds several optimizer steps: `num_iterations` above 1, or `steps_per_generation` above
    `gradient_accumulation_steps`. Elsewhere TRL has no `π_old`, and `d` is 0 throughout.

    Source: FIPO (2603.19835) and its authors' loss `future_kl`, whose names for these parameters are `decay_rate`,
    `clip_ratio_c`, `future_kl_clip_ratio`, `safety_thresh`. The defaults are those of their 32B run, which clips to
    [1, 1.2] (`future_kl_clip_high_only`); for smaller models they recommend [0.8, 1.2], which is `epsilon_low: 0.2`.

    Departures: distances count live tokens instead of positions. The authors' code further leaves out completions with
    more than one token beyond their dual clip, and keeps weights under the safety threshold from falling below 0.8.

    Args:
        half_life: Live tokens after which a token's share in the sum has halved; positive.
        epsilon_low: How far below 1 a weight may be, in [0, 1].
        epsilon_high: How far above 1 a weight may be; not negative.
        ratio_cap: Tokens of a larger ratio are not in the sum; above 1.
        safety_threshold: Tokens with a negative advantage and a larger ratio are not amplified; positive. None for no
            such limit.

    Raises:
        ConfigurationError: A parameter is out of its range, or both epsilons are 0.
    """

    __name__ = "future_kl"
    per_completion = True

    def __init__(
        self,
        *,
        half_life: float = 32.0,
        epsilon_low: float = 0.0,
        epsilon_high: float = 0.2,
        ratio_cap: float = 10.0,
        safety_threshold: float | None = 10.0,
    ) -> None:
        self.half_life = checked_number("future_kl: half_life", half_life, "a positive number", lambda x: x > 0)
        self.epsilon_low = checked_number(
            "future_kl: epsilon_low", epsilon_low, "a number from 0 to 1", lambda x: 0 <= x <= 1
        )
        self.epsilon_high = checked_number(
            "future_kl: epsilon_high", epsilon_high, "a number that is not negative", lambda x: x >= 0
        )
        if epsilon_low == epsilon_high == 0:
            raise ConfigurationError("future_kl: epsilon_high must be positive where epsilon_low is 0, got 0 for both.")
        self.ratio_cap = checked_number("future_kl: ratio_cap", ratio_cap, "a number above 1", lambda x: x > 1)
        self.safety_threshold = safety_threshold
        if safety_threshold is not None:
            checked_number("future_kl: safety_threshold", safety_threshold, "a positive number", lambda x: x > 0)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        dtype = wide(forward.logps_B_T.dtype)
        moved_B_T = forward.logps_B_T.to(dtype) - forward.old_logps_B_T.to(dtype)
        counted_B_T = torch.where(moved_B_T > math.log(self.ratio_cap), 0.0, moved_B_T)
        future_B_T = discounted_returns(counted_B_T, forward.mask_B_T > 0, 2.0 ** (-1.0 / self.half_life))
        weights_B_T = future_B_T.exp().clamp(min=1 - self.epsilon_low, max=1 + self.epsilon_high)
        if self.safety_threshold is not None:
            risky_B_T = (advantages_B_T < 0) & (moved_B_T > math.log(self.safety_threshold))
            weights_B_T = torch.where(risky_B_T, weights_B_T.clamp(max=1.0), weights_B_T)
        return (advantages_B_T * weights_B_T).to(advantages_B_T.dtype)
