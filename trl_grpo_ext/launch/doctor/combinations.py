"""All rules about combinations that do not work, and the plugins that they ask about.

Each rule is a small function of a `Case` that returns a problem or None; its docstring says why. They stand by theme in
`combinations_launch`, `combinations_weights`, `combinations_vllm`, `combinations_training` and `combinations_machine`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError, PluginError
from ...plugins.loading import resolve
from ...plugins.selection import LABELS, Kind
from . import (
    combinations_launch,
    combinations_machine,
    combinations_training,
    combinations_vllm,
    combinations_weights,
)
from .case import Case, Plugins, Rule
from .problem import Problem
from .run_file import PLUGIN_FIELDS, RunPlan
from .settings_file import shown

RULES: tuple[Rule, ...] = (
    *combinations_machine.RULES,
    *combinations_launch.RULES,
    *combinations_weights.RULES,
    *combinations_vllm.RULES,
    *combinations_training.RULES,
)
_KINDS: tuple[Kind, ...] = ("reward", "advantage_hook", "loss_aggregation")
_LONGEST_LINE = 1_000_000


def combination_problems(case: Case) -> list[Problem]:
    """What all rules find."""
    return [problem for rule in RULES if (problem := rule(case)) is not None]


def load_plugins(run: RunPlan) -> Plugins:
    """Import and build the selected plugins one by one, so that every broken one is told."""
    built: dict[Kind, dict[str, Any]] = {kind: {} for kind in _KINDS}
    problems = []
    for kind, name in zip(_KINDS, PLUGIN_FIELDS, strict=True):
        for selection in _selections(run.settings.get(name)):
            label = str(selection.get("name", selection)) if isinstance(selection, Mapping) else str(selection)
            try:
                loaded = resolve(kind, selection)
            except (ConfigurationError, PluginError) as error:
                problems.append(
                    Problem(
                        "error", "plugins", shown(error, 600), f"Mend {LABELS[kind]} {shown(label, 80)} in `{name}`."
                    )
                )
                continue
            key = label if loaded.selection is None else str(loaded.selection)
            place = built[kind]
            place[key if key not in place else f"{key} ({len(place) + 1})"] = loaded.object
    aggregation = next(iter(built["loss_aggregation"].values()), None)
    return Plugins(built["reward"], built["advantage_hook"], aggregation, tuple(problems))


def columns_of(run: RunPlan) -> frozenset[str] | None:
    """Columns of the first row of a data set in JSON Lines; None for anything else."""
    path = run.get("dataset_path")
    if not isinstance(path, str) or Path(path).suffix != ".jsonl":
        return None
    try:
        with Path(path).open(encoding="utf-8") as file:
            row = json.loads(file.readline(_LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return None
    return frozenset(row) if isinstance(row, dict) else None


def _selections(value: Any) -> list[Any]:
    if value is None:
        return []
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [] if [str(item).lower() for item in values] in (["none"], ["null"]) else values
