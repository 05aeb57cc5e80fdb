"""A user's trainer class between ours and TRL's: how to construct it, and what its loss can take.

Plugins hand over advantages `(B, T)`. TRL's loss takes them. A loss written for `(B,)`, or copied from an older TRL, at
best fails on them: `advantages.unsqueeze(1)` broadcasts `(B, T)` to `(B, B, T)`, and then every completion is trained
with the advantages of all. So such a loss is tried out once, before the first step, with invented numbers, and
compared with itself and with TRL's. A loss that takes `(B,)` gets `(B,)`, as long as the hooks give each completion one
number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..credit.flow import plugin_label
from ..errors import ConfigurationError, SelfCheckError, is_out_of_memory
from .batch import join_batches
from .selected import SelectedPlugins
from .upstream import contract

RELATIVE_TOLERANCE = 1e-5

ForwardPass = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Returns what TRL's `_get_per_token_logps_and_entropies` returns."""

LossOf = Callable[[dict[str, Any], ForwardPass], torch.Tensor]
"""The loss of a batch, with a replacement for the policy's forward pass."""


class LossTrial:
    """A batch like `inputs` with invented log-probabilities, at importance ratio 1 or, by default, near it."""

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


@dataclass(frozen=True)
class LossKind:
    """What a trial showed of a loss."""

    as_trl: bool = True  # it equals TRL's loss, so the override only observes
    acts: bool = True  # the advantages of the batch change it
    late: bool = True  # it reads them after the policy's forward pass, where forward hooks act
    per_token: bool = True  # it takes advantages `(B, T)`
    said: str = ""  # what it raised on those, if it did, for messages


class OwnLoss:
    """The loss of a user's classes between our mixin and TRL's trainer."""

    def __init__(self, between: Sequence[type], plugins: SelectedPlugins) -> None:
        self._plugins = plugins
        self.owners = [owner for owner in between if not contract.LOSS_METHODS.isdisjoint(vars(owner))]
        self._names = " and ".join(owner.__qualname__ for owner in self.owners)
        self._kind = None if self.owners else LossKind()

    @property
    def per_token(self) -> bool:
        """Whether the loss is known to take advantages `(B, T)`."""
        return self._kind is None or self._kind.per_token

    @property
    def untried(self) -> bool:
        """Whether the loss has not been tried out yet."""
        plugins = self._plugins
        acts = plugins.change_advantages or plugins.compact or plugins.aggregation is not None
        return self._kind is None and acts

    def advantages(self, advantages: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
        """The advantages as the loss takes them: `(B, T)`, or `(B,)`, which the tokens of a row must share."""
        if self.per_token or advantages.dim() == 1:
            return advantages
        dead_B_T = mask_B_T == 0
        empty_B = dead_B_T.all(1)
        high_B = advantages.masked_fill(dead_B_T, -torch.inf).amax(1).masked_fill(empty_B, 0.0)
        low_B = advantages.masked_fill(dead_B_T, torch.inf).amin(1).masked_fill(empty_B, 0.0)
        differ_B = high_B - low_B > 1e-6 * torch.maximum(high_B.abs(), low_B.abs())
        if bool(differ_B.any()):
            row = int(differ_B.nonzero()[0, 0])
            raise ConfigurationError(
                f"The loss of {self._names} takes one advantage for each completion, but the advantage hooks gave the "
                f"tokens at row {row} {low_B[row].item():.6g} to {high_B[row].item():.6g}. Select hooks that give a "
                "completion one number, or train with TRL's own loss."
            )
        return high_B

    def try_out(self, inputs: Mapping[str, Any], loss_of: LossOf, trls_loss_of: LossOf) -> None:
        """Find out what the loss can take on a real micro-batch, compared with TRL's own."""
        batch = dict(inputs)
        if batch["completion_ids"].size(0) == 1:  # with one row there is nothing to mix up
            batch = join_batches([batch, batch])
        kind = self._kind = try_out(batch, loss_of, trls_loss_of)
        plugins, aggregation = self._plugins, self._plugins.aggregation
        if plugins.compact and not kind.as_trl:
            raise ConfigurationError(
                f"compact_updates: exact cannot be exact with {self._names}, whose loss is not TRL's and "
                "may count the rows of a micro-batch. Turn compact_updates off, or remove the override."
            )
        if not kind.acts and not plugins.forward_hooks and aggregation is None:
            raise SelfCheckError(
                f"The loss of {self._names} does not depend on the advantages of the batch, so the selected advantage "
                f"hooks would have no effect. Remove them, or the override."
            )
        if not kind.per_token and aggregation is not None:
            raise ConfigurationError(
                f"The loss aggregation {plugin_label(aggregation)!r} cannot be exact with {self._names}, whose loss "
                f"does not take advantages (completions, tokens){kind.said}. Remove it, or let the loss take them."
            )
        if not kind.per_token and not kind.late and plugins.forward_hooks:
            raise SelfCheckError(
                f"The loss of {self._names} reads the advantages before the policy's forward pass, so forward hooks "
                f"would have no effect. Remove them, or let it read inputs['advantages'] after that pass."
            )


def try_out(inputs: Mapping[str, Any], loss_of: LossOf, trls_loss_of: LossOf) -> LossKind:
    """Find out what a loss takes, on two rows or more, by its value and its gradient in the log-probabilities.

    At ratio 1 many a wrong loss has the right value, so its gradient has to be the same too. The advantages are of both
    signs, and no two rows alike: rows that are mixed up, or a sign that is not seen, change the loss.
    """
    trial = LossTrial(inputs, all_tokens=True)
    advantages_B = torch.linspace(-1.0, 1.7, len(trial.wave_B_T), device=trial.wave_B_T.device)
    all_B_T = advantages_B.unsqueeze(1).expand_as(trial.wave_B_T).clone()
    said = ""

    def with_advantages(loss_of: LossOf, before: torch.Tensor, during: torch.Tensor) -> torch.Tensor:
        loss = trial.loss(loss_of, before, during)
        gradient = torch.autograd.grad(loss, trial.logps_B_T, allow_unused=True)[0] if loss.requires_grad else None
        gradient_B_T = torch.zeros_like(trial.logps_B_T) if gradient is None else gradient
        return torch.cat([loss.detach().view(1), gradient_B_T.flatten()])

    def or_none(advantages: torch.Tensor) -> torch.Tensor | None:
        """The loss with these advantages; None if it does not take their shape."""
        nonlocal said
        try:
            return with_advantages(loss_of, advantages, advantages)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            said = f" ({type(error).__name__}: {error})"
            return None

    with torch.enable_grad():
        per_completion, per_token = or_none(advantages_B), or_none(all_B_T)
        if per_completion is None and per_token is None:
            with_advantages(loss_of, advantages_B, advantages_B)  # raises: it has to say so itself
        expected, advantages = (per_token, all_B_T) if per_completion is None else (per_completion, advantages_B)
        none = torch.zeros_like(advantages)
        trls = with_advantages(trls_loss_of, advantages, advantages)
        without, late = with_advantages(loss_of, none, none), with_advantages(loss_of, none, advantages)
    return LossKind(
        as_trl=_alike(expected, trls),
        acts=not _alike(expected, without),
        late=_alike(expected, late),
        per_token=_alike(expected, per_token),
        said=said if per_token is None else "",
    )


def _alike(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return False
    size = torch.maximum(first.abs(), second.abs()).max()
    return bool((first - second).abs().max() <= RELATIVE_TOLERANCE * size)
