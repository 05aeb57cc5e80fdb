"""What went wrong in a run, from what it recorded: for the end of the run, the report and anybody's script.

Silence is the default. A change counts if it is large and at least four times what noise does to a difference of two
means; a state counts if it lasts to the end, for a quarter of the run or more. Runs with fewer than eight log entries
and metrics with fewer than four points have no findings. docs/report.md#findings shows what is found, and on which runs
this was tried.
"""

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..errors import ManifestError
from ..guard.untrusted import printable_name
from .manifest import FILE as MANIFEST
from .manifest import Manifest

History = Sequence[Mapping[str, Any]]
Values = np.ndarray[Any, Any]

SHORTEST_RUN = 8  # fewest log entries of training that can have a finding
SHORTEST_METRIC = 4  # fewest points of a metric
SIGMAS = 4.0  # standard errors by which a change must exceed noise
LARGE_FALL = 0.2  # least fall, relative to the largest of the values compared
_PART = re.compile(r"parts/(.+)/(mean|present)", re.DOTALL)
_IDLE = {
    "part_missing": "no completion has",
    "part_never_right": "no completion scores in",
    "part_always_right": "every completion scores 1 in",
}
NO_SIGNAL = 0.9  # share of groups
TRUNCATED = 0.5  # of completions
ENTROPY_LEFT = 0.05  # of the first entropy
FAILING = 0.05  # of completions
_FAILURES = ("timeout", "died", "refused", "error", "unparseable_reference", "unreadable", "none")


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong."""

    name: str  # which finding; stable
    since: int  # the optimizer step from which on it is seen
    until: int  # the last step at which it is seen
    sentence: str  # what happened, with the numbers

    def __str__(self) -> str:
        return f"since step {self.since} {self.sentence}."


class Curve:
    """A metric over steps, with its means over a moving window of a fifth of the points."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self.points = points
        self.steps = sorted(points)
        self.values = np.array([points[step] for step in self.steps])
        self.window = max(len(points) // 5, 1)

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def means(self) -> Values:
        means: Values = sliding_window_view(self.values, self.window).mean(axis=1) if self.steps else self.values
        return means

    @cached_property
    def best(self) -> int:
        """The window with the highest mean."""
        return int(self.means.argmax())

    @property
    def best_step(self) -> int:
        """The last step of that window."""
        return self.steps[self.best + self.window - 1]

    @property
    def size(self) -> float:
        """The largest magnitude of the first, the best and the last mean."""
        return float(np.abs(self.means[[0, self.best, -1]]).max())

    def change(self, window: int = 0) -> float:
        """By how much the last mean exceeds a window's; 0 if noise (by second differences) or rounding may do it."""
        bends = np.diff(self.values, n=2)
        noise = np.sqrt(np.mean(bends**2) / 6 * 2 / self.window) if len(bends) else math.inf
        change = float(self.means[-1] - self.means[window])
        return change if abs(change) > max(SIGMAS * noise, 0.02 * self.size) else 0.0

    def fall(self) -> float:
        """By how much the last mean is below the best; 0 unless the fall is large."""
        fall = -self.change(self.best)
        return fall if fall > 0 and fall >= LARGE_FALL * self.size else 0.0

    def window_at(self, step: int) -> int:
        """The last window that ends at a step or before; the first if there is none."""
        return max(sum(end <= step for end in self.steps[self.window - 1 :]) - 1, 0)

    def since(self, holds: Values, share: float = 0.25) -> int | None:
        """The point from which something holds for every mean to the end; None if that or the run is too short."""
        broken = np.flatnonzero(~holds)
        first = int(broken[-1]) + self.window if len(broken) else 0
        lasts = len(self) - first >= max(share * len(self), SHORTEST_METRIC)
        return first if lasts and len(self) >= SHORTEST_RUN else None


@dataclass(frozen=True)
class RunFacts:
    """What the findings know of a run: log, rewards of weight 0, shapers."""

    history: History
    untrained: Collection[str] = ()
    shapers: Collection[str] = ()

    def curve(self, key: str) -> Curve:
        """The finite values of a metric."""
        known = [(entry["step"], entry.get(key)) for entry in self.history if "step" in entry]
        return Curve({int(s): float(v) for s, v in known if isinstance(v, int | float) and math.isfinite(v)})

    @cached_property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for entry in self.history for key in entry))

    @cached_property
    def rewards(self) -> list[str]:
        """The names of the rewards that are trained on."""
        found = (re.fullmatch(r"rewards/(.+)/mean", key, re.DOTALL) for key in self.keys)
        return [one[1] for one in found if one and one[1] not in self.untrained and one[1] not in self.shapers]

    @cached_property
    def reward(self) -> Curve:
        return self.curve("reward")


def findings_of(folder: str | Path, history: History) -> list[Finding]:
    """The findings of a run: its output_dir, with the manifest, and its entries in `trainer.state.log_history`."""
    try:
        plugins = Manifest.read(Path(folder) / MANIFEST).plugins
    except (ManifestError, OSError):
        plugins = ()
    schedules = [one.parameters for one in plugins if one.name == "reward_schedule" and one.parameters]
    scheduled = {reward for parameters in schedules for reward in parameters.get("weights") or ()}
    weightless = {one.name for one in plugins if one.kind == "reward" and one.weight == 0 and one.inside is None}
    shapers = {one.name for one in plugins if one.role == "shaper"}
    return findings(RunFacts(history, weightless - scheduled, shapers))


def findings(run: RunFacts) -> list[Finding]:
    if len(run.reward) < SHORTEST_RUN:
        return []
    return [
        *reward_against_metric(run),
        *reward_fell(run),
        *no_signal(run),
        *truncated(run),
        *entropy_gone(run),
        *constant_reward(run),
        *failing_reward(run),
        *idle_parts(run),
    ]


def reward_against_metric(run: RunFacts) -> Iterator[Finding]:
    """The reward rises while what is independent of it falls: held-out values, weight 0, the reward before shapers."""
    names = {f"rewards/{name}/mean": f"{printable_name(name)}, which is not trained on," for name in run.untrained}
    names |= {f"eval_rewards/{name}/mean": f"held-out {printable_name(name)}" for name in run.untrained}
    at_k = sorted((int(k[1]), key) for key in run.keys if (k := re.match(r"eval_pass@(\d+)", key)))
    names |= {key: f"held-out pass@{k}" for k, key in at_k[:1]}  # a large k may fall in a healthy run
    names |= {"eval_reward": "the held-out reward", "raw_reward": "the reward before shaping"}
    fallen: dict[str, Curve] = {}
    for key, metric in names.items():
        curve = run.curve(key)
        fell = len(curve) >= SHORTEST_METRIC and curve.fall() > 0
        if fell and run.reward.change(run.reward.window_at(curve.best_step)) > 0:
            fallen[metric] = curve
    if fallen:
        metric, curve = max(fallen.items(), key=lambda item: item[1].fall() / item[1].size)
        rise = _from_to(run.reward, run.reward.window_at(curve.best_step))
        sentence = f"the reward rises ({rise}) while {metric} falls ({_from_to(curve, curve.best)})"
        yield Finding("reward_against_metric", curve.best_step, run.reward.steps[-1], sentence)


def reward_fell(run: RunFacts) -> Iterator[Finding]:
    """The reward lost at least half of what it had gained, or sank from the start."""
    curve = run.reward
    fall = curve.fall()
    if fall and fall >= (curve.means[curve.best] - curve.means[0]) / 2:
        sentence = f"the reward falls ({_from_to(curve, curve.best)})"
        yield Finding("reward_fell", curve.best_step, curve.steps[-1], sentence)


def no_signal(run: RunFacts) -> Iterator[Finding]:
    """Nine groups in ten teach nothing."""
    curve = run.curve("groups/zero_variance" if "groups/zero_variance" in run.keys else "frac_reward_zero_std")
    if (first := curve.since(curve.means >= NO_SIGNAL)) is not None:
        silent = curve.values[first:].mean()
        sentence = f"{silent:.0%} of the groups have no signal (reward {run.reward.means[-1]:.3g})"
        yield Finding("no_signal", curve.steps[first], curve.steps[-1], sentence)


def truncated(run: RunFacts) -> Iterator[Finding]:
    """Lengths run to the limit; or most completions were cut off from the start and the reward does not rise."""
    curve = run.curve("completions/clipped_ratio")
    if (first := curve.since(curve.means >= TRUNCATED)) is None:
        return
    grew = curve.change() >= TRUNCATED / 2
    if grew or run.reward.change() <= 0:
        before = f" ({curve.means[0]:.0%} at first)" if grew else ", and the reward does not rise"
        sentence = f"{curve.means[-1]:.0%} of the completions are cut off at the limit{before}"
        yield Finding("truncated", curve.steps[first], curve.steps[-1], sentence)


def entropy_gone(run: RunFacts) -> Iterator[Finding]:
    """Next to nothing is left of the entropy, and the reward has not risen."""
    curve = run.curve("entropy")
    start = sum(curve.values[:3]) / 3  # it may go within the first window
    first = curve.since(curve.means <= ENTROPY_LEFT * start)
    if first is not None and start > 0 and run.reward.change() <= 0:
        left = f"{start:.3g} to {curve.means[-1]:.3g} nats"
        sentence = f"the entropy is gone ({left}) and the reward has not risen"
        yield Finding("entropy_gone", curve.steps[first], curve.steps[-1], sentence)


def constant_reward(run: RunFacts) -> Iterator[Finding]:
    """One of several rewards is the same for all completions, for half of the run or more."""
    for name in run.rewards if len(run.rewards) > 1 else ():
        spread = run.curve(f"rewards/{name}/std")
        value = next(reversed(run.curve(f"rewards/{name}/mean").values), 0.0)
        # In float32 the deviation of equal values is not 0.
        if (first := spread.since(spread.means <= 1e-6 * max(abs(value), 1.0), share=0.5)) is not None:
            sentence = f"the reward {printable_name(name)} is {value:.3g} for every completion"
            yield Finding("constant_reward", spread.steps[first], spread.steps[-1], sentence)


def failing_reward(run: RunFacts) -> Iterator[Finding]:
    """A reward cannot judge a growing share of the completions, for reasons other than the completion."""
    for name in run.rewards:
        judged = any(key.startswith(f"outcomes/{name}/") for key in run.keys)
        prefix, failures = ("outcomes", _FAILURES) if judged else ("rewards", ("none", "nan"))
        shares = {failure: run.curve(f"{prefix}/{name}/{failure}").points for failure in failures}
        # A reward logs the outcomes that it can have, and its mean only where that is known.
        nothing = dict.fromkeys({*run.reward.steps, *itertools.chain(*shares.values())}, 0.0)
        curves = {failure: Curve({**nothing, **points}) for failure, points in shares.items()}
        total = Curve({step: sum(points.get(step, 0.0) for points in shares.values()) for step in nothing})
        first = total.since(total.means >= (total.means[0] + total.means[-1]) / 2, share=0.0)
        if total.change() < FAILING or first is None:
            continue
        most = max(curves, key=lambda failure: curves[failure].means[-1]).replace("_", " ")
        share = f"{total.means[-1]:.0%} of the completions ({total.means[0]:.0%} at first)"
        sentence = f"{printable_name(name)} cannot judge {share}, most of them for {most}"
        yield Finding("failing_reward", total.steps[first], total.steps[-1], sentence)


def idle_parts(run: RunFacts) -> Iterator[Finding]:
    """A part whose score is 0, or 1, or that is nowhere, in all completions."""
    idle: dict[str, list[tuple[str, Curve, int]]] = {kind: [] for kind in _IDLE}
    for key in run.keys:
        if (found := _PART.fullmatch(key)) is None:
            continue
        curve = run.curve(key)
        kinds = {"part_missing": curve.means <= 0}
        if found[2] == "mean":
            kinds = {"part_never_right": curve.means == 0, "part_always_right": curve.means == 1}
        for kind, holds in kinds.items():
            if (first := curve.since(holds, share=0.5)) is not None:
                idle[kind].append((printable_name(found[1]), curve, first))
    missing = {name for name, *_ in idle["part_missing"]}
    for kind, parts in idle.items():
        if kind != "part_missing":
            parts = [one for one in parts if one[0] not in missing]
        if parts:
            _, curve, first = parts[0]
            more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
            sentence = f"{_IDLE[kind]} {', '.join(name for name, *_ in parts[:3])}{more}"
            yield Finding(kind, curve.steps[first], curve.steps[-1], sentence)


def _from_to(curve: Curve, window: int) -> str:
    """The mean of a window, and the last one."""
    return f"{curve.means[window]:.3g} to {curve.means[-1]:.3g}"
