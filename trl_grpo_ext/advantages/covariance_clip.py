"""No update on the few tokens that drive the entropy down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError
from ..guard.parameters import checked_number
from .returns import wide

if TYPE_CHECKING:
    from ..types import Forward


class CovarianceClip:
    """Set a few advantages to 0, those of tokens whose advantage and log-probability rise together the most.

    With means over all live tokens of the micro-batch, on all ranks, each token has
    `cov_t = (log π_t - mean log π)·(A_t - mean A)`. Tokens with `low ≤ cov_t ≤ high` are candidates. Of `n` live
    tokens, `max(⌊ratio·n⌋, 1)` candidates lose their advantage, those with the largest `cov_t` first; tokens with the
    same `cov_t` as the last of these lose it too. In a micro-batch of few tokens, 1 is more than the ratio.

    Where that covariance is high, the update makes likely tokens likelier, and the policy's entropy falls; a handful of
    tokens do most of it.

    Source: Clip-Cov of The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models (2505.22617), and
    its implementation in verl, whose defaults these are.

    Departures: there the tokens are drawn from the candidates at random; here they are chosen by size, so that the
    result does not depend on the order of the rows, on padding, or on how a micro-batch is spread over ranks. The means
    and the number are those of all ranks' micro-batches instead of each rank's own. Tokens that the loss's own clipping
    already holds back are no candidates there; here they may be, for a hook does not know of it.

    Args:
        low: Covariances below it are let be.
        high: Covariances above it are let be; greater than `low`.
        ratio: Share of the live tokens to choose, in (0, 1].

    Raises:
        ConfigurationError: A parameter is out of its range.
    """

    __name__ = "covariance_clip"

    def __init__(self, *, low: float = 1.0, high: float = 5.0, ratio: float = 0.0002) -> None:
        self.low = checked_number("covariance_clip: low", low, "a finite number", lambda x: True)
        self.high = checked_number("covariance_clip: high", high, "a finite number", lambda x: True)
        if not low < high:
            raise ConfigurationError(f"covariance_clip: high must be greater than low, {low!r}, got {high!r}.")
        self.ratio = checked_number("covariance_clip: ratio", ratio, "above 0 and at most 1", lambda x: 0 < x <= 1)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        live_B_T = forward.mask_B_T > 0
        dtype = wide(advantages_B_T.dtype)
        count = int(forward.gather(live_B_T.sum(dim=1)).sum())

        def centred(values_B_T: torch.Tensor) -> torch.Tensor:
            values_B_T = torch.where(live_B_T, values_B_T, 0.0).to(dtype)
            return values_B_T - forward.gather(values_B_T.sum(dim=1)).sum() / max(count, 1)

        covariances_B_T = centred(forward.logps_B_T) * centred(advantages_B_T)
        candidates_B_T = live_B_T & (covariances_B_T >= self.low) & (covariances_B_T <= self.high)
        all_covariances, all_candidates = forward.gather(covariances_B_T), forward.gather(candidates_B_T.to(dtype)) > 0
        candidates = all_covariances[all_candidates]
        if not len(candidates):
            return advantages_B_T
        chosen = min(max(int(self.ratio * count), 1), len(candidates))
        smallest_chosen = candidates.topk(chosen).values[-1]
        return torch.where(candidates_B_T & (covariances_B_T >= smallest_chosen), 0.0, advantages_B_T)
