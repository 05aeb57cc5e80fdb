"""Try out a loss on the shapes of a real batch, with invented log-probabilities and advantages.

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


class LossTrial:
    """A batch like `inputs` with invented log-probabilities; importance ratios are 1 or, by default, near it."""

    def __init__(self, inputs: Mapping[str, Any], *, at_ratio_one: bool = False, all_tokens: bool = False) -> None:
        mask_B_T = inputs["completion_mask"]
        ones_B_T = torch.ones_like(mask_B_T, dtype=torch.float32)
        numbers = torch.arange(mask_B_T.numel(), device=mask_B_T.device)
        self.wave_B_T = torch.sin(1.0 + numbers).view(mask_B_T.shape)  # of both signs, and no two alike
        old_B_T = -ones_B_T if at_ratio_one else -1.0 - self.wave_B_T.abs()
        ref_B_T = -ones_B_T if at_ratio_one else old_B_T - 0.3 * self.wave_B_T
        self.logps_B_T = -ones_B_T if at_ratio_one else (old_B_T + 0.1 * self.wave_B_T).requires_grad_()
        invented: dict[str, Any] = {"sampling_per_token_logps": old_B_T, "ref_per_token_logps": ref_B_T}
        if "importance_sampling_ratio" in inputs:
            invented["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])
        if all_tokens:
            invented |= {name: torch.ones_like(mask_B_T) for name in ("completion_mask", "tool_mask")}
        self.batch = {**inputs, **{name: value for name, value in invented.items() if name in inputs}}
        self.batch["old_per_token_logps"] = old_B_T  # TRL leaves it out if the policy itself has just sampled

    def loss(self, loss_of: LossOf, before: torch.Tensor, during: torch.Tensor) -> torch.Tensor:
        """The loss with advantages that the policy's forward pass changes, as forward hooks do."""
        batch = {**self.batch, "advantages": before}
        output = (self.logps_B_T, torch.ones_like(self.logps_B_T), self.logps_B_T.new_zeros(()))

        def forward_pass() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            batch["advantages"] = during
            return output

        return loss_of(batch, forward_pass)
