"""Metrics over steps as lines: one panel for each thing measured, every run in each of them.

Where series have no names, runs are told apart by colour, dashes and marker. Else colour and marker are the series, in
all panels of the figure, and the dashes are the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .run import Run
from .style import COLOURS, DASHES, INK, MARKERS, label, panels_figure

MOST_POINTS = 1000
"""Points of a line in a figure; of more, the lowest and highest of each stretch are drawn."""

MOST_PANELS = 12

_HOLLOW: dict[str, Any] = {"markersize": 8.0, "markerfacecolor": "none", "markeredgewidth": 1.6}


@dataclass(frozen=True)
class Absent:
    """Why there is no figure: a sentence that says what would give one."""

    reason: str


@dataclass(frozen=True)
class Series:
    """One line of a panel.

    Attributes:
        key: The metric, as it is logged.
        name: What the legend says; needed where a panel has several.
        spread: A metric that is drawn as a band of plus and minus it.
        low: A metric that is drawn as the lower edge of a band.
        high: Its upper edge.
    """

    key: str
    name: str = ""
    spread: str | None = None
    low: str | None = None
    high: str | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: Says what is measured, with its unit.
        series: The lines; those that no run has are left out.
        share: Whether the values lie between 0 and 1.
        evaluated: Whether the held-out values, `eval_` and the key, are drawn too.
    """

    title: str
    series: Sequence[Series]
    share: bool = False
    evaluated: bool = True


def lines(runs: Sequence[Run], panels: Sequence[Panel], reason: str) -> Figure | Absent:
    """Draw panels.

    Args:
        runs: In every panel.
        panels: From the top; those without any data are left out, and those past the twelfth.
        reason: Why there is no figure where no panel has data.
    """
    known = [(panel, [one for one in panel.series if any(_has_data(run, one) for run in runs)]) for panel in panels]
    there = [(panel, shown) for panel, shown in known if shown][:MOST_PANELS]
    if not there:
        return Absent(reason)
    names = list(dict.fromkeys(one.name for _, shown in there for one in shown if one.name))
    named = bool(names)
    figure, axes = panels_figure([panel.title for panel, _ in there], below=2 + (len(names) + len(runs)) // 3)
    held_out = False
    for (panel, shown), axis in zip(there, axes, strict=True):
        for number, run in enumerate(runs):
            for series in shown:
                place = names.index(series.name) if series.name in names else number
                colour = INK if named and series.name not in names else COLOURS[place % len(COLOURS)]
                marker, dash = MARKERS[place % len(MARKERS)], DASHES[number % len(DASHES)]
                _band(axis, run, series, colour)
                _line(axis, run, series, {"color": colour, "marker": marker, "linestyle": dash})
                if panel.evaluated:
                    held_out |= _held_out(axis, run, series, {"color": colour, "marker": marker})
        _room(axis, panel, runs)
    entries = [(name, COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], DASHES[0]) for i, name in enumerate(names)]
    for i, run in enumerate(runs):
        own = (INK, "") if named else (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)])
        entries += [(run.name, *own, DASHES[i % len(DASHES)])] if len(runs) > 1 or not named else []
    _legend(figure, entries, named, held_out)
    return figure


def limits(runs: Sequence[Run]) -> tuple[float, float]:
    """The horizontal extent of every figure of these runs, in optimizer steps."""
    first = min((int(run.history[0]["step"]) for run in runs if run.history), default=0)
    last = max(run.last_step for run in runs)
    room = 0.02 * (last - first) or 0.5
    return first - room, last + room


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most `MOST_POINTS` of the points, in order: of each stretch the first, the lowest and the highest."""
    if len(steps) <= MOST_POINTS:
        return list(steps), list(values)
    size = -(-len(steps) // (MOST_POINTS // 3))
    kept: list[int] = []
    for start in range(0, len(steps), size):
        stretch = range(start, min(start + size, len(steps)))
        kept += sorted({start, min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)})
    return [steps[index] for index in kept], [values[index] for index in kept]


def _has_data(run: Run, series: Series) -> bool:
    return bool(run.series(series.key)[0]) or bool(run.series(f"eval_{series.key}")[0])


def _legend(figure: Figure, entries: Sequence[tuple[str, str, str, Any]], named: bool, held_out: bool) -> None:
    """One for all panels, below them; none where there is a single line without a name."""
    if not named and len(entries) + held_out < 2:
        return
    handles = [Line2D([], [], color=colour, marker=mark, linestyle=dash) for _, colour, mark, dash in entries]
    names = [label(name) for name, *_ in entries]
    if held_out:
        handles.append(Line2D([], [], color=INK, marker="o", linestyle="none", **_HOLLOW))
        names.append("held out")
    figure.legend(handles, names, loc="outside lower center", ncols=1 if max(map(len, names)) > 30 else 3)


def _room(axis: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    axis.set_xlim(*limits(runs))
    if panel.share:
        axis.set_ylim(-0.03, 1.03)
        return
    low, high = axis.get_ylim()
    middle = (low + high) / 2
    if high - low < 1e-4 * abs(middle):  # what rounding leaves is no curve
        axis.set_ylim(middle - 0.05 * abs(middle), middle + 0.05 * abs(middle))


def _line(axis: Axes, run: Run, series: Series, looks: dict[str, Any]) -> None:
    steps, values = thinned(*run.series(series.key))
    if steps:
        axis.plot(steps, values, markevery=max(1, len(steps) // 12), label=_called(run, series), **looks)


def _band(axis: Axes, run: Run, series: Series, colour: str) -> None:
    low, high = (series.low, series.high) if series.low and series.high else (series.key, series.key)
    known = [dict(zip(*run.series(key), strict=True)) for key in (low, high)]
    if series.spread:
        spread = dict(zip(*run.series(series.spread), strict=True))
        edges = [
            {step: value + sign * spread[step] for step, value in known[0].items() if step in spread}
            for sign in (-1, 1)
        ]
    elif series.low and series.high:
        edges = known
    else:
        return
    steps = sorted(edges[0].keys() & edges[1].keys())
    every = -(-len(steps) // MOST_POINTS) if steps else 1
    steps = steps[::every]
    if steps:
        lower, upper = ([edge[step] for step in steps] for edge in edges)
        axis.fill_between(steps, lower, upper, color=colour, alpha=0.18, linewidth=0)


def _held_out(axis: Axes, run: Run, series: Series, looks: dict[str, Any]) -> bool:
    steps, values = thinned(*run.series(f"eval_{series.key}"))
    if steps:
        axis.plot(steps, values, linestyle="none", label=f"{_called(run, series)} (held out)", **looks, **_HOLLOW)
    return bool(steps)


def _called(run: Run, series: Series) -> str:
    return label(f"{run.name} · {series.name}" if series.name else run.name, 80)
