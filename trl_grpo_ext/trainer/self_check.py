"""The check of the first training step: do the pieces that we take TRL's loss apart into add up to TRL's loss?

TRL's own `_compute_loss` is asked on the shapes and masks of the real first batch, but with made-up log-probabilities
and advantages, so that no model runs and no term is zero by accident. Compared are

1. the weight that TRL's reduction gives each token, read off the slope of the loss in the advantages where every
   importance ratio is 1, with `upstream.reduction_weights`, which we divide out;
2. TRL's loss and its gradient in the log-probabilities, away from ratio 1 and with advantages of both signs, with the
   loss put together again from the pieces under those same weights. A loss that is not homogeneous in the advantages,
   a KL penalty that is another one than ours, or a foreign term makes the two differ.

Entropy bonus and auxiliary loss are switched off in the check: they are kept as TRL has them. It costs a few
element-wise operations, once; metrics and the entropy controller are put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SelfCheckError
from .reaggregation import pieces, trl_weights

if TYPE_CHECKING:
    from .mixin import GRPOExtMixin

RELATIVE_TOLERANCE = 1e-3
"""Far above what rounding does to these sums, far below what a changed reduction or a foreign term does."""


def check_loss(trainer: GRPOExtMixin, inputs: dict[str, Any]) -> None:
    """Compare TRL's loss with its pieces on the first training batch.

    With forward hooks and no aggregation only the first of them matters: that the advantages handed over are used.

    Raises:
        SelfCheckError: Names what is off, with both values.
    """
    trl = trainer._trl
    mask_B_T = inputs["completion_mask"]
    ones_B_T = torch.ones(mask_B_T.shape, device=mask_B_T.device)
    wave_B_T = torch.sin(1.0 + torch.arange(mask_B_T.numel(), device=mask_B_T.device)).view(mask_B_T.shape)

    with _undisturbed(trl), torch.enable_grad():
        made_up = _made_up_inputs(inputs, advantages=ones_B_T, old_logps=-ones_B_T, ref_logps=-ones_B_T)
        loss, forward = trainer._loss_on_made_up(made_up, -ones_B_T)
        slope_B_T = _slope(trainer, loss, forward.inputs["advantages"])
        if trainer.loss_aggregation is None:
            return
        weights_B_T = trl_weights(trainer, made_up, forward.mask_B_T)
        _compare(trainer, "weight of a token", slope_B_T.abs() / _slope_at_ratio_one(trl), weights_B_T)

        old_B_T = -1.0 - wave_B_T.abs()
        logps_B_T = (old_B_T + 0.1 * wave_B_T).requires_grad_()
        made_up = _made_up_inputs(inputs, advantages=wave_B_T, old_logps=old_B_T, ref_logps=old_B_T - 0.3 * wave_B_T)
        loss, forward = trainer._loss_on_made_up(made_up, logps_B_T)
        pieces_B_T, _ = pieces(trainer, loss, forward)
        sum_of_pieces = (weights_B_T * pieces_B_T).sum()
        (gradient_B_T,) = torch.autograd.grad(loss, logps_B_T, retain_graph=True)
        (gradient_of_pieces_B_T,) = torch.autograd.grad(sum_of_pieces, logps_B_T)
        _compare(trainer, "gradient", gradient_B_T, gradient_of_pieces_B_T)
        _compare(trainer, "loss", loss, sum_of_pieces, scale=(weights_B_T * pieces_B_T).abs().sum())


def _made_up_inputs(
    inputs: dict[str, Any], *, advantages: torch.Tensor, old_logps: torch.Tensor, ref_logps: torch.Tensor
) -> dict[str, Any]:
    made_up = {**inputs, "advantages": advantages, "old_per_token_logps": old_logps}
    if "sampling_per_token_logps" in inputs:
        made_up["sampling_per_token_logps"] = old_logps
    if "ref_per_token_logps" in inputs:
        made_up["ref_per_token_logps"] = ref_logps
    if "importance_sampling_ratio" in inputs:
        made_up["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])
    return made_up


def _slope_at_ratio_one(trl: Any) -> float:
    """|∂l/∂A| of one token's loss at ratio 1, advantage 1 and log-probability -1."""
    if trl.loss_type == "sapo":
        return 2.0 / float(trl.args.sapo_temperature_pos)  # σ(0)·4/τ
    if trl.loss_type == "cispo":
        return min(1.0, float(trl.epsilon_high))
    return 1.0


def _slope(trainer: GRPOExtMixin, loss: torch.Tensor, advantages_B_T: torch.Tensor) -> torch.Tensor:
    try:
        return torch.autograd.grad(loss, advantages_B_T)[0]
    except RuntimeError as error:
        raise SelfCheckError(
            f"The loss of {type(trainer).__qualname__} does not depend on the advantages that trl-grpo-ext hands to "
            "it, so neither a forward hook nor an aggregation can act on it: they are read before the policy's forward "
            "pass, or from a copy. Remove these plugins, or the override of _compute_loss."
        ) from error


def _compare(
    trainer: GRPOExtMixin,
    what: str,
    in_trl: torch.Tensor,
    expected: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    in_trl, expected = in_trl.detach().double(), expected.detach().double()
    largest = float((expected if scale is None else scale).detach().abs().max())
    gap = (in_trl - expected).abs()
    if not float(gap.max()) <= RELATIVE_TOLERANCE * largest:  # `not <=`, so that NaN is caught
        worst = int(gap.nan_to_num(nan=torch.inf).argmax())
        raise SelfCheckError(
            f"The loss of {type(trainer).__qualname__} (loss_type={trainer._trl.loss_type!r}) is not made of the "
            f"pieces that trl-grpo-ext knows: its {what} is {in_trl.flatten()[worst].item():.6g}, the pieces' is "
            f"{expected.flatten()[worst].item():.6g}. A loss aggregation would not be exact, so training stops. "
            "Remove loss_aggregation, move a term of your own from _compute_loss to compute_loss, or install a TRL "
            "that was tested."
        )


@contextmanager
def _undisturbed(trl: Any) -> Iterator[None]:
    """Put back what calls of TRL's loss leave behind, and leave out the terms that no aggregation touches."""
    metrics = {mode: {name: list(values) for name, values in kept.items()} for mode, kept in trl._metrics.items()}
    names = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats", "_entropy_bonus_enabled")
    kept_values = {name: getattr(trl, name) for name in (*names, "aux_loss_enabled")}
    trl._entropy_bonus_enabled = trl.aux_loss_enabled = False
    try:
        yield
    finally:
        for name, value in kept_values.items():
            setattr(trl, name, value)
        for mode, kept in trl._metrics.items():
            kept.clear()
            kept.update(metrics[mode])
