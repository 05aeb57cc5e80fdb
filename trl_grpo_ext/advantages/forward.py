"""Hooks at the loss forward: credit by the current policy's view of a token.

Log-probabilities and entropies are the current policy's, detached, in nats.
"""

import math
from dataclasses import replace

import torch

from ..credit.groups import compute_dtype
from ..guard.parameters import Checked, choice, number
from ..types import Forward, HookDeclaration
from .returns import discounted_returns


class EntropyShaping(Checked):
    """Credit uncertain tokens a little more: `A'_t = A_t + min(α·H_t, |A_t| / κ)` with the token's entropy `H_t`.

    With κ > 1 the bonus never flips a sign, and advantages of 0 stay 0.

    Source: Reasoning with Exploration: An Entropy Perspective (2506.14758), eq. 4 and 5.

    Args:
        alpha: α, advantage per nat; positive. The paper uses 0.4 for GRPO.
        kappa: κ, greater than 1. The paper uses 2.
    """

    __name__ = "entropy_shaping"
    declares = HookDeclaration(role="forward", independent=True)
    alpha: float = number(0.4, "a positive number", lambda x: x > 0)
    kappa: float = number(2.0, "greater than 1, so that the bonus turns no sign", lambda x: x > 1)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        bonus_B_T = torch.minimum(self.alpha * forward.entropies_B_T, advantages_B_T.abs() / self.kappa)
        return advantages_B_T + bonus_B_T.to(advantages_B_T.dtype)


class ZeroVarianceCredit(Checked):
    """Learn from prompts that are always or never solved, with advantages from the tokens' entropy `H_t`.

    In groups without signal, whose advantages are all 0 because all rewards are equal, right completions get
    `A_t = α·H_t`, wrong ones `A_t = -α·(max_s H_s - H_t)` with the maximum over the completion's live tokens. A
    completion is right if its reward, before any shaper, is above `correct_above`. Refused beside `skip_zero_variance`.

    Source: RL-ZVP (2509.21880).
    Departures: "right" is a threshold on the weighted total of the rewards; the paper has rewards of 0 and 1.

    Args:
        alpha: α, advantage per nat; positive.
        correct_above: Rewards above it are right.
    """

    __name__ = "zero_variance_credit"
    declares = HookDeclaration(role="forward", needs=("entropies",), independent=True, makes_signal=True)
    alpha: float = number(0.1, "a positive number", lambda x: x > 0)
    correct_above: float = number(0.5, "a finite number")

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        live_B_T = forward.mask_B_T > 0
        entropies_B_T = torch.where(live_B_T, forward.entropies_B_T, 0.0).to(compute_dtype(forward.entropies_B_T.dtype))
        highest_B = entropies_B_T.amax(dim=1, keepdim=True)
        right_B = (forward.raw_rewards_B > self.correct_above).unsqueeze(1)
        credit_B_T = self.alpha * torch.where(right_B, entropies_B_T, entropies_B_T - highest_B)
        equal_B = forward.zero_variance_B & ~torch.isnan(forward.raw_rewards_B)
        return torch.where(equal_B.unsqueeze(1), credit_B_T.to(advantages_B_T.dtype), advantages_B_T)


class LowProbability(Checked):
    """Scale each token's advantage with its probability: `A'_t = A_t·(α·π_t + 1 - α)`.

    `π_t` is the sampled token's probability when it was generated. Improbable tokens have the largest gradients.

    Source: the advantage reweighting of Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs (2505.12929) and
    its authors' code, which weighs by the old policy, once per batch, with α = 0.2.

    Args:
        alpha: α, in [0, 1].
    """

    __name__ = "low_probability"
    declares = HookDeclaration(role="forward", independent=True)
    alpha: float = number(0.2, "a number from 0 to 1", lambda x: 0 <= x <= 1)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        # Where TRL has no old policy, the one being trained is the one that generated.
        probabilities_B_T = forward.old_logps_B_T.to(compute_dtype(forward.old_logps_B_T.dtype)).exp()
        return (advantages_B_T * (self.alpha * probabilities_B_T + 1 - self.alpha)).to(advantages_B_T.dtype)


class FutureKL(Checked):
    """Credit tokens whose continuation the update makes likelier: `A'_t = A_t·f_t`.

    With `d_s = log π - log π_old` of the sampled token,

    - `F_t = Σ_{s≥t} γ^(s-t)·M_s·d_s` over live tokens, `γ = 2^(-1/half_life)`, `M_s` 0 where `π/π_old > ratio_cap`,
      else 1;
    - `f_t = clip(exp(F_t), 1 - epsilon_low, 1 + epsilon_high)`, detached;
    - where `A_t < 0` and `π/π_old` is above `safety_threshold`, `f_t` is at most 1.

    In the first update after generation every `d` is 0, so runs with one update per generation batch are refused.

    Source: FIPO (2603.19835) and its authors' loss `future_kl`. The defaults are those of their 32B run, which clips to
    [1, 1.2]; for smaller models they recommend `epsilon_low: 0.2`.
    Departures: distances count live tokens. The authors' code leaves out completions with more than one token beyond
    their dual clip, and keeps weights under the safety threshold from falling below 0.8.

    Args:
        half_life: Live tokens after which a token's share in the sum has halved; positive.
        epsilon_low: How far below 1 a weight may be, in [0, 1].
        epsilon_high: How far above 1 a weight may be; not negative.
        ratio_cap: Tokens of a larger ratio are not in the sum; above 1.
        safety_threshold: Tokens with a negative advantage and a larger ratio are not amplified; positive.
    """

    __name__ = "future_kl"
    declares = HookDeclaration(role="forward", needs=("several_updates",), independent=True)
    half_life: float = number(32.0, "a positive number", lambda x: x > 0)
    epsilon_low: float = number(0.0, "from 0 to 1", lambda x: 0 <= x <= 1)
    epsilon_high: float = number(0.2, "at least 0", lambda x: x >= 0)
    ratio_cap: float = number(10.0, "a number above 1", lambda x: x > 1)
    safety_threshold: float = number(10.0, "a positive number", lambda x: x > 0)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        dtype = compute_dtype(forward.logps_B_T.dtype)
        moved_B_T = forward.logps_B_T.to(dtype) - forward.old_logps_B_T.to(dtype)
        counted_B_T = torch.where(moved_B_T > math.log(self.ratio_cap), 0.0, moved_B_T)
        future_B_T = discounted_returns(counted_B_T, forward.mask_B_T > 0, 2.0 ** (-1.0 / self.half_life))
        weights_B_T = future_B_T.exp().clamp(min=1 - self.epsilon_low, max=1 + self.epsilon_high)
        risky_B_T = (advantages_B_T < 0) & (moved_B_T > math.log(self.safety_threshold))
        weights_B_T = torch.where(risky_B_T, weights_B_T.clamp(max=1.0), weights_B_T)
        return (advantages_B_T * weights_B_T).to(advantages_B_T.dtype)


_MASK_BY_RATIO = HookDeclaration(role="forward", needs=("several_updates",), independent=True, last=True)


class DivergenceMask(Checked):
    """Drop tokens whose probability has moved too far the way the advantage pushes: `A'_t = 0` there, else `A_t`.

    With the probability π of the sampled token now and `μ` when it was generated, a token is dropped if `A_t > 0` and
    `π - μ > high`, or `A_t < 0` and `π - μ < -low`; with `divergence="kl"` the distance is
    `μ·log(μ/π) + (1-μ)·log((1-μ)/(1-π))`, in nats. It takes the place of the ratio clip, so let that not bind:
    `loss_type: cispo` with `epsilon_high: 20` has the gradient of the authors' code, TRL's other clipped losses with
    `epsilon: 1` and `epsilon_high: 1e6` have prime-rl's.

    Source: DPPO with the binary total variation or KL divergence, Rethinking the Trust Region in LLM Reinforcement
    Learning (2602.04879), as verl (`dppo_tv`, `dppo_kl`) and prime-rl (its default loss) have it.
    Departures: μ is TRL's old policy, computed by the model that trains, where the authors' is the inference engine's.

    Args:
        low: How far the probability may fall under a negative advantage, above 0.
        high: How far it may rise under a positive advantage, in the same unit.
        divergence: "tv" for the difference of the probabilities, "kl" for the divergence, for which 0.05 is usual.
    """

    __name__ = "divergence_mask"
    declares = replace(_MASK_BY_RATIO, conformance={"parameters": {"low": 0.01, "high": 0.01}})
    low: float = number(0.2, "above 0", lambda x: x > 0)
    high: float = number(0.2, "above 0", lambda x: x > 0)
    divergence: str = choice("tv", "kl")

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        dtype = compute_dtype(forward.logps_B_T.dtype)
        logps_B_T = forward.logps_B_T.to(dtype)
        old_logps_B_T = forward.old_logps_B_T.to(dtype)
        moved_B_T = logps_B_T.exp() - old_logps_B_T.exp()
        if self.divergence == "kl":
            moved_B_T = binary_kl(old_logps_B_T, logps_B_T) * moved_B_T.sign()
        too_far_B_T = torch.where(advantages_B_T > 0, moved_B_T > self.high, moved_B_T < -self.low)
        return torch.where(too_far_B_T, 0.0, advantages_B_T)


class RatioBounds(Checked):
    """Bound what completions of an older policy weigh: `A'_t = A_t·f_t`, by the ratio `r = π/π_old`.

    The modes `token_truncate` and `sequence_truncate` have `f = min(1, high/r)`, so that the loss weighs by
    `min(r, high)`; `token_mask` and `sequence_mask` have 1 from `low` to `high`, else 0. `r` is the token's, or the
    geometric mean over the completion's live tokens.

    PPO's clip does not bound the ratio of a token with a negative advantage. This is for samples several updates old,
    as TRL's asynchronous trainer has them.

    Source: the modes of TRL's `vllm_importance_sampling_mode`, which apply to the sampler's rounding and not to age;
    truncation is that of V-trace (1802.01561, section 4.1).
    Departures: TRL takes the product over a completion, which leaves the bounds by length alone; this the mean.

    Args:
        mode: One of the four.
        high: Largest ratio, above 1.
        low: Smallest ratio that a mask keeps, from 0 to below 1.
    """

    __name__ = "ratio_bounds"
    declares = replace(_MASK_BY_RATIO, conformance={"parameters": {"high": 1.01, "low": 0.99}})
    mode: str = choice("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    high: float = number(2.0, "a number above 1", lambda x: x > 1)
    low: float = number(0.0, "from 0 to below 1", lambda x: 0 <= x < 1)

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        dtype = compute_dtype(forward.logps_B_T.dtype)
        live_B_T = forward.mask_B_T > 0
        moved_B_T = torch.where(live_B_T, forward.logps_B_T.to(dtype) - forward.old_logps_B_T.to(dtype), 0.0)
        if self.mode.startswith("sequence"):
            moved_B_T = moved_B_T.sum(dim=1, keepdim=True) / live_B_T.sum(dim=1, keepdim=True).clamp(min=1)
        ratio_B_T = moved_B_T.exp()
        if self.mode.endswith("truncate"):
            factor_B_T = (self.high / ratio_B_T).clamp(max=1.0)
        else:
            factor_B_T = ((ratio_B_T >= self.low) & (ratio_B_T <= self.high)).to(dtype)
        return (advantages_B_T * factor_B_T).to(advantages_B_T.dtype)


def binary_kl(logps_B_T: torch.Tensor, other_logps_B_T: torch.Tensor) -> torch.Tensor:
    """KL divergence in nats of "this token or another" under one policy from that under another, `(B, T)`."""
    # The largest number below 1 stands for a probability of 1, whose other tokens would have none.
    rest_B_T, other_rest_B_T = (
        (-one.exp().clamp(max=1.0 - torch.finfo(one.dtype).eps)).log1p() for one in (logps_B_T, other_logps_B_T)
    )
    this_B_T = logps_B_T.exp() * (logps_B_T - other_logps_B_T)
    return this_B_T + rest_B_T.exp() * (rest_B_T - other_rest_B_T)
