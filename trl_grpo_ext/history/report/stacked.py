"""Parts of a whole over steps, stacked: outcomes of rewards, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from .run import Run
from .series import MOST_PANELS, MOST_POINTS, Absent, limits
from .style import COLOURS, HATCHES, INK, label, panels_figure

Parts = Mapping[str, str]
"""The name of each part, from the bottom, with its metric."""


def stacked(panels: Sequence[tuple[str, Run, Parts]], reason: str, *, share: bool = False) -> Figure | Absent:
    """Draw areas on each other, one panel for each title; the same part has the same colour and hatching in all.

    Args:
        panels: Title, run and parts; without any data it is left out, and so are those past the twelfth.
        reason: Why there is no figure where none has data.
        share: Whether the whole is 1.
    """
    tables = [(title, table) for title, run, parts in panels if (table := _table(run, parts))[0]][:MOST_PANELS]
    if not tables:
        return Absent(reason)
    order = list(dict.fromkeys(name for _, (_, parts) in tables for name in parts))
    figure, axes = panels_figure([title for title, _ in tables], below=-(-len(order) // 4))
    legend: dict[str, Any] = {}
    for (_, (steps, parts)), axis in zip(tables, axes, strict=True):
        below = [0.0] * len(steps)
        for name, values in parts.items():
            number = order.index(name)
            above = [low + value for low, value in zip(below, values, strict=True)]
            area = axis.fill_between(
                _widened(steps),
                _doubled(below),
                _doubled(above),
                facecolor=COLOURS[number % len(COLOURS)],
                hatch=HATCHES[number % len(HATCHES)] or None,
                edgecolor=INK,
                linewidth=0.3,
                label=label(name),
            )
            legend.setdefault(label(name), area)
            below = above
        axis.set_ylim(0, 1 if share else None)
        axis.set_xlim(*limits([run for _, run, _ in panels]))
    figure.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=min(4, len(legend)))
    return figure


def _table(run: Run, parts: Parts) -> tuple[list[int], dict[str, list[float]]]:
    """The steps at which a part is known, and each part's values there; what is not known counts as nothing."""
    known = {name: dict(zip(*run.series(key), strict=True)) for name, key in parts.items()}
    known = {name: values for name, values in known.items() if any(values.values())}
    steps = sorted({step for values in known.values() for step in values})
    steps = steps[:: -(-len(steps) // MOST_POINTS)] if steps else []
    return steps, {name: [values.get(step, 0.0) for step in steps] for name, values in known.items()}


def _widened(steps: Sequence[int]) -> list[float]:
    """A single step has no extent, so it is drawn from half a step before to half a step behind."""
    return [steps[0] - 0.5, steps[0] + 0.5] if len(steps) == 1 else [float(step) for step in steps]


def _doubled(values: Sequence[float]) -> list[float]:
    return [*values, *values] if len(values) == 1 else list(values)
