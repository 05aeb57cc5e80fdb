"""Run token losses, and check on made-up numbers what they declare.

A wrong declaration would be a silent error: compact updates leave out rows, and put others beside them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import PluginOutputError
from ..types import LossTerms, Rollout, implements
from .flow import calling, plugin_label, refuse, refuse_taken, tensor_like

RELATIVE_TOLERANCE = 1e-5


def run_token_loss(plugin: Any, terms: LossTerms) -> torch.Tensor:
    """Each token's loss, `(B, T)`, 0 off the mask, checked against the contract."""
    label = f"token loss {plugin_label(plugin)!r}: loss"
    terms = on_mask(terms)
    with calling(plugin, label, terms):
        result = plugin.loss(terms)
    loss_B_T = tensor_like(terms.mask_B_T, result, label).masked_fill(terms.mask_B_T == 0, 0.0)
    if terms.logps_B_T.requires_grad and not loss_B_T.requires_grad:
        raise PluginOutputError(f"{label} has no gradient: compute it from terms.logps_B_T.")
    refuse(~torch.isfinite(loss_B_T), loss_B_T, f"{label} must return finite losses")
    return loss_B_T


def on_mask(terms: LossTerms) -> LossTerms:
    """The same with 0 off the mask, so that what a model computes for padding cannot reach a loss."""
    dead_B_T = terms.mask_B_T == 0

    def cleared(value: torch.Tensor) -> torch.Tensor:
        is_of_tokens = value.shape == dead_B_T.shape and value.is_floating_point()
        return value.masked_fill(dead_B_T, 0.0) if is_of_tokens else value

    return _with_each_tensor(terms, cleared)


def rows_of(terms: LossTerms, rows: Sequence[int]) -> LossTerms:
    """Some rows of a micro-batch."""
    return _with_each_tensor(terms, lambda value: value[list(rows)])


def _with_each_tensor(terms: LossTerms, change: Callable[[torch.Tensor], torch.Tensor]) -> LossTerms:
    changed: dict[str, Any] = {
        name: change(value) for name, value in vars(terms).items() if isinstance(value, torch.Tensor)
    }
    carried = {name: change(values_B_T) for name, values_B_T in terms.carried_B_T.items()}
    return replace(terms, carried_B_T=carried, **changed)


def carried_values(plugin: Any, rollout: Rollout) -> Mapping[str, torch.Tensor]:
    """What a token loss wants to find again at each micro-batch, by name, `(B, T)`, 0 off the mask."""
    return _named_values(plugin, "on_rollout", rollout)


def measured(plugin: Any, terms: LossTerms) -> Mapping[str, torch.Tensor]:
    """What a token loss logs of a micro-batch, by name, `(B, T)`, 0 off the mask."""
    found = _named_values(plugin, "measures", on_mask(replace(terms, logps_B_T=terms.logps_B_T.detach())))
    return refuse_taken(f"token loss {plugin_label(plugin)!r}: measures", found, ["mean"])


def _named_values(plugin: Any, method: str, context: Rollout | LossTerms) -> dict[str, torch.Tensor]:
    """What an optional method returns; refused unless it is named, finite floating point numbers `(B, T)`."""
    if not implements(plugin, method):
        return {}
    label = f"token loss {plugin_label(plugin)!r}: {method}"
    mask_B_T = context.mask_B_T
    with torch.no_grad(), calling(plugin, label, context):
        found = getattr(plugin, method)(context)
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise PluginOutputError(f"{label} must return a mapping of names to (B, T), got {found!r:.100}.")
    values = {}
    for name, one in found.items():
        values_B_T = tensor_like(mask_B_T, one, f"{label}: {name}").detach().masked_fill(mask_B_T == 0, 0.0)
        refuse(~torch.isfinite(values_B_T), values_B_T, f"{label}: {name} must be finite")
        values[name] = values_B_T
    return values


def check_declarations(plugin: Any, terms: LossTerms, *, rows_apart: bool, vanishes: bool) -> None:
    """Refuse a false declaration, tried on two rows or more of made-up numbers, with advantages of both signs.

    `rows_apart`: a row's losses depend on that row alone. `vanishes`: they are 0, with their gradient, in rows without
    advantages.
    """
    label = f"token loss {plugin_label(plugin)!r}"
    whole = value_and_slope(plugin, terms)
    for row in range(len(terms.mask_B_T) if rows_apart else 0):
        alone = value_and_slope(plugin, rows_of(terms, [row]))
        for whole_B_T, alone_1_T in zip(whole, alone, strict=True):
            largest = max(float(whole_B_T.abs().max()), 1e-30)
            if not (whole_B_T[row] - alone_1_T[0]).abs().max() <= RELATIVE_TOLERANCE * largest:
                raise PluginOutputError(
                    f"{label} declares that a row's losses depend on that row alone, but those of row {row} change "
                    "with the rows beside it. Declare independent=False, or compute what is common in on_rollout."
                )
    if vanishes:
        silent_B_T = terms.advantages_B_T.clone()
        silent_B_T[0] = 0.0
        found = value_and_slope(plugin, replace(terms, advantages_B_T=silent_B_T))
        if any(bool(values_B_T[0].any()) for values_B_T in found):
            raise PluginOutputError(
                f"{label} declares that it is 0 in rows without an advantage, but its loss or its gradient there is "
                "not. Declare needs_advantage=False, so that such rows run."
            )


def value_and_slope(plugin: Any, terms: LossTerms) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and the gradient of their sum in the log-probabilities, both `(B, T)`."""
    with torch.enable_grad():
        logps_B_T = terms.logps_B_T.detach().requires_grad_()
        loss_B_T = run_token_loss(plugin, replace(terms, logps_B_T=logps_B_T))
        (slope_B_T,) = torch.autograd.grad(loss_B_T.sum(), logps_B_T, allow_unused=True)
    label = f"token loss {plugin_label(plugin)!r}"
    if slope_B_T is None:
        raise PluginOutputError(f"{label}: loss must be computed from terms.logps_B_T.")
    refuse(~torch.isfinite(slope_B_T), slope_B_T, f"{label}: the gradient must be finite")
    return loss_B_T.detach(), slope_B_T
