"""TRL's scalar loss, taken apart into per-token losses and put together again under another aggregation.

`upstream` lists the private names of TRL used here, and `self_check` compares the pieces with TRL's own loss, once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..credit import flow
from ..credit.chain import Change
from ..errors import ConfigurationError, SelfCheckError
from ..types import AggregationDeclaration, implements
from . import upstream
from .batch import BatchKeys
from .facts import LossSettings, Progress, RunFacts
from .own_loss import LossOf, LossTrial


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
    """The selected aggregation in place of TRL's reduction; in `section` a plugin that fails on one rank stops all."""

    def __init__(
        self, aggregation: Any, facts: RunFacts, loss_type: str, section: Callable[[], AbstractContextManager[None]]
    ) -> None:
        upstream.check_loss_type(loss_type)
        self.aggregation, self._facts, self._section = aggregation, facts, section
        declared = AggregationDeclaration.of(aggregation)
        if "step_totals" in declared.needs and facts.steps_per_generation % facts.accumulation:
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
            per_step = AggregationDeclaration.of(self.aggregation).per_step
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
        """TRL's scalar taken apart: per-token losses with KL penalty, `(B, T)`; entropy bonus and auxiliary loss."""
        mask_B_T = forward.mask_B_T
        terms_B_T = flow.split_loss(trl_loss, forward.inputs["advantages"])
        trl_weights_B_T = trl_weights(forward, settings, self._facts, progress)
        loss_B_T = terms_B_T / torch.where(mask_B_T > 0, trl_weights_B_T, 1.0)
        if settings.beta != 0.0 and forward.logps_B_T is not None:
            inputs, logps_B_T, ratio_B_T = forward.inputs, forward.logps_B_T, None
            if settings.bias_correction_kl:
                old_logps_B_T = inputs.get("old_per_token_logps", logps_B_T.detach())
                ratio_B_T = flow.importance_ratio(
                    logps_B_T, old_logps_B_T, mask_B_T, settings.importance_sampling_level
                )
            kl_B_T = settings.beta * flow.kl_k3(logps_B_T, inputs["ref_per_token_logps"], ratio_B_T)
            # It does not depend on the advantages, but follows the same weights.
            kl_B_T = torch.where(mask_B_T > 0, kl_B_T, 0.0)
            terms_B_T = terms_B_T + trl_weights_B_T * kl_B_T
            loss_B_T = loss_B_T + kl_B_T
        if settings.entropy_bonus or settings.auxiliary_loss:
            return loss_B_T, trl_loss - terms_B_T.sum()
        return loss_B_T, trl_loss.new_zeros(())


def trl_weights(forward: LossForward, settings: LossSettings, facts: RunFacts, progress: Progress) -> torch.Tensor:
    """The weight that TRL's own reduction gives every token, `(B, T)`."""
    tokens = forward.inputs["num_items_in_batch"]
    return upstream.reduction_weights(settings.loss_type, forward.mask_B_T, tokens, facts, progress)


# ------------------------------------------------------------------ the check of the first step

RELATIVE_TOLERANCE = 1e-3
"""Far above what rounding does to these sums, far below what a changed reduction or a foreign term does."""


def self_check(
    loss_of: LossOf,
    inputs: dict[str, Any],
    mask_B_T: torch.Tensor,
    reaggregation: Reaggregation | None,
    facts: RunFacts,
    settings: LossSettings,
    progress: Progress,
    slope_at_ratio_one: float,
) -> None:
    """At the first training step: do our pieces of TRL's loss add up to TRL's loss?

    It runs TRL's own `_compute_loss` on shapes and masks of the real first batch, with invented numbers. Compared are

    1. the weight that TRL's reduction gives each token, read off the slope of the loss in the advantages where every
       importance ratio is 1, with `upstream.reduction_weights`, which we divide out;
    2. TRL's loss and its gradient in the log-probabilities, away from ratio 1 and with advantages of both signs, with
       the loss put together again from the pieces under those same weights. A loss that is not homogeneous in the
       advantages, a KL penalty that differs from ours, or a foreign term makes the two differ.

    Entropy bonus and auxiliary loss are off, since training keeps them as TRL has them. With forward hooks and no
    aggregation only the slope matters. If no token of the micro-batch counts, all are made to count.
    """
    if not bool((mask_B_T > 0).any()):
        mask_B_T = torch.ones_like(mask_B_T)
    all_tokens = bool((mask_B_T > 0).all())

    def loss_of_trial(trial: LossTrial, advantages_B_T: torch.Tensor) -> tuple[torch.Tensor, LossForward]:
        leaf_B_T = flow.expand_advantages(advantages_B_T, mask_B_T).clone().requires_grad_()
        loss = trial.loss(loss_of, advantages_B_T, leaf_B_T)
        return loss, LossForward({**trial.batch, "advantages": leaf_B_T}, mask_B_T, logps_B_T=trial.logps_B_T)

    def compare(what: str, in_trl: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        in_trl, expected = in_trl.detach().double(), expected.detach().double()
        largest = float((expected if scale is None else scale).detach().abs().max())
        gap = (in_trl - expected).abs()
        if not float(gap.max()) <= RELATIVE_TOLERANCE * largest:  # `not <=`, so that NaN is caught
            worst = int(gap.nan_to_num(nan=torch.inf).argmax())
            raise SelfCheckError(
                f"The loss of {facts.trainer} (loss_type={settings.loss_type!r}) does not consist of the pieces that "
                f"trl-grpo-ext knows: its {what} is {in_trl.flatten()[worst].item():.6g}, the pieces' is "
                f"{expected.flatten()[worst].item():.6g}. Remove loss_aggregation, move a term of your own from "
                "_compute_loss to compute_loss, or install a TRL that was tested."
            )

    with torch.enable_grad():
        at_one = LossTrial(inputs, at_ratio_one=True, all_tokens=all_tokens)
        near_one = LossTrial(inputs, all_tokens=all_tokens)
        loss_at_one, forward_at_one = loss_of_trial(at_one, torch.ones_like(at_one.logps_B_T))
        loss, forward = loss_of_trial(near_one, near_one.wave_B_T)
        slope_B_T: torch.Tensor | None = None
        if loss_at_one.requires_grad:
            leaf_B_T = forward_at_one.inputs["advantages"]
            (slope_B_T,) = torch.autograd.grad(loss_at_one, leaf_B_T, allow_unused=True)
        if slope_B_T is None:
            raise SelfCheckError(
                f"The loss of {facts.trainer} does not depend on the advantages that trl-grpo-ext passes to it, so "
                "neither a forward hook nor an aggregation can act on it: it reads them before the policy's forward "
                "pass, or from a copy. Remove these plugins, or the override of _compute_loss."
            )
        if reaggregation is None:
            return
        weights_B_T = trl_weights(forward_at_one, settings, facts, progress)
        compare("weight of a token", slope_B_T.abs() / slope_at_ratio_one, weights_B_T)
        pieces_B_T, _ = reaggregation.pieces(loss, forward, settings, progress)
        terms_B_T = weights_B_T * pieces_B_T
        (gradient_B_T,) = torch.autograd.grad(loss, near_one.logps_B_T, retain_graph=True)
        (gradient_of_pieces_B_T,) = torch.autograd.grad(terms_B_T.sum(), near_one.logps_B_T)
        compare("gradient", gradient_B_T, gradient_of_pieces_B_T)
        compare("loss", loss, terms_B_T.sum(), scale=terms_B_T.abs().sum())
