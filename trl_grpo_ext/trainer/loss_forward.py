"""One call of TRL's `_compute_loss`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..credit.chain import Change
from ..errors import UpstreamError
from ..types import Forward
from .batch import BatchKeys
from .facts import Progress

Inherited = Callable[..., Any]  # the method that an override replaces: TRL's, or that of a user's class in between


@dataclass(frozen=True)
class PolicyPass:
    """What the policy's forward pass inside a loss returned, and what the forward hooks changed after it."""

    logps_B_T: torch.Tensor
    entropies_B_T: torch.Tensor | None
    changes: Sequence[Change] = ()


@dataclass(frozen=True)
class LossForward:
    """One call of `_compute_loss`: its inputs, and the policy's forward passes inside it."""

    inputs: dict[str, Any]
    mask_B_T: torch.Tensor
    keep_graph: bool = True
    passes: list[PolicyPass] = field(default_factory=list)

    @property
    def policy(self) -> PolicyPass:
        if not self.passes:
            raise UpstreamError(
                "A loss was computed without the policy's forward pass, _get_per_token_logps_and_entropies, so its "
                "terms are unknown. Remove the override of _compute_loss, or the plugins that act on the loss."
            )
        return self.passes[-1]

    def context(
        self,
        logps_B_T: torch.Tensor,
        entropies_B_T: torch.Tensor,
        progress: Progress,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> Forward:
        inputs = self.inputs
        return Forward(
            logps_B_T=logps_B_T.detach(),
            entropies_B_T=entropies_B_T.detach(),
            old_logps_B_T=inputs.get("old_per_token_logps", logps_B_T.detach()),
            mask_B_T=self.mask_B_T,
            ref_logps_B_T=inputs.get("ref_per_token_logps"),
            completion_ids_B_T=inputs["completion_ids"],
            rewards_B=inputs[BatchKeys.reward],
            raw_rewards_B=inputs[BatchKeys.raw_reward],
            group_baselines_B=inputs[BatchKeys.baseline],
            zero_variance_B=inputs[BatchKeys.zero_variance],
            step=progress.step,
            training=progress.training,
            gather=gather,
        )
