"""Rewards whose weights change during the training."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..credit.groups import compute_dtype
from ..errors import ConfigurationError
from ..guard.parameters import checked_choice, checked_number, checked_whole
from ..types import HookDeclaration, Rollout

Points = list[tuple[int, float]]


class RewardSchedule:
    """Let the weights of rewards change with the optimizer step: `r'_i = r_i + Σ_k (w_k(step) - w_k)·r_ik`.

    A schedule is a list of points `[step, weight]`. Between two of them the weight is on the line between them, or, in
    form "step", that of the point before; outside of them that of the nearest. `w_k` is the run's own weight. A reward
    without a value adds nothing.

    Source: none of its own; asked for in TRL's issue 3036.

    Args:
        weights: The points of each reward that has a schedule, by its name; steps count from 0 and increase.
        form: "linear" or "step".
    """

    __name__ = "reward_schedule"
    declares = HookDeclaration(
        role="shaper", independent=True, conformance={"parameters": {"weights": {"form": [[0, 1.0], [100, 0.0]]}}}
    )

    def __init__(self, *, weights: Mapping[str, Sequence[Sequence[float]]], form: str = "linear") -> None:
        if not isinstance(weights, Mapping) or not weights:
            raise ConfigurationError(
                f"reward_schedule: weights must be a mapping such as {{tag_format: [[0, 1.0], [200, 0.0]]}}, got "
                f"{weights!r}."
            )
        self.points = {str(name): _checked_points(str(name), points) for name, points in weights.items()}
        self.form = checked_choice("reward_schedule: form", form, ("linear", "step"))

    def weight(self, name: str, step: int) -> float:
        """The weight of a reward after `step` optimizer steps."""
        points = self.points[name]
        place = bisect_right(points, step, key=lambda point: point[0])
        if place == 0:
            return points[0][1]
        before_step, before = points[place - 1]
        if place == len(points) or self.form == "step":
            return before
        after_step, after = points[place]
        return before + (after - before) * (step - before_step) / (after_step - before_step)

    def on_rewards(self, rollout: Rollout) -> torch.Tensor:
        names = list(rollout.reward_names)
        if unknown := [name for name in self.points if name not in names]:
            known = ", ".join(names)
            raise ConfigurationError(f"reward_schedule: the run has no reward {unknown[0]!r}. It has: {known}.")
        dtype = compute_dtype(rollout.rewards_B.dtype)
        added_B = torch.zeros_like(rollout.rewards_B, dtype=dtype)
        for name in self.points:
            column = names.index(name)
            change = self.weight(name, rollout.step) - float(rollout.reward_weights_K[column])
            added_B += change * rollout.rewards_B_K[:, column].to(dtype).nan_to_num(nan=0.0)
        return added_B.to(rollout.rewards_B.dtype)


def _checked_points(name: str, points: Any) -> Points:
    what = f"reward_schedule: weights of {name}"
    found: Points = []
    try:
        pairs = [(step, weight) for step, weight in points]
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        raise ConfigurationError(f"{what} must be a list of points [step, weight], got {points!r}.")
    for step, weight in pairs:
        step = checked_whole(f"{what}: a step", step, lowest=found[-1][0] + 1 if found else 0)
        found.append((step, checked_number(f"{what}: a weight", weight, "a finite number")))
    return found
