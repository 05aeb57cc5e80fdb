"""TRL's scalar loss, taken apart into per-token losses that another aggregation can put together again.

What is private to TRL in here is listed in `upstream`, and `self_check` compares the pieces with TRL's own loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..credit import flow
from ..errors import ConfigurationError
from . import upstream

if TYPE_CHECKING:
    from ..credit.chain import Change
    from .mixin import GRPOExtMixin


@dataclass
class LossForward:
    """One `_compute_loss` in flight: its inputs, and what the policy's forward pass inside it gave."""

    inputs: dict[str, Any]
    mask_B_T: torch.Tensor
    keep_graph: bool
    made_up_output: tuple[torch.Tensor, ...] | None = None
    logps_B_T: torch.Tensor | None = None
    entropies_B_T: torch.Tensor | None = None
    weights_B_T: torch.Tensor | None = None
    """What each token's loss counts in the optimizer step's loss over all ranks, where it was asked for."""
    changes: list[Change] = field(default_factory=list)


def check_aggregation(trainer: GRPOExtMixin) -> None:
    """Refuse, at construction, settings with which the selected aggregation could not be exact.

    Raises:
        ConfigurationError: The loss type is unknown, or the aggregation needs the counts of an optimizer step and TRL
            cuts generation batches across steps.
    """
    upstream.check_loss_type(trainer._trl.loss_type)
    per_generation, per_step = trainer.args.steps_per_generation, trainer.args.gradient_accumulation_steps
    if getattr(trainer.loss_aggregation, "needs_step_totals", False) and per_generation % per_step:
        label = flow.plugin_label(trainer.loss_aggregation)
        raise ConfigurationError(
            f"The loss aggregation {label!r} needs the counts of each optimizer step, but steps_per_generation="
            f"{per_generation} is no multiple of gradient_accumulation_steps={per_step}: a step takes rows of a "
            "generation batch that is not sampled yet. Change one of the two, or select another aggregation."
        )


def pieces(trainer: GRPOExtMixin, loss: torch.Tensor, forward: LossForward) -> tuple[torch.Tensor, torch.Tensor]:
    """Take TRL's scalar apart.

    Returns:
        Per-token loss with its KL penalty, `(B, T)`, and what no aggregation touches: entropy bonus and auxiliary loss
        as TRL scaled them, a scalar.
    """
    trl, inputs, mask_B_T = trainer._trl, forward.inputs, forward.mask_B_T
    terms_B_T = flow.split_loss(loss, inputs["advantages"])
    trl_weights_B_T = trl_weights(trainer, inputs, mask_B_T)
    loss_B_T = terms_B_T / torch.where(mask_B_T > 0, trl_weights_B_T, 1.0)
    kl_B_T = _kl_penalty(trainer, forward)
    if kl_B_T is not None:  # does not depend on the advantages, but follows the same weights
        kl_B_T = torch.where(mask_B_T > 0, kl_B_T, 0.0)
        terms_B_T = terms_B_T + trl_weights_B_T * kl_B_T
        loss_B_T = loss_B_T + kl_B_T
    if trl._entropy_bonus_enabled or trl.aux_loss_enabled:
        return loss_B_T, loss - terms_B_T.sum()
    return loss_B_T, loss.new_zeros(())


def trl_weights(trainer: GRPOExtMixin, inputs: dict[str, Any], mask_B_T: torch.Tensor) -> torch.Tensor:
    """The weight that TRL's own reduction gives every token, `(B, T)`."""
    return upstream.reduction_weights(
        trainer._trl.loss_type,
        mask_B_T,
        num_items_in_batch=inputs["num_items_in_batch"],
        max_completion_length=trainer._trl.max_completion_length,
        accumulation=trainer._accumulation,
        steps_per_generation=trainer._steps_per_generation,
        processes=trainer.accelerator.num_processes,
    )


def _kl_penalty(trainer: GRPOExtMixin, forward: LossForward) -> torch.Tensor | None:
    """β times the per-token KL estimate, as TRL's loss has it; None without a penalty."""
    trl, inputs, logps_B_T = trainer._trl, forward.inputs, forward.logps_B_T
    if trl.beta == 0.0 or logps_B_T is None:
        return None
    ratio = None
    if trainer.args.use_bias_correction_kl:
        old_logps_B_T = inputs.get("old_per_token_logps", logps_B_T.detach())
        ratio = flow.importance_ratio(logps_B_T, old_logps_B_T, forward.mask_B_T, trl.importance_sampling_level)
    return trl.beta * flow.kl_k3(logps_B_T, inputs["ref_per_token_logps"], ratio)  # type: ignore[no-any-return]
