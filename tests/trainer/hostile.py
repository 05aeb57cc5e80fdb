"""Aggregations and hooks that break their contract, most of them on the last rank alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from trl_grpo_ext import Forward, Rollout, Totals
from trl_grpo_ext.errors import AlignmentError

Weights = Callable[[Rollout], Any]
Reduce = Callable[[torch.Tensor, torch.Tensor, Totals], Any]
Hook = Callable[[torch.Tensor, Any], Any]


def is_last_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1


class HostileWeights:
    """Well-behaved on all ranks but the last."""

    def __init__(self, name: str, bad: Weights) -> None:
        self.__name__, self.bad = name, bad

    def weights(self, rollout: Rollout) -> Any:
        return self.bad(rollout) if is_last_rank() else rollout.mask_B_T / rollout.totals.tokens


class HostileReduce:
    """The same for a reduction."""

    def __init__(self, name: str, bad: Reduce) -> None:
        self.__name__, self.bad = name, bad

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> Any:
        return self.bad(loss_B_T, mask_B_T, totals) if is_last_rank() else (loss_B_T * mask_B_T).sum()


class HostileRollout:
    """The same for a hook at the rollout stage."""

    role = "transform"

    def __init__(self, name: str, bad: Hook) -> None:
        self.__name__, self.bad = name, bad

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> Any:
        return self.bad(advantages_B_T, rollout) if is_last_rank() else advantages_B_T


class HostileForward:
    """The same for a hook at the loss forward."""

    def __init__(self, name: str, bad: Hook) -> None:
        self.__name__, self.bad = name, bad

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> Any:
        return self.bad(advantages_B_T, forward) if is_last_rank() else advantages_B_T


def with_value(value: float) -> Weights:
    def bad(rollout: Rollout) -> torch.Tensor:
        weights_B_T = rollout.mask_B_T.clone()
        weights_B_T[1, 0] = value
        return weights_B_T

    return bad


def off_the_mask(rollout: Rollout) -> torch.Tensor:
    return torch.ones_like(rollout.mask_B_T) * 0.25


def raises(rollout: Rollout) -> torch.Tensor:
    raise KeyError("difficulty")


def leaves(rollout: Rollout) -> torch.Tensor:
    raise SystemExit(3)


def gathers_alone(rollout: Rollout) -> torch.Tensor:
    rollout.gather(rollout.lengths_B)
    return rollout.mask_B_T


def gathers_and_goes_on(rollout: Rollout) -> torch.Tensor:
    for _ in range(3):
        try:
            rollout.gather(rollout.lengths_B)
        except Exception:
            continue
    return rollout.mask_B_T


def gathers_a_list(rollout: Rollout) -> torch.Tensor:
    return rollout.gather([1.0, 2.0])  # type: ignore[arg-type]


def infinite_slope(loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
    return ((loss_B_T * mask_B_T).sum() * 0.0).abs().sqrt()  # √|x| has no slope at 0


def infinite_advantage(advantages_B_T: torch.Tensor, context: Any) -> torch.Tensor:
    changed_B_T = advantages_B_T.clone()
    changed_B_T[2, 0] = float("inf")
    return changed_B_T


def divides_by_no_tokens(advantages_B_T: torch.Tensor, context: Any) -> torch.Tensor:
    raise ZeroDivisionError("no tokens")


def cannot_align(advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    raise AlignmentError("these tokens wrote another text")


ROLLOUT: dict[str, Hook] = {
    "hook_infinite": infinite_advantage,
    "hook_per_completion": lambda advantages, rollout: advantages[:, 0],
    "hook_spans_off_the_text": lambda advantages, rollout: [[(0, 10**6, 1.0)] for _ in rollout.texts],
    "hook_too_few_spans": lambda advantages, rollout: [None],
    "hook_cannot_align": cannot_align,
    "hook_gathers_alone": lambda advantages, rollout: rollout.gather(advantages)[: len(advantages)],
}
FORWARD: dict[str, Hook] = {
    "hook_raises": divides_by_no_tokens,
    "hook_infinite_at_forward": infinite_advantage,
}
WEIGHTS: dict[str, Weights] = {
    "negative": with_value(-0.5),
    "nan": with_value(float("nan")),
    "misshaped": lambda rollout: rollout.mask_B_T[:, :1],
    "integer": lambda rollout: rollout.mask_B_T.long(),
    "nothing": lambda rollout: None,
    "off_the_mask": off_the_mask,
    "raises": raises,
    "leaves": leaves,
    "gathers_alone": gathers_alone,
    "gathers_and_goes_on": gathers_and_goes_on,
    "gathers_a_list": gathers_a_list,
}
REDUCE: dict[str, Reduce] = {
    "vector": lambda loss, mask, totals: (loss * mask).sum(1),
    "detached": lambda loss, mask, totals: (loss.detach() * mask).sum(),
    "of_something_else": lambda loss, mask, totals: torch.ones((), requires_grad=True) * 2.0,
    "nan_loss": lambda loss, mask, totals: (loss * mask).sum() / 0.0 * 0.0,
    "infinite_slope": infinite_slope,
    "ignores_the_mask": lambda loss, mask, totals: loss.mean(),
}


class HostileFilter:
    """Keeps nothing, and raises on the last rank in one round."""

    def __init__(self, name: str, round_: int) -> None:
        self.__name__, self.round, self.rounds = name, round_, 0

    def keep(self, rollout: Rollout) -> torch.Tensor:
        self.rounds += 1
        if self.rounds == self.round and is_last_rank():
            raise KeyError("no such thing")
        return torch.zeros(len(rollout.texts), dtype=torch.bool)


FILTERS = {"a filter that raises in the first round": 1, "a filter that raises in the second round": 2}


def hostile_plugin(name: str) -> dict[str, Any]:
    """The trainer's argument that selects it."""
    if name in FILTERS:
        return {"resample": {"filter": HostileFilter(name, FILTERS[name])}}
    if name in ROLLOUT:
        return {"advantage_hooks": ["centred", HostileRollout(name, ROLLOUT[name])]}
    if name in FORWARD:
        return {"advantage_hooks": ["centred", HostileForward(name, FORWARD[name])]}
    if name in REDUCE:
        return {"loss_aggregation": HostileReduce(name, REDUCE[name])}
    return {"loss_aggregation": HostileWeights(name, WEIGHTS[name])}
