"""Run token losses, and check on made-up numbers what they declare.

A wrong declaration would be a silent error: compact updates leave out rows that a loss is said to give nothing, and put
other rows beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from ..errors import PluginOutputError
from ..types import LossTerms, Rollout, implements
from .flow import named, plugin_label, refuse, tensor_like, unchanged

RELATIVE_TOLERANCE = 1e-5


def run_token_loss(plugin: Any, terms: LossTerms) -> torch.Tensor:
    """Each token's loss, `(B, T)`, 0 off the mask, checked against the contract."""
    label = f"token loss {plugin_label(plugin)!r}: loss"
    with named(label, plugin), unchanged(label, terms):
        result = plugin.loss(terms)
    live_B_T = terms.mask_B_T > 0
    # In two steps, so that infinities off the mask have no gradient.
    loss_B_T = tensor_like(terms.mask_B_T, result, label).masked_fill(~live_B_T, 0.0)
    refuse(~torch.isfinite(loss_B_T), loss_B_T, f"{label} must return finite losses", "finite")
    if terms.logps_B_T.requires_grad and not loss_B_T.requires_grad:
        raise PluginOutputError(
            f"{label} has no gradient. Compute it from terms.logps_B_T and do not detach.", "gradient"
        )
    return loss_B_T


def carried_values(plugin: Any, rollout: Rollout) -> Mapping[str, torch.Tensor]:
    """What a token loss wants to find again at each micro-batch, by name, `(B, T)`."""
    if not implements(plugin, "on_rollout"):
        return {}
    label = f"token loss {plugin_label(plugin)!r}: on_rollout"
    with torch.no_grad(), named(label, plugin, rollout), unchanged(label, rollout):
        found = plugin.on_rollout(rollout)
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise PluginOutputError(
            f"{label} must return a mapping of names to (B, T), got {type(found).__name__}.", "shape"
        )
    values = {name: tensor_like(rollout.mask_B_T, one, f"{label}: {name}").detach() for name, one in found.items()}
    for name, values_B_T in values.items():
        refuse(~torch.isfinite(values_B_T), values_B_T, f"{label}: {name} must be finite", "finite")
    return values


def measured(plugin: Any, terms: LossTerms) -> Mapping[str, torch.Tensor]:
    """What a token loss logs of a micro-batch, by name, `(B, T)`, 0 off the mask."""
    if not implements(plugin, "measures"):
        return {}
    label = f"token loss {plugin_label(plugin)!r}: measures"
    terms = replace(terms, logps_B_T=terms.logps_B_T.detach())
    with torch.no_grad(), named(label, plugin), unchanged(label, terms):
        found = plugin.measures(terms)
    dead_B_T = terms.mask_B_T == 0
    return {
        name: tensor_like(terms.mask_B_T, values_B_T.to(terms.mask_B_T.dtype), f"{label}: {name}").masked_fill(
            dead_B_T, 0.0
        )
        for name, values_B_T in found.items()
    }


# ------------------------------------------------------------------------------------------- what it declares


def check_declarations(plugin: Any, terms: LossTerms, *, rows_apart: bool, vanishes: bool) -> None:
    """Check on terms whose numbers are made up that a token loss is what it declares.

    Args:
        plugin: The token loss.
        terms: Two rows or more, with log-probabilities away from the old policy's and advantages of both signs.
        rows_apart: Whether it declares that a row's losses depend on that row alone.
        vanishes: Whether it declares that losses, and their gradient, are 0 in rows whose advantages are all 0.

    Raises:
        PluginOutputError: A declaration is false, or the values or the gradient are not finite.
    """
    label = f"token loss {plugin_label(plugin)!r}"
    loss_B_T, slope_B_T = value_and_slope(plugin, terms)
    refuse(~torch.isfinite(slope_B_T), slope_B_T, f"{label}: the gradient must be finite", "finite")
    if rows_apart:
        for row in range(len(loss_B_T)):
            for whole_B_T, alone_B_T in zip(
                (loss_B_T, slope_B_T), value_and_slope(plugin, rows_of(terms, [row])), strict=True
            ):
                if not _alike(whole_B_T[row], alone_B_T[0], whole_B_T):
                    raise PluginOutputError(
                        f"{label} declares that a row's losses depend on that row alone, but those of row {row} change "
                        "with the rows beside it. Declare independent=False, or compute what is common in on_rollout.",
                        "rows",
                    )
    if vanishes:
        silent_B_T = terms.advantages_B_T.clone()
        silent_B_T[0] = 0.0
        found = value_and_slope(plugin, replace(terms, advantages_B_T=silent_B_T))
        if any(bool((values_B_T[0] != 0).any()) for values_B_T in found):
            raise PluginOutputError(
                f"{label} declares that it is 0 in rows without an advantage, but its loss or its gradient there is "
                "not. Declare needs_advantage=False, so that such rows run.",
                "silent",
            )


def value_and_slope(plugin: Any, terms: LossTerms) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and the gradient of their sum in the log-probabilities, both `(B, T)`."""
    with torch.enable_grad():
        logps_B_T = terms.logps_B_T.detach().requires_grad_()
        loss_B_T = run_token_loss(plugin, replace(terms, logps_B_T=logps_B_T))
        (slope_B_T,) = torch.autograd.grad(loss_B_T.sum(), logps_B_T)
    return loss_B_T.detach(), slope_B_T


def rows_of(terms: LossTerms, rows: Sequence[int]) -> LossTerms:
    """Some rows of a micro-batch."""
    chosen: dict[str, Any] = {}
    for one in fields(terms):
        value = getattr(terms, one.name)
        if isinstance(value, torch.Tensor):
            chosen[one.name] = value[list(rows)]
    carried = {name: values_B_T[list(rows)] for name, values_B_T in terms.carried_B_T.items()}
    return replace(terms, carried_B_T=carried, **chosen)


def _alike(first: torch.Tensor, second: torch.Tensor, scale: torch.Tensor) -> bool:
    largest = float(scale.abs().max())
    return bool((first - second).abs().max() <= RELATIVE_TOLERANCE * max(largest, 1e-30))
