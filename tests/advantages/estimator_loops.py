"""Every sequence-level estimator once more, slowly: plain Python, one group at a time, from its textbook formula.

A loop gets the rewards of one group's scored completions and their lengths, and returns their advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import mean, pstdev, stdev
from typing import Any


@dataclass(frozen=True)
class Row:
    """One completion."""

    reward: float  # NaN: no function scored it
    group: int = 0
    length: int = 1


def raw_reward(rewards: list[float], lengths: list[int]) -> list[float]:
    return rewards


def centred(rewards: list[float], lengths: list[int]) -> list[float]:
    return [r - mean(rewards) for r in rewards]


def constant_baseline(rewards: list[float], lengths: list[int], baseline: float = 0.5) -> list[float]:
    return [r - baseline for r in rewards]


def normalised(
    rewards: list[float], lengths: list[int], epsilon: float = 1e-4, std_floor: float = 0.0, std: str = "sample"
) -> list[float]:
    if len(rewards) == 1:
        return [0.0]
    sigma = stdev(rewards) if std == "sample" else pstdev(rewards)
    return [(r - mean(rewards)) / (max(sigma, std_floor) + epsilon) for r in rewards]


def quantile_baseline(
    rewards: list[float], lengths: list[int], quantile: float = 0.4, scale: bool = True, epsilon: float = 1e-4
) -> list[float]:
    if len(rewards) == 1:
        return [0.0]
    ordered, place = sorted(rewards), quantile * (len(rewards) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    baseline = below + (place - math.floor(place)) * (above - below)
    return [(r - baseline) / (stdev(rewards) + epsilon if scale else 1.0) for r in rewards]


def best_margin(rewards: list[float], lengths: list[int], scale: bool = True, epsilon: float = 1e-6) -> list[float]:
    if len(rewards) == 1:
        return [0.0]
    first, second, *_ = sorted(rewards, reverse=True)
    best = rewards.index(first)
    margin = (first - second) / (stdev(rewards) + epsilon if scale else 1.0)
    return [margin if i == best else 0.0 for i in range(len(rewards))]


def max_only(rewards: list[float], lengths: list[int]) -> list[float]:
    return [r if r == max(rewards) else 0.0 for r in rewards]


def leave_one_out(rewards: list[float], lengths: list[int]) -> list[float]:
    if len(rewards) == 1:
        return [0.0]
    return [r - mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def optimal_baseline(rewards: list[float], lengths: list[int]) -> list[float]:
    if not any(lengths):
        return centred(rewards, lengths)
    baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


def mean_relative(rewards: list[float], lengths: list[int]) -> list[float]:
    if not any(rewards):
        return [0.0] * len(rewards)
    return [(r - mean(rewards)) / mean(rewards) for r in rewards]


def pass_at_k(rewards: list[float], lengths: list[int], k: int = 2, threshold: float = 0.5) -> list[float]:
    """Every set of k is built; a completion gets the mean normalised worth of the sets that it is in."""
    if len(rewards) < k:
        return [0.0] * len(rewards)
    sets = list(combinations(range(len(rewards)), k))
    worth = [float(any(rewards[i] > threshold for i in members)) for members in sets]
    average = mean(worth)
    deviation = math.sqrt(mean([(w - average) ** 2 for w in worth]))
    if deviation == 0:
        return [0.0] * len(rewards)
    return [
        mean([(w - average) / deviation for members, w in zip(sets, worth, strict=True) if i in members])
        for i in range(len(rewards))
    ]


def by_group(rows: Sequence[Row], loop: Callable[..., list[float]], **parameters: Any) -> list[float]:
    """A loop's advantages for the rows of a batch, 0 for those that no function scored."""
    result = [0.0] * len(rows)
    for group in {row.group for row in rows}:
        members = [i for i, row in enumerate(rows) if row.group == group and not math.isnan(row.reward)]
        if members:
            values = loop([rows[i].reward for i in members], [rows[i].length for i in members], **parameters)
            for i, value in zip(members, values, strict=True):
                result[i] = value
    return result


def batch_whitening(rows: Sequence[Row], *, baseline: str = "group", std_floor: float = 0.1) -> list[float]:
    one_group = [Row(row.reward, 0, row.length) for row in rows]
    differences = by_group(rows if baseline == "group" else one_group, centred)
    scored = [d for d, row in zip(differences, rows, strict=True) if not math.isnan(row.reward)]
    divisor = max(stdev(scored) if len(scored) > 1 else 0.0, std_floor)
    return [d / divisor for d in differences]


@dataclass(frozen=True)
class Case:
    """An estimator with parameters, and the slow way to its advantages."""

    name: str
    slow: Callable[[Sequence[Row]], list[float]]
    parameters: dict[str, Any] = field(default_factory=dict)
    non_negative: bool = False  # takes no negative rewards

    @property
    def selection(self) -> dict[str, Any]:
        return {"name": self.name, **self.parameters}


def _grouped(loop: Callable[..., list[float]], *, non_negative: bool = False, **parameters: Any) -> Case:
    return Case(loop.__name__, lambda rows: by_group(rows, loop, **parameters), parameters, non_negative)


def _whitened(**parameters: Any) -> Case:
    return Case("batch_whitening", lambda rows: batch_whitening(rows, **parameters), parameters)


CASES = {
    "raw_reward": _grouped(raw_reward),
    "centred": _grouped(centred),
    "normalised": _grouped(normalised),
    "normalised, large epsilon": _grouped(normalised, epsilon=0.5),
    "normalised, floor": _grouped(normalised, std_floor=1.5),
    "normalised, population": _grouped(normalised, std="population", std_floor=0.2),
    "constant_baseline": _grouped(constant_baseline, baseline=-0.25),
    "quantile_baseline": _grouped(quantile_baseline),
    "quantile_baseline, unscaled": _grouped(quantile_baseline, quantile=0.75, scale=False),
    "best_margin": _grouped(best_margin),
    "best_margin, unscaled": _grouped(best_margin, scale=False),
    "max_only": _grouped(max_only),
    "leave_one_out": _grouped(leave_one_out),
    "batch_whitening": _whitened(),
    "batch_whitening, batch baseline": _whitened(baseline="batch", std_floor=0.01),
    "batch_whitening, high floor": _whitened(std_floor=2.0),
    "optimal_baseline": _grouped(optimal_baseline),
    "mean_relative": _grouped(mean_relative, non_negative=True),
    "pass_at_k, k = 1": _grouped(pass_at_k, k=1, threshold=0.5),
    "pass_at_k, k = 2": _grouped(pass_at_k, k=2, threshold=1.0),
    "pass_at_k, k = 3": _grouped(pass_at_k, k=3, threshold=-1.0),
}
