"""Try out a loss on the shapes of a real batch, with made-up log-probabilities and advantages.

No model runs, and no term of the loss is zero by accident. `self_check` uses it to see whether TRL's loss consists of
the pieces that we know, `own_loss` to see what a subclass's loss can take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

ForwardPass = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Returns what TRL's `_get_per_token_logps_and_entropies` returns."""

LossOf = Callable[[dict[str, Any], ForwardPass], torch.Tensor]
"""The loss of a batch, with a replacement for the policy's forward pass."""


def wave_like(mask_B_T: torch.Tensor) -> torch.Tensor:
    """`(B, T)` numbers of both signs, no two alike."""
    numbers = torch.arange(mask_B_T.numel(), device=mask_B_T.device)
    return torch.sin(1.0 + numbers).view(mask_B_T.shape)


def made_up_batch(
    inputs: Mapping[str, Any], old_logps_B_T: torch.Tensor, ref_logps_B_T: torch.Tensor, *, all_live: bool = False
) -> dict[str, Any]:
    """A batch like `inputs` with made-up log-probabilities.

    Args:
        inputs: A real micro-batch.
        old_logps_B_T: Of the policy that sampled, and of the sampler.
        ref_logps_B_T: Of the reference policy.
        all_live: Let every token count.
    """
    old = {"old_per_token_logps": old_logps_B_T}  # TRL leaves it out if the policy itself has just sampled
    replaced: dict[str, Any] = {"sampling_per_token_logps": old_logps_B_T, "ref_per_token_logps": ref_logps_B_T}
    if "importance_sampling_ratio" in inputs:
        replaced["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])
    if all_live:
        replaced |= {name: torch.ones_like(inputs["completion_mask"]) for name in ("completion_mask", "tool_mask")}
    return {**inputs, **old, **{name: value for name, value in replaced.items() if name in inputs}}


def loss_on(
    loss_of: LossOf,
    batch: Mapping[str, Any],
    logps_B_T: torch.Tensor,
    *,
    handed_over: torch.Tensor,
    in_the_pass: torch.Tensor,
) -> torch.Tensor:
    """The loss of a made-up batch.

    Args:
        loss_of: The loss to try.
        batch: Of `made_up_batch`.
        logps_B_T: What the policy's forward pass returns.
        handed_over: Advantages in the batch before that pass.
        in_the_pass: Advantages in the batch from that pass on, which is where forward hooks change them.
    """
    asked = {**batch, "advantages": handed_over}
    output = (logps_B_T, torch.ones_like(logps_B_T), logps_B_T.new_zeros(()))

    def forward_pass() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        asked["advantages"] = in_the_pass
        return output

    return loss_of(asked, forward_pass)
