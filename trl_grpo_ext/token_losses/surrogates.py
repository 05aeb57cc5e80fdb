"""Losses in place of TRL's clipped policy loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..guard.parameters import checked_number
from ..types import LossTerms, Rollout, TokenLossDeclaration
from .regularisers import covariances, largest, own_rows


class SmoothClip:
    """A clip without a corner: `-A · (1 + ε · tanh((r - 1) / ε))` for the importance ratio `r = π/π_old`.

    Near `r = 1` it is PPO's loss. Where PPO's gradient falls from `A · r` to 0 at once, this one fades:
    `A · r · (1 - tanh²((r - 1) / ε))`.

    Source: none of its own; a hyperbolic tangent in place of PPO's clip (1707.06347, equation 7).

    Departures: PPO takes the smaller of the bounded and the unbounded term, so that it bounds one side only; here both
    sides fade.

    Args:
        epsilon: Half the width of the range in which the ratio acts, above 0.
    """

    __name__ = "smooth_clip"
    declares = TokenLossDeclaration(replaces=True, independent=True, needs_advantage=True)

    def __init__(self, *, epsilon: float = 0.2) -> None:
        self.epsilon = checked_number("smooth_clip: epsilon", epsilon, "positive", lambda v: v > 0)

    def loss(self, terms: LossTerms) -> torch.Tensor:
        """Return each token's loss `(B, T)`."""
        bounded_B_T = 1.0 + self.epsilon * torch.tanh((terms.ratio_B_T - 1.0) / self.epsilon)
        return -terms.advantages_B_T * bounded_B_T


class ClipCov:
    """PPO's clipped loss without some of the tokens whose log-probability goes with the advantage.

    With `c_t` as in `kl_cov`, tokens with `low < c_t < high` are candidates. A `share` of all tokens that count, drawn
    among them at random, gets no gradient; where fewer are candidates, all of them.

    Source: Clip-Cov of The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models (2505.22617,
    section 4).

    Departures: as for `kl_cov`, the covariances are those of the whole generation batch under the policy that sampled,
    and the tokens are drawn once for it, by its step, so that they do not depend on how it is cut; the authors draw for
    each micro-batch, among tokens that PPO does not clip.

    Args:
        share: Share of the tokens that are left out at most, above 0 and at most 1; one token may always be.
        low: Lower bound of the covariance of a candidate.
        high: Upper bound.
        epsilon: PPO's clip, above 0 and below 1.
    """

    __name__ = "clip_cov"
    declares = TokenLossDeclaration(replaces=True, independent=True, needs_advantage=True, needs=("old_logps",))

    def __init__(self, *, share: float = 0.0002, low: float = 1.0, high: float = 5.0, epsilon: float = 0.2) -> None:
        self.share = checked_number("clip_cov: share", share, "above 0 and at most 1", lambda v: 0 < v <= 1)
        self.low = checked_number("clip_cov: low", low, "a finite number")
        self.high = checked_number("clip_cov: high", high, f"above low = {low}", lambda v: v > low)
        self.epsilon = checked_number("clip_cov: epsilon", epsilon, "above 0 and below 1", lambda v: 0 < v < 1)

    def on_rollout(self, rollout: Rollout) -> Mapping[str, torch.Tensor]:
        """Draw the tokens that are left out."""
        covariance_N_T, live_N_T = covariances(rollout)
        candidates_N_T = live_N_T & (covariance_N_T > self.low) & (covariance_N_T < self.high)
        count = max(1, int(self.share * float(live_N_T.sum())))
        # The same on all ranks and after resuming: by the step, and from no generator of the run's.
        drawn = torch.rand(int(live_N_T.sum()), generator=torch.Generator().manual_seed(rollout.step))
        draw_N_T = torch.zeros_like(covariance_N_T)
        draw_N_T[live_N_T] = drawn.to(draw_N_T)  # one for each token that counts, however far rows are padded
        dropped_N_T = largest(draw_N_T, candidates_N_T, count)
        return {"kept": own_rows(~dropped_N_T, rollout)}

    def loss(self, terms: LossTerms) -> torch.Tensor:
        """Return each token's loss `(B, T)`."""
        return terms.carried_B_T["kept"] * clipped(terms, self.epsilon)

    def measures(self, terms: LossTerms) -> Mapping[str, torch.Tensor]:
        """The share of tokens that are left out."""
        return {"left_out": 1.0 - terms.carried_B_T["kept"]}


class TOPR:
    """Tapered off-policy REINFORCE: completions that are paid learn at full weight, others by a truncated ratio.

        l_t = -A_t · log π_t                    for A_t ≥ 0
        l_t = -A_t · sg(min(R, 1)) · log π_t    for A_t < 0

    `R` is the product of `π/π_old` over the completion, and `sg` stops the gradient. A bad completion that the policy
    has already left, so that `R` is small, pushes no further; a good one is learnt however improbable it has become. So
    it stays stable on completions of much older policies.

    Source: Tapered Off-Policy REINFORCE (2503.14286, section 3), with its limits 0 and 1 of the truncation.

    Departures: the sign is that of the advantage, not of the reward, which is the paper's with the group's mean as its
    baseline.
    """

    __name__ = "topr"
    declares = TokenLossDeclaration(replaces=True, independent=True, needs_advantage=True)

    def loss(self, terms: LossTerms) -> torch.Tensor:
        """Return each token's loss `(B, T)`."""
        weight_B_1 = self._ratio(terms).unsqueeze(1)
        weight_B_T = torch.where(terms.advantages_B_T < 0, weight_B_1, torch.ones_like(terms.advantages_B_T))
        return -terms.advantages_B_T * weight_B_T * terms.logps_B_T

    def measures(self, terms: LossTerms) -> Mapping[str, torch.Tensor]:
        """The share of tokens whose completion is truncated."""
        tapered_B_1 = (self._ratio(terms) < 1.0).unsqueeze(1)
        return {"tapered": ((terms.advantages_B_T < 0) & tapered_B_1).to(terms.mask_B_T.dtype)}

    @staticmethod
    def _ratio(terms: LossTerms) -> torch.Tensor:
        """π/π_old of each completion, at most 1, `(B,)`, without a gradient."""
        log_ratio_B_T = terms.logps_B_T.detach() - terms.old_logps_B_T
        return log_ratio_B_T.sum(dim=1).clamp(max=0.0).exp()


def clipped(terms: LossTerms, epsilon: float) -> torch.Tensor:
    """PPO's clipped loss of each token, `-min(r · A, clip(r, 1 - ε, 1 + ε) · A)`, `(B, T)` (1707.06347, equation 7)."""
    ratio_B_T, advantages_B_T = terms.ratio_B_T, terms.advantages_B_T
    return -torch.min(ratio_B_T * advantages_B_T, ratio_B_T.clamp(1.0 - epsilon, 1.0 + epsilon) * advantages_B_T)
