"""Aggregations and hooks that break their contract, most of them on the last rank alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from trl_grpo_ext import Forward, Rollout, Totals

Weights = Callable[[Rollout], Any]
Reduce = Callable[[torch.Tensor, torch.Tensor, Totals], Any]


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


class HostileHook:
    """A hook that raises at the loss forward."""

    __name__ = "hook_raises"

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        if is_last_rank():
            raise ZeroDivisionError("no tokens")
        return advantages_B_T


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


WEIGHTS: dict[str, Weights] = {
    "negative": with_value(-0.5),
    "nan": with_value(float("nan")),
    "infinite": with_value(float("inf")),
    "misshaped": lambda rollout: rollout.mask_B_T[:, :1],
    "transposed": lambda rollout: rollout.mask_B_T.T.contiguous(),
    "integer": lambda rollout: rollout.mask_B_T.long(),
    "a_list": lambda rollout: rollout.mask_B_T.tolist(),
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
    "a_number": lambda loss, mask, totals: float((loss * mask).sum()),
    "of_something_else": lambda loss, mask, totals: torch.ones((), requires_grad=True) * 2.0,
    "nan_loss": lambda loss, mask, totals: (loss * mask).sum() / 0.0 * 0.0,
    "infinite_slope": infinite_slope,
    "ignores_the_mask": lambda loss, mask, totals: loss.mean(),
}


def hostile_plugin(name: str) -> dict[str, Any]:
    """The trainer's argument that selects it."""
    if name == "hook_raises":
        return {"advantage_hooks": [HostileHook()]}
    if name in REDUCE:
        return {"loss_aggregation": HostileReduce(name, REDUCE[name])}
    return {"loss_aggregation": HostileWeights(name, WEIGHTS[name])}
