"""One call of TRL's `_compute_loss`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..credit.chain import Change
from ..errors import UpstreamError

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
        """The policy's last pass."""
        if not self.passes:
            raise UpstreamError(
                "A loss was computed without the policy's forward pass, _get_per_token_logps_and_entropies, so its "
                "terms are unknown. Remove the override of _compute_loss, or the plugins that act on the loss."
            )
        return self.passes[-1]
