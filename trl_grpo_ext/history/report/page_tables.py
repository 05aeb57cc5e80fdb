"""The page's tables: what each run came to, its hyper-parameters, its plugins; what differs stands first."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...plugins.selection import LABELS
from ...records.manifest import PluginRecord
from .run import Run

_ABSENT = "–"


@dataclass(frozen=True)
class Line:
    """One line of a table: a name and a text for each run; `differs` says whether the runs differ in it."""

    name: str
    cells: tuple[str, ...]
    differs: bool = False


@dataclass(frozen=True)
class Summary:
    """One metric of one run: the first and last value, the best with its step, as text."""

    metric: str
    first: str
    last: str
    best: str
    step: str


def summaries(run: Run) -> list[Summary]:
    """What a reader wants to know first: held-out evaluation, the reward, each reward, length, entropy, KL."""
    keys = run.keys()
    held_out = [
        key for key in keys if key == "eval_reward" or (key.startswith("eval_rewards/") and key.endswith("/mean"))
    ]
    rewards = [key for key in keys if key.startswith("rewards/") and key.endswith("/mean")]
    others = ["completions/mean_length", "completions/clipped_ratio", "entropy", "kl", "frac_reward_zero_std"]
    lines = []
    for key in dict.fromkeys([*held_out, "reward", *rewards, *others]):
        steps, values = run.series(key)
        if not values:
            continue
        directed = "reward" in key.split("/")[0]
        best = max(range(len(values)), key=values.__getitem__) if directed and "zero" not in key else None
        lines.append(
            Summary(
                f"{key.removeprefix('eval_')} (held out)" if key in held_out else key,
                shown(values[0]),
                shown(values[-1]),
                _ABSENT if best is None else shown(values[best]),
                _ABSENT if best is None else str(steps[best]),
            )
        )
    return lines


def facts(run: Run) -> list[str]:
    """Sentences for the head of the page: steps, files, dates."""
    from .page_rows import step_of

    texts = [f"{run.last_step:,} optimizer steps"] if run.last_step else []
    files = [*run.records, *run.completions]
    if files:
        steps = sorted({step_of(file) for file in files})
        texts.append(f"completions saved at {len(steps)} steps, {steps[0]} to {steps[-1]}")
    times = []
    for file in [*files, *run.folder.glob("*.json*")]:
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    if times:
        first, last = (datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M") for time in (min(times), max(times)))
        texts.append(f"files written {first}" if first == last else f"files written {first} to {last}")
    return texts


def settings(runs: Sequence[Run]) -> list[Line]:
    """Hyper-parameters, those that differ first."""
    names = sorted({str(name) for run in runs for name in run.settings})
    lines = [line(name, [_value(run.settings, name) for run in runs]) for name in names]
    return sorted(lines, key=lambda each: not each.differs)


def plugins(runs: Sequence[Run]) -> list[Line]:
    """The plugins of each run in the order in which they act, those that differ first, and the versions beneath."""
    tables = [_plugins(run) for run in runs]
    names = list(dict.fromkeys(name for table in tables for name in table))
    lines = [line(name, [table.get(name, _ABSENT) for table in tables]) for name in names]
    versions = [{} if run.manifest is None else run.manifest.versions for run in runs]
    libraries = list(dict.fromkeys(name for table in versions for name in table))
    lines += [line(f"version of {name}", [str(table.get(name) or _ABSENT) for table in versions]) for name in libraries]
    return sorted(lines, key=lambda each: not each.differs)


def line(name: str, cells: Sequence[str]) -> Line:
    """A line with what it says on the difference."""
    return Line(name, tuple(cells), len(set(cells)) > 1)


def shown(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}"


def _value(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return _ABSENT
    value = values[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _plugins(run: Run) -> dict[str, str]:
    """By kind and name what is known of a plugin, one text each."""
    if run.manifest is None:
        return {}
    seen: Counter[str] = Counter()
    texts: dict[str, str] = {}
    for record in run.manifest.plugins:
        name = f"{LABELS[record.kind]} {record.name}" + (f", in {record.inside}" if record.inside else "")
        seen[name] += 1
        texts[name if seen[name] == 1 else f"{name} ({seen[name]})"] = _told(record)
    return texts


def _told(record: PluginRecord) -> str:
    parts = [record.origin, record.target]
    if record.weight is not None:
        parts.append(f"weight {record.weight:g}")
    if record.parameters:
        parts.append(json.dumps(record.parameters, ensure_ascii=False))
    if record.switches:
        parts.append(json.dumps(record.switches, ensure_ascii=False))
    parts.append(f"source {record.source_hash[:12]}" if record.source_hash else record.source)
    return "\n".join(part for part in parts if part)
