"""How advantages and weights are spread over the tokens, step by step, from the token records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .run import Run
from .series import MOST_PANELS, Absent, limits
from .style import COLOURS, label, panels_figure

MOST_FILES = 200
"""Token record files that are read for a figure, evenly over the training."""

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_NONE = "No token records with trained rows: train with token_records: 64 to see single tokens."


def advantages(runs: Sequence[Run]) -> Figure | Absent:
    """The advantages of live tokens as the loss used them."""
    return _bands(runs, "advantage", "advantage of a live token")


def weights(runs: Sequence[Run]) -> Figure | Absent:
    """The weights of live tokens, relative to their mean in the same file."""
    return _bands(runs, "weight", "weight of a live token, mean = 1")


def live_values(run: Run, path: Path, column: str) -> Any:
    """A column's finite values at the live tokens of one file's trained rows, `(N,)`; None where it has none.

    What does not fit together, as many values as tokens, is told as damage.
    """
    columns = run.columns_of(path, [column, "live"])
    if columns is None or columns.keys() != {column, "live"}:
        return None
    valid = columns[column].is_valid()
    values, live = (columns[name].filter(valid) for name in (column, "live"))
    try:
        values = np.asarray(values.flatten().to_numpy(zero_copy_only=False), dtype=float)
        live = np.asarray(live.flatten().to_numpy(zero_copy_only=False), dtype=bool)
    except (AttributeError, TypeError, ValueError):
        values, live = np.zeros(1), np.zeros(0)
    if values.shape != live.shape:
        run.tell(f"{path} was left out of the figures: its columns {column} and live do not fit together.")
        return None
    kept = values[live & np.isfinite(values)]
    return kept if kept.size else None


def evenly(paths: Sequence[Path], most: int = MOST_FILES) -> list[Path]:
    """At most so many of the files, the first and the last among them."""
    if len(paths) <= most:
        return list(paths)
    return [paths[round(index * (len(paths) - 1) / (most - 1))] for index in range(most)]


def _bands(runs: Sequence[Run], column: str, what: str) -> Figure | Absent:
    tables = [(run, table) for run in runs if (table := _table(run, column)).size][:MOST_PANELS]
    if not tables:
        return Absent(_NONE)
    titles = [what if len(runs) == 1 else f"{label(run.name)}: {what}" for run, _ in tables]
    figure, axes = panels_figure(titles, below=1)
    for number, ((_, table), axis) in enumerate(zip(tables, axes, strict=True)):
        steps, lowest, low, middle, high, highest = table.T
        colour = COLOURS[number % len(COLOURS)]
        outer = axis.fill_between(steps, lowest, highest, color=colour, alpha=0.15, linewidth=0)
        inner = axis.fill_between(steps, low, high, color=colour, alpha=0.3, linewidth=0)
        (median,) = axis.plot(steps, middle, color=colour, marker="o", markevery=max(1, len(steps) // 12))
        axis.set_xlim(*limits(runs) if any(run.history for run in runs) else (steps[0] - 0.5, steps[-1] + 0.5))
        if number == 0:
            names = ["median", "half of the tokens", "nine in ten"]
            figure.legend([median, inner, outer], names, loc="outside lower center", ncols=3)
    return figure


def _table(run: Run, column: str) -> Any:
    """Step and quantiles by row."""
    rows = []
    for path in evenly(run.records):
        values = live_values(run, path, column)
        if values is None:
            continue
        if column == "weight":
            if not (mean := values.mean()) > 0:
                continue
            values = values / mean
        rows.append([float(path.stem.removeprefix("step_")), *np.quantile(values, QUANTILES)])
    return np.array(rows)
