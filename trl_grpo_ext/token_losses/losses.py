"""Token losses: terms beside the policy loss, and losses in place of TRL's clipped one."""

from collections.abc import Mapping

import torch

from ..credit.groups import compute_dtype
from ..guard.parameters import Checked, number
from ..types import LossTerms, Rollout, TokenLossDeclaration


class SquaredLogRatio(Checked):
    """Add `coefficient/2 · (log π - log π_old)²` to each token's loss.

    It pulls every token back to the probability that it was sampled with, also one without an advantage. Its gradient
    is 0 where the policy has not moved, so it acts from the second optimizer step on a generation batch on.

    Source: the estimator k2 of http://joschu.net/blog/kl-approx.html, used as a loss.

    Args:
        coefficient: Factor, above 0.
    """

    __name__ = "squared_log_ratio"
    declares = TokenLossDeclaration(independent=True, needs=("several_updates",))
    coefficient: float = number(0.1, "positive", lambda v: v > 0)

    def loss(self, terms: LossTerms) -> torch.Tensor:
        return 0.5 * self.coefficient * (terms.logps_B_T - terms.old_logps_B_T).square()


class KLCov(Checked):
    """Add `coefficient/2 · (log π - log π_old)²` to the tokens whose log-probability goes most with the advantage.

    Entropy falls by the tokens with a large `c_t = (A_t - mean A) · (log π_old,t - mean log π_old)`, means over the
    tokens that count. The `share` of tokens with the largest `c_t` is held to the old policy; all others are free.

    Source: KL-Cov of The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models (2505.22617).
    Departures: means and the largest share are over the whole generation batch on all ranks and under the policy that
    sampled; the authors take each micro-batch under the policy at hand. Theirs has no clip: set `epsilon` high for
    that. Their code has `|log π - log π_old|`, whose slope at the policy that sampled is the sign of a rounding error.

    Args:
        share: Share of the tokens that are held, above 0 and at most 1; at least one token is.
        coefficient: Factor, above 0.
    """

    __name__ = "kl_cov"
    declares = TokenLossDeclaration(independent=True, needs=("old_logps", "several_updates"))
    share: float = number(0.002, "above 0 and at most 1", lambda v: 0 < v <= 1)
    coefficient: float = number(1.0, "positive", lambda v: v > 0)

    def on_rollout(self, rollout: Rollout) -> Mapping[str, torch.Tensor]:
        covariance_N_T, live_N_T = covariances(rollout)
        count = max(1, int(self.share * float(live_N_T.sum())))
        return {"held": own_rows(largest(covariance_N_T, live_N_T, count), rollout)}

    def loss(self, terms: LossTerms) -> torch.Tensor:
        gap_B_T = terms.logps_B_T - terms.old_logps_B_T
        return 0.5 * self.coefficient * terms.carried_B_T["held"] * gap_B_T.square()

    def measures(self, terms: LossTerms) -> Mapping[str, torch.Tensor]:
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


class SmoothClip(Checked):
    """A clip without a corner: `-A · (1 + ε · tanh((r - 1) / ε))` for the importance ratio `r = π/π_old`.

    Where PPO's gradient falls from `A · r` to 0 at once, this one fades: `A · r · (1 - tanh²((r - 1) / ε))`.

    Source: none of its own; a hyperbolic tangent in place of PPO's clip (1707.06347, equation 7).
    Departures: PPO bounds one side only; here both sides fade.

    Args:
        epsilon: Half the width of the range in which the ratio acts, above 0.
    """

    __name__ = "smooth_clip"
    declares = TokenLossDeclaration(replaces=True, independent=True, needs_advantage=True)
    epsilon: float = number(0.2, "positive", lambda v: v > 0)

    def loss(self, terms: LossTerms) -> torch.Tensor:
        bounded_B_T = 1.0 + self.epsilon * torch.tanh((terms.ratio_B_T - 1.0) / self.epsilon)
        return -terms.advantages_B_T * bounded_B_T


class ClipCov(Checked):
    """PPO's clipped loss without some of the tokens whose log-probability goes with the advantage.

    With `c_t` as in `kl_cov`, tokens with `low < c_t < high` are candidates. A `share` of all tokens that count, drawn
    among them at random, gets no gradient; where fewer are candidates, all of them.

    Source: Clip-Cov of The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models (2505.22617).
    Departures: the covariances are those of the whole generation batch under the policy that sampled, and the tokens
    are drawn once for it, by its step; the authors draw for each micro-batch, among tokens that PPO does not clip.

    Args:
        share: Share of the tokens that are left out at most, above 0 and at most 1; one token may always be.
        low: Lower bound of the covariance of a candidate.
        high: Upper bound.
        epsilon: PPO's clip, above 0 and below 1.
    """

    __name__ = "clip_cov"
    declares = TokenLossDeclaration(replaces=True, independent=True, needs_advantage=True, needs=("old_logps",))
    share: float = number(0.0002, "above 0 and at most 1", lambda v: 0 < v <= 1)
    low: float = number(1.0, "a finite number")
    high: float = number(5.0, "a finite number")
    epsilon: float = number(0.2, "above 0 and below 1", lambda v: 0 < v < 1)

    def on_rollout(self, rollout: Rollout) -> Mapping[str, torch.Tensor]:
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
        return terms.carried_B_T["kept"] * clipped(terms, self.epsilon)

    def measures(self, terms: LossTerms) -> Mapping[str, torch.Tensor]:
        return {"left_out": 1.0 - terms.carried_B_T["kept"]}


class TOPR:
    """Tapered off-policy REINFORCE: completions that are paid learn at full weight, others by a truncated ratio.

        l_t = -A_t · log π_t                    for A_t ≥ 0
        l_t = -A_t · sg(min(R, 1)) · log π_t    for A_t < 0

    `R` is the product of `π/π_old` over the completion, and `sg` stops the gradient. A bad completion that the policy
    has already left pushes no further; a good one is learnt however improbable it has become.

    Source: Tapered Off-Policy REINFORCE (2503.14286, section 3), with its limits 0 and 1 of the truncation.
    Departures: the sign is that of the advantage: the paper's, with the group's mean as its baseline.
    """

    __name__ = "topr"
    declares = TokenLossDeclaration(replaces=True, independent=True, needs_advantage=True)

    def loss(self, terms: LossTerms) -> torch.Tensor:
        weight_B_1 = self._ratio(terms).unsqueeze(1)
        weight_B_T = torch.where(terms.advantages_B_T < 0, weight_B_1, torch.ones_like(terms.advantages_B_T))
        return -terms.advantages_B_T * weight_B_T * terms.logps_B_T

    def measures(self, terms: LossTerms) -> Mapping[str, torch.Tensor]:
        tapered_B_1 = (self._ratio(terms) < 1.0).unsqueeze(1)
        return {"tapered": ((terms.advantages_B_T < 0) & tapered_B_1).to(terms.mask_B_T.dtype)}

    @staticmethod
    def _ratio(terms: LossTerms) -> torch.Tensor:
        """π/π_old of each completion, at most 1, `(B,)`, without a gradient."""
        log_ratio_B_T = terms.logps_B_T.detach() - terms.old_logps_B_T
        return log_ratio_B_T.sum(dim=1).clamp(max=0.0).exp()


def clipped(terms: LossTerms, epsilon: float) -> torch.Tensor:
    """PPO's clipped loss of each token, `-min(r · A, clip(r, 1 - ε, 1 + ε) · A)`, `(B, T)` (1707.06347, equation 7)."""
    ratio_B_T = terms.ratio_B_T
    advantages_B_T = terms.advantages_B_T
    return -torch.min(ratio_B_T * advantages_B_T, ratio_B_T.clamp(1.0 - epsilon, 1.0 + epsilon) * advantages_B_T)
