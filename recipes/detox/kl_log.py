"""Log the KL from the reference and its coefficient beside the rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.trainer import RecipeTrainer

import torch

from trl_grpo_ext.advantages.policies import KLInReward, logps_of, needs_of
from trl_grpo_ext.guard.parameters import checked_text
from trl_grpo_ext.types import HookDeclaration

if TYPE_CHECKING:
    from trl_grpo_ext.types import Rollout

KL = "kl_per_completion"
COEFFICIENT = "kl_coefficient"


class KLMeter:
    """An advantage hook that changes nothing and keeps the KL per completion, in training and in evaluation.

    It is `Σ_t log π_old(t) - log π_ref(t)` over a completion's live tokens, in nats, and its mean over the completions
    of all ranks that have any: what the adaptive coefficient of `kl_in_reward` steers by.

    Args:
        reference: As in `kl_in_reward`. The model is loaded once for both.
    """

    __name__ = "kl_meter"

    def __init__(self, *, reference: str = "reference") -> None:
        self.reference = checked_text("kl_meter: reference", reference)
        self.declares = HookDeclaration(role="transform", **needs_of(reference))
        self._seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Measure; return the advantages `(B, T)` as they are."""
        logps_B_T = logps_of("old_logps", rollout).float()
        ref_logps_B_T = logps_of(self.reference, rollout).float()
        kl_B = torch.where(rollout.mask_B_T > 0, logps_B_T - ref_logps_B_T, 0.0).sum(dim=1)
        kl_N = rollout.gather(kl_B)
        lengths_N = rollout.gather(rollout.lengths_B)
        self._seen[rollout.training].append(kl_N[lengths_N > 0].cpu())
        return advantages_B_T

    def take(self, training: bool) -> float | None:
        """The mean since the last call; None if there was no completion."""
        seen = self._seen[training]
        self._seen[training] = []
        values = torch.cat(seen) if seen else torch.empty(0)
        return float(values.mean()) if len(values) else None


class KLLoggingTrainer(RecipeTrainer):
    """Logs what the trainer's `KLMeter` measured, and the coefficient of its `kl_in_reward`."""

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Log as usual, with both numbers in every line about rollouts."""
        training = bool(self.model.training)
        for hook in self.advantage_hooks:
            prefix = "" if training else "eval_"
            if isinstance(hook, KLMeter) and (kl := hook.take(training)) is not None:
                logs[f"{prefix}{KL}"] = kl
            if isinstance(hook, KLInReward) and not {"loss", "eval_loss"}.isdisjoint(logs):
                logs[f"{prefix}{COEFFICIENT}"] = hook.coefficient
        super().log(logs, *arguments, **keywords)
