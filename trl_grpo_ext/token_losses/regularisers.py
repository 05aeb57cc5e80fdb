"""Terms beside the policy loss that keep the policy near the one that sampled."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..credit.groups import compute_dtype
from ..guard.parameters import checked_number
from ..types import LossTerms, Rollout, TokenLossDeclaration


class SquaredLogRatio:
    """Add `coefficient/2 · (log π - log π_old)²` to each token's loss.

    It pulls every token back to the probability that it was sampled with, also one without an advantage. Its gradient,
    `coefficient · (log π - log π_old) · ∇log π`, is 0 where the policy has not moved, so it acts from the second
    optimizer step on a generation batch on.

    Source: the estimator k2 of http://joschu.net/blog/kl-approx.html, used as a loss.

    Departures: none.

    Args:
        coefficient: Factor, above 0.
    """

    __name__ = "squared_log_ratio"
    declares = TokenLossDeclaration(independent=True, needs=("several_updates",))

    def __init__(self, *, coefficient: float = 0.1) -> None:
        self.coefficient = checked_number("squared_log_ratio: coefficient", coefficient, "positive", lambda v: v > 0)

    def loss(self, terms: LossTerms) -> torch.Tensor:
        """Return each token's loss `(B, T)`."""
        return 0.5 * self.coefficient * (terms.logps_B_T - terms.old_logps_B_T).square()


class KLCov:
    """Add `coefficient/2 · (log π - log π_old)²` to the tokens whose log-probability goes most with the advantage.

    Entropy falls by the tokens with a large `c_t = (A_t - mean A) · (log π_old,t - mean log π_old)`, means over the
    tokens that count: a probable token that is paid becomes more probable. The `share` of tokens with the largest `c_t`
    is held to the old policy by a penalty; all others are free.

    Source: KL-Cov of The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models (2505.22617, section
    4).

    Departures: means and the largest share are over the whole generation batch on all ranks and under the policy that
    sampled, so that they do not depend on how the batch is cut; the authors take each micro-batch under the policy at
    hand. It is added to TRL's own (clipped) loss; theirs has no clip: set `epsilon` high for that.
    The divergence is estimated by `(log π - log π_old)²/2`; the authors' code has `|log π - log π_old|`, whose slope at
    the policy that sampled is the sign of a rounding error.

    Args:
        share: Share of the tokens that are held, above 0 and at most 1; at least one token is.
        coefficient: Factor, above 0.
    """

    __name__ = "kl_cov"
    declares = TokenLossDeclaration(independent=True, needs=("old_logps", "several_updates"))

    def __init__(self, *, share: float = 0.002, coefficient: float = 1.0) -> None:
        self.share = checked_number("kl_cov: share", share, "above 0 and at most 1", lambda v: 0 < v <= 1)
        self.coefficient = checked_number("kl_cov: coefficient", coefficient, "positive", lambda v: v > 0)

    def on_rollout(self, rollout: Rollout) -> Mapping[str, torch.Tensor]:
        """Find the tokens that are held."""
        covariance_N_T, live_N_T = covariances(rollout)
        count = max(1, int(self.share * float(live_N_T.sum())))
        return {"held": own_rows(largest(covariance_N_T, live_N_T, count), rollout)}

    def loss(self, terms: LossTerms) -> torch.Tensor:
        """Return each token's loss `(B, T)`."""
        gap_B_T = terms.logps_B_T - terms.old_logps_B_T
        return 0.5 * self.coefficient * terms.carried_B_T["held"] * gap_B_T.square()

    def measures(self, terms: LossTerms) -> Mapping[str, torch.Tensor]:
        """The share of tokens that are held."""
        return {"held": terms.carried_B_T["held"]}


def covariances(rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's `(A - mean A) · (log π_old - mean log π_old)`, `(N, T)`, and where tokens count, over all ranks."""
    assert rollout.advantages_B_T is not None  # a token loss runs after the hooks
    assert rollout.old_logps_B_T is not None  # it is among the needs
    dtype = compute_dtype(rollout.old_logps_B_T.dtype)
    live_N_T = rollout.gather(rollout.mask_B_T) > 0
    advantages_N_T, logps_N_T = (
        torch.where(live_N_T, rollout.gather(values_B_T.contiguous()).to(dtype), 0.0)
        for values_B_T in (rollout.advantages_B_T, rollout.old_logps_B_T)
    )
    tokens = live_N_T.sum().clamp(min=1)
    covariance_N_T = (advantages_N_T - advantages_N_T.sum() / tokens) * (logps_N_T - logps_N_T.sum() / tokens)
    return torch.where(live_N_T, covariance_N_T, 0.0), live_N_T


def largest(values_N_T: torch.Tensor, among_N_T: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest of some values are, `(N, T)`, bool; of equal ones the first."""
    order = values_N_T.masked_fill(~among_N_T, -torch.inf).flatten().argsort(descending=True, stable=True)
    chosen = torch.zeros(values_N_T.numel(), dtype=torch.bool, device=values_N_T.device)
    chosen[order[:count]] = True
    return chosen.view(values_N_T.shape) & among_N_T


def own_rows(values_N_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """This rank's part `(B, T)` of a gathered tensor, as numbers of the mask's kind."""
    return values_N_T[rollout.local_rows, : rollout.mask_B_T.size(1)].to(rollout.mask_B_T.dtype)
