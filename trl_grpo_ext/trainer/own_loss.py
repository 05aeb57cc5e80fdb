"""A trainer between ours and TRL's, somebody's subclass: how it is built, and what its loss can take.

Plugins hand over advantages `(B, T)`. TRL's loss takes them; a loss that somebody wrote for `(B,)`, or copied from an
older TRL, fails on them at best: `advantages.unsqueeze(1)` broadcasts `(B, T)` to `(B, B, T)`, and every completion is
then trained with the advantages of all. So such a loss is tried out once, before the first step, with made-up
log-probabilities, and compared with itself and with TRL's. One that takes `(B,)` gets `(B,)`, as long as the hooks give
each completion one number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOTrainer

from ..credit import flow
from ..errors import ConfigurationError, SelfCheckError
from . import upstream
from .compact.rows import PARTS_KEY, joined

RELATIVE_TOLERANCE = 1e-5
ForwardPass = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Returns what TRL's `_get_per_token_logps_and_entropies` does."""
LossOf = Callable[[dict[str, Any], ForwardPass], torch.Tensor]
"""A loss on a batch, with this forward pass of the policy."""
_SOURCES = ("train_dataset", "eval_dataset", "processing_class", "reward_processing_classes")
_LOSS_METHODS = frozenset({"_compute_loss", "compute_loss"})


class OwnLosses:
    """Stands between `GRPOExtMixin` and the trainer that it is mixed into, and knows whose loss that is."""

    _own_losses: Sequence[type] = ()
    """Classes below ours and above TRL's trainer that override its loss, nearest first."""
    _loss_kind: LossKind | None = None
    _made_up_pass: ForwardPass | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Refuse, when a class is made, bases in an order in which none of our methods would run."""
        super().__init_subclass__(**keywords)
        order = cls.__mro__
        if GRPOTrainer in order and order.index(OwnLosses) > order.index(GRPOTrainer):
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise ConfigurationError(
                f"class {cls.__name__}({bases}): GRPOExtMixin stands behind TRL's trainer, so none of its methods "
                f"would run. Put it first: class {cls.__name__}(GRPOExtMixin, ...)."
            )

    def _find_own_losses(self, mixin: type, args: Any, aggregation: Any) -> None:
        """At construction: find the overrides, and refuse what is known not to be exact."""
        order = type(self).__mro__
        if GRPOTrainer not in order:
            raise ConfigurationError(
                f"{type(self).__qualname__} is no GRPOTrainer of TRL, and advantage hooks, aggregations and compact "
                "updates know no other trainer. Rewards work in any: reward_funcs=load_rewards([...])."
            )
        between = order[order.index(mixin) + 1 : order.index(GRPOTrainer)]
        self._own_losses = [
            owner for owner in between if not issubclass(mixin, owner) and not _LOSS_METHODS.isdisjoint(vars(owner))
        ]
        for owner in self._own_losses:
            if aggregation is not None:
                upstream.check_own_loss(owner, f"The loss aggregation {flow.plugin_label(aggregation)!r}")
            if getattr(args, "compact_updates", "off") == "exact":
                upstream.check_own_loss(owner, "compact_updates: exact")

    def _check_one_batch(self, undealt: object) -> None:
        """Refuse weights of a second generation batch before those of the first are dealt."""
        if undealt is not None:
            raise ConfigurationError(
                f"_generate_and_score_completions of {type(self).__qualname__} makes one batch out of several, and the "
                "loss aggregation has weighed each by itself. Let it call super() once, or put GRPOExtMixin in front "
                "of it."
            )

    @property
    def _per_token(self) -> bool:
        """Whether the loss takes advantages `(B, T)`, as far as is known."""
        return self._loss_kind is None or self._loss_kind.per_token

    @property
    def _owners(self) -> str:
        return " and ".join(owner.__qualname__ for owner in self._own_losses)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        trl: Any = self
        if not self._own_losses or not (trl.advantage_hooks or trl.loss_aggregation is not None or trl._compact):
            return inputs
        if self._loss_kind is None:
            self._try_out(inputs)
        if not self._per_token:
            with trl._agreement.section():
                inputs["advantages"] = self._one_per_completion(inputs)
        return inputs

    def _one_per_completion(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        trl: Any = self
        return one_per_completion(inputs["advantages"], trl._loss_mask(inputs), self._owners)

    def _try_out(self, inputs: Mapping[str, Any]) -> None:
        """Find out what the loss can take, and stop where that is less than the plugins need."""
        trl: Any = self
        if any(upstream.reason_per_completion(owner) for owner in self._own_losses):
            self._loss_kind = LossKind(as_trl=False, per_token=False)
            return
        batch = {key: value for key, value in inputs.items() if key != PARTS_KEY}
        if batch["completion_ids"].size(0) == 1:  # one row cannot be mixed up with another
            batch = joined([batch, batch])
        losses = (super().compute_loss, functools.partial(GRPOTrainer._compute_loss, trl))  # type: ignore[misc]
        kind = self._loss_kind = try_out(trl, batch, *map(self._with_pass, losses))
        forward_hooks = trl._chain.acts("on_forward")
        if trl._compact and not kind.as_trl:
            raise ConfigurationError(
                f"compact_updates: exact cannot be exact with {self._owners}, whose loss is another one than TRL's and "
                "may count the rows of a micro-batch. Switch compact_updates off, or remove the override."
            )
        if not kind.acts and not forward_hooks and trl.loss_aggregation is None:
            raise SelfCheckError(
                f"The loss of {self._owners} does not depend on the advantages of the batch, so the selected advantage "
                "hooks would be without effect. Remove them, or the override."
            )
        if not kind.per_token and trl.loss_aggregation is not None:
            raise ConfigurationError(
                f"The loss aggregation {flow.plugin_label(trl.loss_aggregation)!r} cannot be exact with "
                f"{self._owners}, whose loss takes one advantage for each completion and not (completions, tokens), so "
                "there are no per-token losses. Remove the aggregation, or let the loss take both."
            )
        if not kind.per_token and not kind.late and forward_hooks:
            raise SelfCheckError(
                f"The loss of {self._owners} reads the advantages before the policy's forward pass, so forward hooks "
                "would be without effect. Remove them, or let it read inputs['advantages'] after that pass."
            )

    def _with_pass(self, loss: Callable[..., Any]) -> LossOf:
        def of(batch: dict[str, Any], forward_pass: ForwardPass) -> torch.Tensor:
            trl: Any = self
            self._made_up_pass = forward_pass
            try:
                found: torch.Tensor = loss(trl.model, batch)
            finally:
                self._made_up_pass = None
            return found

        return of


def built_with(
    given: Sequence[Any], sources: Sequence[Any], more: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of the trainer below ours: by name, because a subclass may take fewer, or keywords alone.

    Args:
        given: `model`, `reward_funcs` and `args`.
        sources: The four arguments of TRL behind them. A subclass may lack them, so by name only those not None.
        more: Positional arguments behind these; with any, all are positional.
        keywords: Other arguments by name.
    """
    if more:
        return [*given, *sources, *more], dict(keywords)
    present = {name: value for name, value in zip(_SOURCES, sources, strict=True) if value is not None}
    return [], {**dict(zip(("model", "reward_funcs", "args"), given, strict=True)), **present, **keywords}


def places_of(given: Sequence[Any], functions: Sequence[Any], weights: Sequence[float]) -> list[int]:
    """Where the reward functions that were given stand in the trainer: a subclass may have put its own before them.

    Raises:
        ConfigurationError: One of them cannot be found.
    """
    free, places = list(range(len(functions))), list[int]()
    for function, weight in zip(given, weights, strict=True):
        same = [place for place in free if functions[place] is function]
        if not same and places == list(range(len(places))):  # TRL made a model of an id, or a subclass wrapped it
            same = [place for place in free if place == len(places)]
        if not same:
            raise ConfigurationError(
                f"The reward function {function!r} of weight {weight} is not among the trainer's, {list(functions)!r}: "
                "a base class has replaced it. Give all of them their weights as reward_weights."
            )
        places.append(same[0])
        free.remove(same[0])
    return places


@dataclass(frozen=True)
class LossKind:
    """What was found out about a loss.

    Attributes:
        as_trl: It gave the same number as TRL's loss, so what overrides it only looks on.
        acts: The advantages of the batch change it.
        late: It reads them after the policy's forward pass, where forward hooks act.
        per_token: It takes advantages `(B, T)`.
    """

    as_trl: bool = True
    acts: bool = True
    late: bool = True
    per_token: bool = True


def try_out(
    trl: Any,
    inputs: Mapping[str, Any],
    loss_of: LossOf,
    trls_loss_of: LossOf,
) -> LossKind:
    """Find out what a loss takes, on the shapes of a real batch of two rows or more and made-up numbers.

    Compared are the loss and its gradient in the log-probabilities.

    Args:
        trl: The trainer; its metrics and entropy controller are put back.
        inputs: The batch.
        loss_of: The trainer's loss.
        trls_loss_of: TRL's own.
    """
    mask_B_T = inputs["completion_mask"]
    rows, width = mask_B_T.shape
    wave_B_T = torch.sin(1.0 + torch.arange(rows * width, device=mask_B_T.device)).view(rows, width)
    old_B_T = -1.0 - wave_B_T.abs()
    logps_B_T = (old_B_T + 0.1 * wave_B_T).requires_grad_()
    output = (logps_B_T, torch.ones_like(wave_B_T), wave_B_T.new_zeros(()))
    made_up: dict[str, Any] = {**inputs, "old_per_token_logps": old_B_T}
    made_up["completion_mask"] = torch.ones_like(mask_B_T)
    replaced = {
        "tool_mask": torch.ones_like(mask_B_T),
        "sampling_per_token_logps": old_B_T,
        "ref_per_token_logps": old_B_T - 0.3 * wave_B_T,
    }
    made_up |= {key: value for key, value in replaced.items() if key in inputs}
    if "importance_sampling_ratio" in inputs:
        made_up["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])
    # Of both signs, and no two rows alike: rows that are mixed up, or a sign that is not seen, change the loss.
    advantages_B = torch.linspace(-1.0, 1.7, rows, device=mask_B_T.device)
    all_B_T = advantages_B.unsqueeze(1).repeat(1, width)

    def with_advantages(loss_of: LossOf, handed_over: torch.Tensor, in_the_pass: torch.Tensor) -> torch.Tensor:
        batch = {**made_up, "advantages": handed_over}

        def forward_pass() -> Any:
            batch["advantages"] = in_the_pass
            return output

        # At ratio 1 many a wrong loss has the right value: its gradient has to be the same too.
        loss = loss_of(batch, forward_pass)
        gradient = torch.autograd.grad(loss, logps_B_T, allow_unused=True)[0] if loss.requires_grad else None
        gradient_B_T = torch.zeros_like(logps_B_T) if gradient is None else gradient
        return torch.cat([loss.detach().view(1), gradient_B_T.flatten()])

    with _undisturbed(trl), torch.enable_grad():
        found = [_or_none(with_advantages, loss_of, advantages) for advantages in (advantages_B, all_B_T)]
        per_completion, per_token = found
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
    )


def _or_none(with_advantages: Callable[..., torch.Tensor], loss: LossOf, advantages: torch.Tensor) -> Any:
    """The loss with these advantages; None where their shape is none that it takes."""
    try:
        return with_advantages(loss, advantages, advantages)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def one_per_completion(advantages: torch.Tensor, mask_B_T: torch.Tensor, loss: str) -> torch.Tensor:
    """Advantages `(B, T)` as the `(B,)` that they are, for a loss that takes one number for each completion.

    Args:
        advantages: `(B, T)`, or `(B,)` which is returned as it is.
        mask_B_T: Loss mask.
        loss: Whose loss it is, for the message.

    Returns:
        `(B,)`; 0 where no token counts.

    Raises:
        ConfigurationError: The tokens of a completion have different advantages.
    """
    if advantages.dim() == 1:
        return advantages
    live_B_T = mask_B_T > 0
    high_B = advantages.masked_fill(~live_B_T, -torch.inf).amax(1)
    low_B = advantages.masked_fill(~live_B_T, torch.inf).amin(1)
    high_B, low_B = (torch.where(live_B_T.any(1), values_B, 0.0) for values_B in (high_B, low_B))
    differ_B = high_B - low_B > 1e-6 * torch.maximum(high_B.abs(), low_B.abs())
    if bool(differ_B.any()):
        row = int(differ_B.nonzero()[0, 0])
        raise ConfigurationError(
            f"The loss of {loss} takes one advantage for each completion, but the selected advantage hooks gave the "
            f"tokens of the completion at row {row} advantages from {low_B[row].item():.6g} to "
            f"{high_B[row].item():.6g}. Select hooks that give a completion one number, or train with TRL's own loss."
        )
    return high_B


def _alike(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return False
    size = torch.maximum(first.abs(), second.abs()).max()
    return bool((first - second).abs().max() <= RELATIVE_TOLERANCE * size)


@contextmanager
def _undisturbed(trl: Any) -> Iterator[None]:
    """Put back what calls of TRL's loss leave behind."""
    metrics, names = deepcopy(trl._metrics), ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
    kept = {name: getattr(trl, name) for name in names}
    try:
        yield
    finally:
        trl._metrics = metrics
        for name, value in kept.items():
            setattr(trl, name, value)
