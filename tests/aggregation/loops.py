"""Every aggregation once more, as slow loops over lists: a second opinion that shares no code with the first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from tests.aggregation.batches import LIMIT, Batch, Completion


def tokens(batch: Batch) -> int:
    return sum(row.size for row in batch)


def live_group(batch: Batch, row: Completion) -> list[Completion]:
    return [other for other in batch if other.group == row.group and other.size > 0]


def prompts(batch: Batch) -> int:
    return len({row.group for row in batch})


# --------------------------------------------- weight of each of a completion's tokens, asked where one is live


def token_mean(batch: Batch, row: Completion) -> float:
    return 1 / tokens(batch)


def seq_mean_token_mean(batch: Batch, row: Completion) -> float:
    return 1 / row.size / len(batch)


def seq_mean_token_sum(batch: Batch, row: Completion) -> float:
    return 1 / len(batch)


def constant_length(batch: Batch, row: Completion) -> float:
    return 1 / len(batch) / LIMIT


def token_sum(batch: Batch, row: Completion) -> float:
    return 1.0


def prompt_mean(batch: Batch, row: Completion) -> float:
    return 1 / prompts(batch) / tokens(live_group(batch, row))


def length_power(batch: Batch, row: Completion, alpha: float, normalize: bool = True) -> float:
    if not normalize:
        return 1 / row.size**alpha / len(batch)
    return 1 / row.size**alpha / sum(1 / other.size**alpha for other in batch if other.size)


def outcome(batch: Batch, row: Completion) -> int:
    """Better than the mean of its group, worse, or neither."""
    scores = [other.reward for other in batch if other.group == row.group and not math.isnan(other.reward)]
    if math.isnan(row.reward):
        return 0
    mean = sum(map(Fraction, scores)) / len(scores)
    return (row.reward > mean) - (row.reward < mean)


def sign_balanced(batch: Batch, row: Completion, over: str) -> float:
    together = live_group(batch, row) if over == "group" else [other for other in batch if other.size]
    part = [other for other in together if outcome(batch, other) == outcome(batch, row)]
    return len(part) / len(together) / tokens(part) / (prompts(batch) if over == "group" else 1)


def length_softmax(batch: Batch, row: Completion, lam: float, r: float = 1 / 9) -> float:
    group = live_group(batch, row)
    mean, deviation = statistics.fmean(o.size for o in group), statistics.pstdev(o.size for o in group)

    def lifted(other: Completion) -> float:
        z = (other.size - mean) / deviation if deviation else 0.0
        return math.exp((1 + r * z) ** lam)

    return len(group) * lifted(row) / sum(lifted(other) for other in group) / tokens(batch)


def difficulty_weighted(batch: Batch, row: Completion, reward: int | None = None, threshold: float = 0.0) -> float:
    group = [other for other in batch if other.group == row.group]
    scores = [other.reward if reward is None else other.rewards[reward] for other in group]
    scores = [score for score in scores if not math.isnan(score)]
    share = sum(score > threshold for score in scores) / len(scores) if scores else 0.0
    x = share if outcome(batch, row) > 0 else 1 - share
    return (0.4 + (1.5 - 0.4) / (1 + math.exp(10 * (x - 0.75)))) / tokens(batch)


def same_for_all_tokens(weight: Callable[..., float], **parameters: Any) -> Callable[[Batch], list[list[float]]]:
    return lambda batch: [[weight(batch, row, **parameters) if live else 0.0 for live in row.live] for row in batch]


def prefix_share(batch: Batch) -> list[list[float]]:
    def weight(row: Completion, t: int) -> float:
        group = [other for other in batch if other.group == row.group and len(other.ids) > t and other.live[t]]
        return 1 / sum(list(other.ids[: t + 1]) == list(row.ids[: t + 1]) for other in group) / tokens(batch)

    return [[weight(row, t) if live else 0.0 for t, live in enumerate(row.live)] for row in batch]


# ------------------------------------------------------------------------------------- losses of one micro-batch


def live_losses(row: Completion) -> list[float]:
    return [loss for loss, live in zip(row.losses, row.live, strict=True) if live]


def sequence_losses(batch: Batch) -> list[float]:
    return [sum(live_losses(row)) / row.size for row in batch if row.size]


def mean_over_tokens(batch: Batch) -> float:
    return sum(sum(live_losses(row)) for row in batch) / max(tokens(batch), 1)


def tail_mean(batch: Batch, fraction: float) -> float:
    losses = sorted(sequence_losses(batch), reverse=True)
    budget = fraction * len(losses)
    left, total = budget, 0.0
    for loss in losses:  # the worst first, as long as there is something left to spend
        total += min(1.0, left) * loss
        left -= min(1.0, left)
    return total / budget if losses else 0.0


def power_mean(batch: Batch, p: float) -> float:
    losses = sequence_losses(batch)

    def mean(values: list[float]) -> float:
        return (sum(value**p for value in values) / max(len(values), 1)) ** (1 / p)

    return mean([max(loss, 0.0) for loss in losses]) - mean([max(-loss, 0.0) for loss in losses])


# ------------------------------------------------------------------------------------- with the parameters tested


@dataclass(frozen=True)
class Case:
    """A selection, and the loop that it must equal."""

    selection: str | dict[str, Any]
    loop: Callable[[Batch], Any]

    @property
    def name(self) -> str:
        return self.selection if isinstance(self.selection, str) else self.selection["name"]


def _weights(weight: Callable[..., float], selection: dict[str, Any] | None = None, **loop: Any) -> Case:
    parameters = selection or {}
    asked = {"name": weight.__name__, **parameters} if parameters else weight.__name__
    return Case(asked, same_for_all_tokens(weight, **(loop or parameters)))


WEIGHTS = {
    "token_mean": _weights(token_mean),
    "seq_mean_token_mean": _weights(seq_mean_token_mean),
    "seq_mean_token_sum": _weights(seq_mean_token_sum),
    "constant_length": _weights(constant_length),
    "token_sum": _weights(token_sum),
    "prompt_mean": _weights(prompt_mean),
    "length_power": _weights(length_power, None, alpha=1.0),
    "length_power-0.75": _weights(length_power, {"alpha": 0.75}),
    "length_power-root": _weights(length_power, {"alpha": 0.5, "normalize": False}),
    "sign_balanced": _weights(sign_balanced, None, over="group"),
    "sign_balanced-batch": _weights(sign_balanced, {"over": "batch"}),
    "prefix_share": Case("prefix_share", prefix_share),
    "length_softmax": _weights(length_softmax, None, lam=1.0),
    "length_softmax-short": _weights(length_softmax, {"lam": -2.5, "r": 0.5}),
    "difficulty_weighted": _weights(difficulty_weighted),
    "difficulty_weighted-style": _weights(
        difficulty_weighted, {"reward": "style", "threshold": -0.5}, reward=1, threshold=-0.5
    ),
}

REDUCES = {
    "token_mean_local": Case("token_mean_local", mean_over_tokens),
    "token_mean_step": Case("token_mean_step", mean_over_tokens),
    "tail_mean": Case("tail_mean", partial(tail_mean, fraction=0.5)),
    "tail_mean-0.3": Case({"name": "tail_mean", "fraction": 0.3}, partial(tail_mean, fraction=0.3)),
    "power_mean": Case("power_mean", partial(power_mean, p=2.0)),
    "power_mean-1.5": Case({"name": "power_mean", "p": 1.5}, partial(power_mean, p=1.5)),
}

CASES = {**WEIGHTS, **REDUCES}
