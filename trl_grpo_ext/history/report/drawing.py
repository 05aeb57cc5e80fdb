"""How figures are drawn: metrics as lines, parts of a whole stacked, all in one style.

The palette is that of Okabe and Ito (2008), without its black and yellow, which vanish on a dark or a light background;
`svg_of` makes `INK` the `currentColor`. Runs and series also differ by dashes and markers, and stacked parts by
hatching, for readers who see no colours. Names of rewards and runs are untrusted (`label`).
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ...guard.untrusted import escape
from .trained_run import Run

INK = "#010203"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES: tuple[tuple[float, tuple[float, ...] | None], ...] = (
    (0, None),
    (0, (5, 2)),
    (0, (1, 1.5)),
    (0, (6, 2, 1, 2)),
    (0, (6, 2, 1, 2, 1, 2)),
    (0, (9, 3)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
HATCHES = ("", "//", "\\\\", "--", "||", "xx", "++", "///", "\\\\\\", "---")

WIDTH = 5.0
HEIGHT = 1.7
MARGIN = 0.5
"""Inches: width of a figure, height of a panel, and of what stands below the panels. Narrow figures stay legible on a
phone."""

_SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "trl-grpo-ext",  # the same picture is the same file
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "legend.handlelength": 3.0,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "auto",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), INK),
}


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib settings for making and for saving figures."""
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # ignore the user's own file
        mpl.rcParams.update(_SETTINGS)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # browsers have more fonts than matplotlib
        yield


def label(text: str, longest: int = 36) -> str:
    """A name made fit for a figure: one line, printable, not too long, never hidden from a legend."""
    shown = escape(text[: longest + 1])
    shown = shown if len(shown) <= longest else f"{shown[: longest - 1]}…"
    return f" {shown}" if shown.startswith("_") else shown or "(no name)"


def panels_figure(titles: list[str], legend: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A figure with panels below each other, each with its title, and room for a legend of these names below them."""
    height = HEIGHT * len(titles) + MARGIN + 0.17 * legend_grid(legend)[1]
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(titles), 1, squeeze=False, sharex=True)[:, 0])
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(label(title, 60))
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes[-1].set_xlabel("optimizer step")
    return figure, axes


def legend_grid(names: Sequence[str]) -> tuple[int, int]:
    """The columns of a legend that fit into the width of a figure, and its rows."""
    longest = max(len(label(name)) for name in names)
    columns = max(1, min(len(names), 4, int(72 * WIDTH / (48 + 4.6 * longest))))  # points: the handle, and a character
    return columns, -(-len(names) // columns)


# ---------------------------------------------------------------------------------------------- metrics over steps


MOST_POINTS = 1000
"""Most points of a line; of more, the lowest and highest of each stretch are drawn."""

MOST_PANELS = 12

_HOLLOW: dict[str, Any] = {"markersize": 8.0, "markerfacecolor": "none", "markeredgewidth": 1.6}


# Held-out completions are not trained on, and often alone in their group: their loss, signal and weights say nothing.
_HELD_OUT = ("reward", "raw_reward", "completions/", "entropy", "kl", "pass@")


@dataclass(frozen=True)
class Absent:
    """Why there is no figure: a sentence that says what would give one."""

    reason: str


@dataclass(frozen=True)
class Series:
    """One line of a panel: a metric, its name in the legend, and the metrics of a band around it.

    The band is plus and minus `spread`, or from `low` to `high`.
    """

    key: str
    name: str = ""
    spread: str | None = None
    low: str | None = None
    high: str | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes; of a `share` the values lie between 0 and 1."""

    title: str
    series: Sequence[Series | str]
    share: bool = False

    def lines(self, runs: Sequence[Run]) -> list[Series]:
        """The series with data in one of the runs; a plain metric is one."""
        every = [Series(one) if isinstance(one, str) else one for one in self.series]
        return [one for one in every if any(run.series(key)[0] for run in runs for key in (one.key, f"eval_{one.key}"))]


def draw_lines(runs: Sequence[Run], panels: Sequence[Panel], reason: str) -> Figure | Absent:
    """Draw runs in panels, from the top; panels without data, and those beyond the twelfth, are left out."""
    there = [(panel, shown) for panel in panels if (shown := panel.lines(runs))][:MOST_PANELS]
    if not there:
        return Absent(reason)
    names = list(dict.fromkeys(one.name for _, shown in there for one in shown if one.name))
    figure, axes = panels_figure([panel.title for panel, _ in there], [*names, *(run.name for run in runs), "held out"])
    looks: list[dict[str, Any]] = [
        {"color": COLOURS[n % len(COLOURS)], "marker": MARKERS[n % len(MARKERS)]} for n in range(len(names))
    ]
    handles = {label(name): Line2D([], [], **of) for name, of in zip(names, looks, strict=True)}
    held_out = False
    for number, run in enumerate(runs):
        own = {"color": INK if names else COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        dash = DASHES[number % len(DASHES)]
        if len(runs) > 1 or not names:
            handles[label(run.name)] = Line2D(
                [], [], linestyle=dash, color=own["color"], marker="" if names else own["marker"]
            )
        for (_, shown), axis in zip(there, axes, strict=True):
            for series in shown:
                of = looks[names.index(series.name)] if series.name else own
                _draw_band(axis, run, series, of["color"])
                _draw_line(axis, run, series, series.key, linestyle=dash, **of)
                if series.key.startswith(_HELD_OUT):
                    held_out |= _draw_line(axis, run, series, f"eval_{series.key}", linestyle="none", **of, **_HOLLOW)
    for (panel, _), axis in zip(there, axes, strict=True):
        _set_limits(axis, panel, runs)
    if held_out:
        handles["held out"] = Line2D([], [], color=INK, marker="o", linestyle="none", **_HOLLOW)
    if names or len(handles) > 1:
        _add_legend(figure, handles)
    return figure


def _add_legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """One legend below all panels."""
    columns, _ = legend_grid(list(handles))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)


def limits(runs: Sequence[Run]) -> tuple[float, float]:
    """The horizontal extent of every figure of these runs, in optimizer steps."""
    first = min((int(run.history[0]["step"]) for run in runs if run.history), default=0)
    last = max(run.last_step for run in runs)
    room = 0.02 * (last - first) or 0.5
    return first - room, last + room


def thin(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most `MOST_POINTS` of the points, in order: of each stretch the first, the lowest and the highest."""
    if len(steps) <= MOST_POINTS:
        return list(steps), list(values)
    size = -(-len(steps) // (MOST_POINTS // 3))
    kept: list[int] = []
    for start in range(0, len(steps), size):
        stretch = range(start, min(start + size, len(steps)))
        kept += sorted({start, min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)})
    return [steps[index] for index in kept], [values[index] for index in kept]


def _set_limits(axis: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    axis.set_xlim(*limits(runs))
    if panel.share:
        axis.set_ylim(-0.03, 1.03)
        return
    low, high = axis.get_ylim()
    middle = (low + high) / 2
    if high - low < 1e-4 * abs(middle):  # rounding errors are no curve
        axis.set_ylim(middle - 0.05 * abs(middle), middle + 0.05 * abs(middle))


def _draw_line(axis: Axes, run: Run, series: Series, key: str, **looks: Any) -> bool:
    """Draw a metric of a run, if it has that."""
    steps, values = thin(*run.series(key))
    if steps:
        name = f"{run.name} · {series.name}" if series.name else run.name
        name += " (held out)" if key != series.key else ""
        axis.plot(steps, values, markevery=max(1, len(steps) // 12), label=label(name, 80), **looks)
    return bool(steps)


def _draw_band(axis: Axes, run: Run, series: Series, colour: str) -> None:
    def known(key: str) -> dict[int, float]:
        return dict(zip(*run.series(key), strict=True))

    if series.spread:
        middle = known(series.key)
        spread = known(series.spread)
        edges = [{step: middle[step] + sign * spread[step] for step in middle if step in spread} for sign in (-1, 1)]
    elif series.low and series.high:
        edges = [known(series.low), known(series.high)]
    else:
        return
    steps = sorted(edges[0].keys() & edges[1].keys())
    every = -(-len(steps) // MOST_POINTS) if steps else 1
    steps = steps[::every]
    if steps:
        lower, upper = ([edge[step] for step in steps] for edge in edges)
        axis.fill_between(steps, lower, upper, color=colour, alpha=0.18, linewidth=0)


# ------------------------------------------------------------------------------------------------ parts of a whole


Parts = Mapping[str, str]
"""The name of each part, from the bottom, with its metric."""


def draw_stacked(panels: Sequence[tuple[str, Run, Parts]], reason: str, *, share: bool = False) -> Figure | Absent:
    """Draw stacked areas, one panel per title; a part has the same colour and hatching in all."""
    tables = [(title, table) for title, run, parts in panels if (table := _table(run, parts))[0]][:MOST_PANELS]
    if not tables:
        return Absent(reason)
    order = list(dict.fromkeys(name for _, (_, parts) in tables for name in parts))
    figure, axes = panels_figure([title for title, _ in tables], order)
    legend: dict[str, Any] = {}
    for (_, (steps, parts)), axis in zip(tables, axes, strict=True):
        numbers = [order.index(name) for name in parts]
        places: list[float] = [*steps]
        heights = list(parts.values())
        if len(steps) == 1:  # a single step has no extent, so draw it from half a step before to half a step after
            places = [steps[0] - 0.5, steps[0] + 0.5]
            heights = [[value, value] for [value] in heights]
        areas = axis.stackplot(
            places,
            heights,
            labels=[label(name) for name in parts],
            colors=[COLOURS[number % len(COLOURS)] for number in numbers],
            hatch=[HATCHES[number % len(HATCHES)] for number in numbers],
            edgecolor=INK,
            linewidth=0.3,
        )
        for area in areas:
            legend.setdefault(str(area.get_label()), area)
        axis.set_ylim(0, 1 if share else None)
        axis.set_xlim(*limits([run for _, run, _ in panels]))
    _add_legend(figure, legend)
    return figure


def _table(run: Run, parts: Parts) -> tuple[list[int], dict[str, list[float]]]:
    """The steps with any known part, and each part's values there; unknown ones count as 0."""
    known = {name: dict(zip(*run.series(key), strict=True)) for name, key in parts.items()}
    known = {name: values for name, values in known.items() if any(values.values())}
    steps = sorted({step for values in known.values() for step in values})
    steps = steps[:: -(-len(steps) // MOST_POINTS)] if steps else []
    return steps, {name: [values.get(step, 0.0) for step in steps] for name, values in known.items()}


# ------------------------------------------------------------------------------------------------- figures as SVG


_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"url\(#([^)]*)\)")
_FONTS = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"


def svg_of(figure: Figure, name: str, title: str) -> str:
    """The figure as one `<svg>` element, with its name before every id, so that several can share a page of HTML."""
    written = io.StringIO()
    with style():
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    root = ElementTree.fromstring(written.getvalue())
    for element in root.iter():
        for child in [child for child in element if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style")]:
            element.remove(child)
        _rewrite(element, name)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    attributes = {"role": "img", "aria-label": title, "font-family": _FONTS}
    root.attrib |= {**attributes, "stroke-linejoin": "round", "stroke-linecap": "butt"}  # what the style sheet said
    return ElementTree.tostring(root, encoding="unicode")


def _rewrite(element: ElementTree.Element, name: str) -> None:
    """One element's ids, references, colours, and its style as attributes, which no content security policy forbids."""
    for part in element.attrib.pop("style", "").split(";"):
        attribute, colon, value = part.partition(":")
        if colon and attribute.strip() != "font-family":
            element.set(attribute.strip(), value.strip())
    if "id" in element.attrib:
        element.set("id", f"{name}-{element.attrib['id']}")
    link = f"{{{_LINK}}}href"
    if element.get(link, "").startswith("#"):
        element.set(link, f"#{name}-{element.attrib[link][1:]}")
    for attribute, value in list(element.attrib.items()):
        if attribute in ("fill", "stroke", "clip-path"):
            element.set(attribute, _REFERENCE.sub(rf"url(#{name}-\1)", value).replace(INK, "currentColor"))
