"""The check of the first training step: do our pieces of TRL's loss add up to TRL's loss?

It runs TRL's own `_compute_loss` on the shapes and masks of the real first batch, with invented numbers (`loss_trial`),
and compares

1. the weight that TRL's reduction gives each token, read off the slope of the loss in the advantages where every
   importance ratio is 1, with `upstream.reduction_weights`, which we divide out;
2. TRL's loss and its gradient in the log-probabilities, away from ratio 1 and with advantages of both signs, with the
   loss put together again from the pieces under those same weights. A loss that is not homogeneous in the advantages,
   a KL penalty that differs from ours, or a foreign term makes the two differ.

Entropy bonus and auxiliary loss are off in the check, since training keeps them as TRL has them. The check costs a few
element-wise operations, once; metrics and the entropy controller are restored.
"""

from __future__ import annotations

from typing import Any

import torch

from ..credit.flow import expand_advantages
from ..errors import SelfCheckError
from .facts import LossSettings, Progress, RunFacts
from .loss_trial import LossOf, LossTrial
from .reaggregation import LossForward, Reaggregation, trl_weights

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
    """Compare TRL's loss with its pieces on one training batch.

    With forward hooks and no aggregation only the first half matters: that the advantages handed over are used. If no
    token of the micro-batch counts, all are made to count, so that there is something to compare. TRL's loss gathers
    metrics over all ranks, so every rank calls it equally often.
    """
    if not bool((mask_B_T > 0).any()):
        mask_B_T = torch.ones_like(mask_B_T)
    all_tokens = bool((mask_B_T > 0).all())

    def loss_of_trial(trial: LossTrial, advantages_B_T: torch.Tensor) -> tuple[torch.Tensor, LossForward]:
        leaf_B_T = expand_advantages(advantages_B_T, mask_B_T).clone().requires_grad_()
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
