"""Credit by comparison with another policy: the reference that TRL keeps, or a model of the hook's own."""

from collections.abc import Mapping
from typing import Any

import torch

from ..credit.groups import compute_dtype
from ..errors import ConfigurationError
from ..guard.parameters import Checked, choice, number, text
from ..types import POLICY, REFERENCE, HookDeclaration, Rollout, teacher_name
from .returns import discounted_returns, live_tokens_after, live_tokens_first


class KLInReward(Checked):
    """Subtract a KL penalty from the reward, per token, `A'_t = γ^(L-t)·A_t - β Σ_{s≥t} γ^(s-t) KL_s`, or as a sum.

    - `form: return_to_go` is a transform, as above: each token pays for itself and what follows.
    - `form: completion` is a shaper, `r'_i = r_i - β Σ_t KL_t`: what counts is what a completion pays beyond its group.

    `L` is the completion's last live token; sums run over live tokens, and `L-t` and `s-t` count them. With
    `ℓ = log π_old` and `r = log π_ref`, k1 is `ℓ - r`, k2 `(ℓ - r)² / 2`, k3 `exp(r - ℓ) - (r - ℓ) - 1`. As a reward
    with γ = 1, k1 has the gradient of the KL divergence; k2 and k3 have not, nor has TRL's own penalty (`beta`), k3 in
    the loss. With `beta` above 0 the penalty counts twice.

    With a `target`, `β ← β·(1 + clip(KL/target - 1, -0.2, 0.2)·N/horizon)` after each training batch of `N`
    completions, where KL is the mean over them of the sum of k1. β is saved in checkpoints.

    Source: Ziegler et al. (1909.08593) for the penalty in the reward and the adaptive coefficient; the estimators are
    those of http://joschu.net/blog/kl-approx.html; A Comedy of Estimators (2512.21852) compares them.
    Departures: there is no critic, so the penalty's return has no baseline but, in form "completion", that of the
    estimator. `N/horizon` is at most 1, so that β stays positive.

    Args:
        reference: Id or path of a causal language model with the policy's tokenizer, or "reference" for the policy as
            training began: there is one with an adapter, and with `beta` above 0.
        coefficient: β, positive; where it starts if there is a target.
        gamma: γ, in (0, 1]; 1 in form "completion".
        estimator: "k1", "k2" or "k3".
        target: The KL per completion to steer to, in nats, positive. None keeps β as it is.
        horizon: Completions over which the coefficient adapts, positive.
        form: "return_to_go" or "completion".
    """

    __name__ = "kl_in_reward"
    reference: str = text(REFERENCE)
    coefficient: float = number(0.05, "a positive number", lambda x: x > 0)
    gamma: float = number(1.0, "above 0 and at most 1", lambda x: 0 < x <= 1)
    estimator: str = choice("k1", "k2", "k3")
    target: float | None = number(None, "a positive number", lambda x: x > 0)
    horizon: float = number(10_000, "a positive number", lambda x: x > 0)
    form: str = choice("return_to_go", "completion")

    def __post_init__(self) -> None:
        super().__post_init__()
        role = "shaper" if self.form == "completion" else "transform"
        independent = self.target is None  # else the coefficient adapts to the batch
        self.declares = HookDeclaration(role=role, independent=independent, **needs_of(self.reference))
        if role == "shaper":  # a hook has the methods of its role and no others
            self.on_rewards = self._on_rewards
            if self.gamma != 1:
                raise ConfigurationError(f"kl_in_reward: gamma must be 1 with form 'completion', got {self.gamma!r}.")
        else:
            self.on_rollout = self._on_rollout

    def _on_rewards(self, rollout: Rollout) -> torch.Tensor:
        returns_B_T = self._penalty_to_go(rollout, compute_dtype(rollout.rewards_B.dtype))
        first_B_1 = live_tokens_first(rollout.mask_B_T > 0)[:, :1]  # where it is the completion's
        return -returns_B_T.gather(1, first_B_1).squeeze(1).to(rollout.rewards_B.dtype)

    def _on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        dtype = compute_dtype(advantages_B_T.dtype)
        discounts_B_T = self.gamma ** live_tokens_after(rollout.mask_B_T > 0).to(dtype)
        return (discounts_B_T * advantages_B_T - self._penalty_to_go(rollout, dtype)).to(advantages_B_T.dtype)

    def _penalty_to_go(self, rollout: Rollout, dtype: torch.dtype) -> torch.Tensor:
        """β times the return-to-go of the KL estimates, `(B, T)`; with a target, adapt β for the next batch."""
        live_B_T = rollout.mask_B_T > 0
        logps_B_T = logps_of("old_logps", rollout).to(dtype)
        ref_logps_B_T = logps_of(self.reference, rollout).to(dtype)
        kl_B_T = kl_estimate(logps_B_T, ref_logps_B_T, self.estimator)
        penalty_B_T = self.coefficient * discounted_returns(kl_B_T, live_B_T, self.gamma)
        if self.target is not None and rollout.training:
            kl_N = rollout.gather(torch.where(live_B_T, logps_B_T - ref_logps_B_T, 0.0).sum(dim=1))
            live_N = rollout.gather(rollout.lengths_B) > 0
            if bool(live_N.any()):
                error = min(max(float(kl_N[live_N].mean()) / self.target - 1, -0.2), 0.2)
                self.coefficient *= 1 + error * min(rollout.totals.sequences / self.horizon, 1.0)
        return penalty_B_T

    def state_dict(self) -> dict[str, Any]:
        return {} if self.target is None else {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.target is not None and "coefficient" in state:
            self.coefficient = float(state["coefficient"])


def kl_estimate(logps_B_T: torch.Tensor, ref_logps_B_T: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy ‖ reference) at each sampled token, in nats."""
    log_ratio_B_T = logps_B_T - ref_logps_B_T
    if estimator == "k1":
        return log_ratio_B_T
    if estimator == "k2":
        return log_ratio_B_T.square() / 2
    return torch.expm1(-log_ratio_B_T) + log_ratio_B_T


class TeacherLogRatio(Checked):
    """Credit each token by how much likelier the teacher finds it: `A_t = c·(log π_teacher - log π_old)`.

    In expectation over the policy's own tokens this is the gradient of the reverse KL divergence from the policy to the
    teacher, token by token: distillation on the student's own completions. With `prompt`, the teacher sees the prompt
    in another column, such as one with feedback, a hint or a solution; with `teacher: policy` that is
    self-distillation. It needs no reward and no group. In mode "add" it is a transform.

    Source: MiniLLM (2306.08543) minimises the reverse KL on the student's own samples by policy gradient. SDPO
    (2601.20802) and self-distillation (2601.19897) for a teacher that is the policy after another prompt.
    Departures: each token is credited with its own log-ratio alone, where MiniLLM sums those that follow
    (`kl_in_reward` does, with the teacher as the reference), normalises by length and mixes the teacher into the
    sampling. SDPO has the divergence over the top K tokens, and an exponential average of the policy as its teacher.

    Args:
        teacher: Id or path of a causal language model with the policy's tokenizer; "reference" for the policy that TRL
            keeps as the reference; "policy", with `prompt`, for the policy itself.
        prompt: The column with the teacher's prompts, texts or messages; None: the policy's own prompts.
        coefficient: c, positive.
        mode: "replace" or "add".
    """

    __name__ = "teacher_log_ratio"
    teacher: str = text(REFERENCE)
    coefficient: float = number(1.0, "positive", lambda x: x > 0)
    mode: str = choice("replace", "add")
    prompt: str | None = text(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is None and self.teacher == POLICY:
            raise ConfigurationError("teacher_log_ratio: teacher 'policy' needs prompt; after its own it is equal.")
        self._sees = teacher_name(self.teacher, self.prompt)
        self.declares = HookDeclaration(
            role="estimator" if self.mode == "replace" else "transform",
            independent=True,
            makes_signal=self.mode == "replace",
            uses_total_reward=False,
            uses_weights=False,
            **needs_of(self._sees),
        )

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        dtype = compute_dtype(advantages_B_T.dtype)
        log_ratio_B_T = logps_of(self._sees, rollout).to(dtype) - logps_of("old_logps", rollout).to(dtype)
        new_B_T = self.coefficient * log_ratio_B_T
        return (advantages_B_T + new_B_T if self.mode == "add" else new_B_T).to(advantages_B_T.dtype)


class SelfDistilled(Checked):
    """Weigh each token's advantage by how much a teacher that knows more agrees with it (RLSD).

    `A_t = A_t·[(1 - λ) + λ·clip(exp(sign(A_t)·d_t), 1 - ε, 1 + ε)]` with `d_t = log π(y_t | x, hint) - log π(y_t | x)`.
    The reward alone decides the direction of a token's update; the teacher, by default the policy itself after the
    prompt in the column `prompt`, decides its size within `1 ± λε`.

    Source: RLSD (2604.03128), equations of its token-level reweighting; ms-swift has it too.
    Departures: λ is constant, where a schedule may let it fall during a training.

    Args:
        prompt: The column with the teacher's prompts, texts or messages.
        teacher: "policy", "reference", or the id or path of a causal language model with the policy's tokenizer.
        strength: λ, above 0 and at most 1.
        clip: ε, above 0 and at most 1.
    """

    __name__ = "self_distilled"
    prompt: str = text("teacher_prompt")
    teacher: str = text(POLICY)
    strength: float = number(1.0, "above 0 and at most 1", lambda x: 0 < x <= 1)
    clip: float = number(0.2, "above 0 and at most 1", lambda x: 0 < x <= 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sees = teacher_name(self.teacher, self.prompt)
        self.declares = HookDeclaration(role="transform", independent=True, **needs_of(self._sees))

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        dtype = compute_dtype(advantages_B_T.dtype)
        teacher_B_T = logps_of(self._sees, rollout).to(dtype)
        logps_B_T = logps_of("old_logps", rollout).to(dtype)
        agreement_B_T = (advantages_B_T.sign().to(dtype) * (teacher_B_T - logps_B_T)).exp()
        factors_B_T = 1 + self.strength * (agreement_B_T.clamp(1 - self.clip, 1 + self.clip) - 1)
        return (advantages_B_T.to(dtype) * factors_B_T).to(advantages_B_T.dtype)


def needs_of(name: str) -> dict[str, Any]:
    """The `needs` and the `teachers` that a hook declares which compares the policy with this model."""
    if name == REFERENCE:
        return {"needs": ("old_logps", "ref_logps")}
    return {"needs": ("old_logps",), "teachers": (name,)}


def logps_of(name: str, rollout: Rollout) -> torch.Tensor:
    """Log-probabilities `(B, T)` by their name among the needs, of the reference, or of a teacher."""
    own = {"old_logps": "old_logps_B_T", "sampling_logps": "sampling_logps_B_T", REFERENCE: "ref_logps_B_T"}
    found = getattr(rollout, own[name]) if name in own else rollout.teacher_logps_B_T.get(name)
    if found is None:
        raise ConfigurationError(f"The rollout has no log-probabilities of {name!r}, which the hook needs.")
    return found
