"""What a console summary shows of a log entry: named cells, and the outcomes that somebody should look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..guard.printable import printable_name

ORDINARY = frozenset({"right", "wrong", "scored"})
"""Outcomes of a completion that need no attention."""


@dataclass(frozen=True)
class Cell:
    """One number of a summary.

    Attributes:
        name: Heading, safe to print.
        value: NaN where the log has the metric without a value.
        text: The value as it is shown.
        followed: Whether its change since the last summary is shown.
    """

    name: str
    value: float
    text: str
    followed: bool = False


def number(value: object) -> float:
    """The value as a float; NaN for whatever is none, as None is, a mean over nothing."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several values
        return math.nan


def averaged(logs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of every metric over several log entries, without NaN; counters keep their last value."""
    values: dict[str, list[float]] = {}
    for log in logs:
        for name, value in log.items():
            values.setdefault(name, []).append(number(value))
    means = {}
    for name, found in values.items():
        known = [value for value in found if not math.isnan(value)]
        last = name in ("num_tokens", "epoch", "step")
        means[name] = math.nan if not known else known[-1] if last else math.fsum(known) / len(known)
    return means


def metric_cells(metrics: Mapping[str, float]) -> list[Cell]:
    """Reward, each reward function, length, entropy, KL, clipping, share of groups without signal: what is there."""
    cells = [_reward("reward", metrics["reward"])] if "reward" in metrics else []
    means = {name: value for name, value in metrics.items() if name.startswith("rewards/") and name.endswith("/mean")}
    if len(means) > 1:
        names = (printable_name(name.removeprefix("rewards/").removesuffix("/mean")) for name in means)
        cells += [_reward(name, value) for name, value in zip(names, means.values(), strict=True)]
    for name, key, shown in _OTHERS:
        if key in metrics and all(cell.name != name for cell in cells):
            cells.append(Cell(name, metrics[key], shown(metrics[key])))
    return cells


def notable_outcomes(metrics: Mapping[str, float]) -> list[str]:
    """By reward, the shares of completions that were neither judged right or wrong nor simply scored."""
    by_reward: dict[str, list[str]] = {}
    for key, share in metrics.items():
        kind, _, rest = key.partition("/")
        reward, _, outcome = rest.rpartition("/")
        counted = kind == "outcomes" or (kind == "rewards" and outcome in ("none", "nan"))
        if counted and reward and outcome not in ORDINARY and share > 0:
            by_reward.setdefault(printable_name(reward), []).append(f"{printable_name(outcome)} {_share(share)}")
    return [f"{reward}: {', '.join(shares)}" for reward, shares in by_reward.items()]


def arrow(cell: Cell, before: Mapping[str, float], marks: Sequence[str]) -> str:
    """Up, down, unchanged as far as can be seen, or nothing where there is nothing to compare."""
    last = before.get(cell.name, math.nan)
    if not cell.followed or math.isnan(cell.value) or math.isnan(last):
        return ""
    up, down, same = marks
    return same if _decimal(last) == cell.text else up if cell.value > last else down


def duration(seconds: float) -> str:
    """`42 s`, `3:07`, `1:02:09`; `-` where nobody knows."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def _reward(name: str, value: float) -> Cell:
    return Cell(name, value, _decimal(value), followed=True)


def _decimal(value: float) -> str:
    return f"{value:.3f}" if not abs(value) >= 1e5 else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{value:.0%}" if not 0 < value < 0.005 else "<1%"


NO_SIGNAL = "no signal"

_OTHERS = (
    ("length", "completions/mean_length", lambda value: f"{value:.1f}"),
    ("cut off", "completions/clipped_ratio", _share),
    ("entropy", "entropy", _decimal),
    ("KL", "kl", lambda value: f"{value:.3g}"),
    ("clip", "clip_ratio/region_mean", _share),
    ("clip", "cispo_clip_ratio", _share),
    (NO_SIGNAL, "frac_reward_zero_std", _share),
)
