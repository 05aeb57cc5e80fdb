"""A user's trainer class between ours and TRL's: whether its loss takes `(B, T)`, or mixes up rows, by a trial."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigurationError, SelfCheckError, is_out_of_memory
from .batch import two_rows_of
from .selected import SelectedPlugins

RELATIVE_TOLERANCE = 1e-5

ForwardPass = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Returns what TRL's `_get_per_token_logps_and_entropies` returns."""

LossOf = Callable[[dict[str, Any], ForwardPass], torch.Tensor]  # with a replacement for the policy's forward pass


class LossTrial:
    """A batch like `inputs` with invented log-probabilities, at importance ratio 1 or, by default, near it."""

    def __init__(self, inputs: Mapping[str, Any], *, all_tokens: bool, at_ratio_one: bool = False) -> None:
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


class OwnLoss:
    """The loss of a user's classes between our mixin and TRL's trainer."""

    def __init__(self, owners: Sequence[type], plugins: SelectedPlugins) -> None:
        self._plugins = plugins
        self.owners = owners
        self._names = " and ".join(owner.__qualname__ for owner in owners)
        self.per_token = True  # whether it takes advantages `(B, T)`, as far as is known
        self.untried = bool(owners) and (
            plugins.change_advantages or plugins.compact or plugins.aggregation is not None
        )

    def advantages(self, advantages: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
        """The advantages as the loss takes them: `(B, T)`, or `(B,)`, which the tokens of a row must share."""
        if self.per_token or advantages.dim() == 1:
            return advantages
        live_B_T = mask_B_T != 0
        high_B = advantages.masked_fill(~live_B_T, -torch.inf).amax(1)
        low_B = advantages.masked_fill(~live_B_T, torch.inf).amin(1)
        differ_B = high_B - low_B > 1e-6 * torch.maximum(high_B.abs(), low_B.abs())
        if bool(differ_B.any()):
            row = int(differ_B.nonzero()[0, 0])
            values = f"{low_B[row].item():.6g} to {high_B[row].item():.6g}"
            what = f"takes one advantage for each completion, but the hooks gave the tokens at row {row} {values}"
            raise ConfigurationError(f"The loss of {self._names} {what}. Select others.")
        return high_B.masked_fill(~live_B_T.any(1), 0.0)

    def try_out(self, inputs: Mapping[str, Any], loss_of: LossOf, trls_loss_of: LossOf) -> None:
        """Find out on a real micro-batch what the loss takes, by its value and gradient in the log-probabilities."""
        trial = LossTrial(two_rows_of(inputs), all_tokens=True)
        # Of both signs, and no two alike: rows that are mixed up, or a sign that is not seen, change the loss.
        advantages_B = torch.linspace(-1.0, 1.7, len(trial.wave_B_T), device=trial.wave_B_T.device)
        all_B_T = advantages_B.unsqueeze(1).expand_as(trial.wave_B_T).clone()

        def with_advantages(loss_of: LossOf, before: torch.Tensor, during: torch.Tensor) -> torch.Tensor:
            loss = trial.loss(loss_of, before, during)
            gradient = torch.autograd.grad(loss, trial.logps_B_T, allow_unused=True)[0] if loss.requires_grad else None
            gradient_B_T = torch.zeros_like(trial.logps_B_T) if gradient is None else gradient
            return torch.cat([loss.detach().view(1), gradient_B_T.flatten()])

        def or_none(advantages: torch.Tensor) -> torch.Tensor | None:
            """The loss with these advantages; None if it does not take their shape."""
            try:
                return with_advantages(loss_of, advantages, advantages)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if is_out_of_memory(error):
                    raise
                return None

        with torch.enable_grad():
            per_completion = or_none(advantages_B)
            per_token = or_none(all_B_T)
            if per_completion is None and per_token is None:
                with_advantages(loss_of, advantages_B, advantages_B)  # raises: it has to say so itself
            expected, advantages = (per_token, all_B_T) if per_completion is None else (per_completion, advantages_B)
            none = torch.zeros_like(advantages)
            trls = with_advantages(trls_loss_of, advantages, advantages)
            without = with_advantages(loss_of, none, none)
            late = with_advantages(loss_of, none, advantages)
        self.untried = False
        self.per_token = _alike(expected, per_token)
        forward_hooks = bool(self._plugins.forward_hooks)
        aggregates = self._plugins.aggregation is not None
        label = f"The loss of {self._names}"
        if self._plugins.compact and not _alike(expected, trls):
            raise ConfigurationError(f"{label} is not TRL's, so compact_updates is not exact. Turn it off.")
        if _alike(expected, without) and not forward_hooks and not aggregates:
            raise SelfCheckError(f"{label} does not depend on the advantages, so hooks would have no effect.")
        if not self.per_token and aggregates:
            raise ConfigurationError(f"{label} takes no advantages (completions, tokens), as an aggregation needs.")
        if not self.per_token and forward_hooks and not _alike(expected, late):
            raise SelfCheckError(f"{label} reads the advantages before the policy's forward pass, too early.")


def _alike(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return False
    size = torch.maximum(first.abs(), second.abs()).max()
    return bool((first - second).abs().max() <= RELATIVE_TOLERANCE * size)
