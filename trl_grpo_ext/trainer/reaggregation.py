"""TRL's scalar loss, taken apart into per-token losses and put together again under another aggregation.

`upstream` lists the private names of TRL used here, and `self_check` compares the pieces with TRL's own loss.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..credit import flow
from ..credit.chain import Change
from ..errors import ConfigurationError
from ..types import implements
from . import upstream
from .batch import BatchKeys
from .facts import LossSettings, Progress, RunFacts


@dataclass
class LossForward:
    """One call of `_compute_loss`: its inputs, and what the policy's forward pass inside it returned."""

    inputs: dict[str, Any]
    mask_B_T: torch.Tensor
    keep_graph: bool = True
    logps_B_T: torch.Tensor | None = None
    entropies_B_T: torch.Tensor | None = None
    weights_B_T: torch.Tensor | None = None
    """Each token's weight in the optimizer step's loss over all ranks, if it is computed."""
    changes: list[Change] = field(default_factory=list)


class Reaggregation:
    """The selected aggregation in place of TRL's reduction.

    In the context `section` a plugin that fails on one rank stops all.
    """

    def __init__(
        self,
        aggregation: Any,
        facts: RunFacts,
        loss_type: str,
        section: Callable[[], AbstractContextManager[None]],
    ) -> None:
        upstream.check_loss_type(loss_type)
        self.aggregation, self._facts, self._section = aggregation, facts, section
        if getattr(aggregation, "needs_step_totals", False) and facts.steps_per_generation % facts.accumulation:
            raise ConfigurationError(
                f"The loss aggregation {flow.plugin_label(aggregation)!r} needs the counts of each optimizer step, but "
                f"steps_per_generation={facts.steps_per_generation} is no multiple of gradient_accumulation_steps="
                f"{facts.accumulation}. Change one of the two, or select another aggregation."
            )

    @property
    def by_weights(self) -> bool:
        """Whether the aggregation gives weights; otherwise it reduces the losses themselves."""
        return implements(self.aggregation, "weights")

    def loss(self, trl_loss: torch.Tensor, forward: LossForward, settings: LossSettings, progress: Progress) -> Any:
        """The same per-token losses under this aggregation; `forward.weights_B_T` is then known.

        A scalar, scaled as TRL's: averaged over ranks and summed over the micro-batches of a step, it is the step's.
        """
        loss_B_T, others = self.pieces(trl_loss, forward, settings, progress)
        if self.by_weights:
            # The weights' sum spans the generation batch. Ranks are averaged by DDP, ZeRO and FSDP; and each optimizer
            # step takes `accumulation` of the batch's `steps_per_generation` micro-batches. Weights that are those of a
            # step already stay as they are: the last step of an epoch may be short, and a sum is not to grow by that.
            per_step = getattr(self.aggregation, "per_step", False)
            share = 1.0 if per_step else progress.steps_per_generation / progress.accumulation
            weights_B_T: torch.Tensor = forward.inputs[BatchKeys.weights]
            forward.weights_B_T = weights_B_T * share
            return (weights_B_T * loss_B_T).sum() * (self._facts.ranks * share) + others
        if not loss_B_T.requires_grad:  # in evaluation, where the loss is linear in the advantages
            loss_B_T = loss_B_T.detach().requires_grad_()
        with self._section():
            totals = forward.inputs[BatchKeys.totals]
            reduced = flow.reduced_loss(self.aggregation, loss_B_T, forward.mask_B_T, totals)
            slope_B_T = flow.reduced_weights(self.aggregation, reduced, loss_B_T, forward.mask_B_T)
        forward.weights_B_T = slope_B_T / (progress.accumulation * self._facts.ranks)
        return reduced / progress.accumulation + others

    def pieces(
        self, trl_loss: torch.Tensor, forward: LossForward, settings: LossSettings, progress: Progress
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """TRL's scalar taken apart: per-token losses with their KL penalty, `(B, T)`, and what no aggregation touches.

        That rest, a scalar, is entropy bonus and auxiliary loss as TRL scaled them.
        """
        mask_B_T = forward.mask_B_T
        terms_B_T = flow.split_loss(trl_loss, forward.inputs["advantages"])
        trl_weights_B_T = trl_weights(forward, settings, self._facts, progress)
        loss_B_T = terms_B_T / torch.where(mask_B_T > 0, trl_weights_B_T, 1.0)
        kl_B_T = _kl_penalty(forward, settings)
        if kl_B_T is not None:  # does not depend on the advantages, but follows the same weights
            kl_B_T = torch.where(mask_B_T > 0, kl_B_T, 0.0)
            terms_B_T = terms_B_T + trl_weights_B_T * kl_B_T
            loss_B_T = loss_B_T + kl_B_T
        if settings.entropy_bonus or settings.auxiliary_loss:
            return loss_B_T, trl_loss - terms_B_T.sum()
        return loss_B_T, trl_loss.new_zeros(())


def trl_weights(forward: LossForward, settings: LossSettings, facts: RunFacts, progress: Progress) -> torch.Tensor:
    """The weight that TRL's own reduction gives every token, `(B, T)`."""
    return upstream.reduction_weights(
        settings.loss_type,
        forward.mask_B_T,
        num_items_in_batch=forward.inputs["num_items_in_batch"],
        max_completion_length=facts.max_completion_length,
        accumulation=progress.accumulation,
        steps_per_generation=progress.steps_per_generation,
        processes=facts.ranks,
    )


def _kl_penalty(forward: LossForward, settings: LossSettings) -> torch.Tensor | None:
    """β times the per-token KL estimate, as TRL's loss has it; None without a penalty."""
    inputs, logps_B_T = forward.inputs, forward.logps_B_T
    if settings.beta == 0.0 or logps_B_T is None:
        return None
    ratio = None
    if settings.bias_correction_kl:
        old_logps_B_T = inputs.get("old_per_token_logps", logps_B_T.detach())
        level = settings.importance_sampling_level
        ratio = flow.importance_ratio(logps_B_T, old_logps_B_T, forward.mask_B_T, level)
    return settings.beta * flow.kl_k3(logps_B_T, inputs["ref_per_token_logps"], ratio)
