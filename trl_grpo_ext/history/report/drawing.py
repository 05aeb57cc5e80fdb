"""How figures are drawn: metrics as lines in panels, in one style.

The palette begins with that of Okabe and Ito (2008), without its black and yellow, which vanish on a dark or a light
background; `svg_of` makes `INK` the `currentColor`. Names of rewards and runs are untrusted (`label`).
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
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
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C6D31", "#7F7F7F", "#9467BD", "#B5CF6B")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")

WIDTH, HEIGHT, MARGIN = 5.0, 1.7, 0.5
"""Inches: of a figure, which stays legible on a phone; of a panel; of what stands below the panels."""

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

MOST_PANELS = 12

_HOLLOW: dict[str, Any] = {"markersize": 8.0, "markerfacecolor": "none", "markeredgewidth": 1.6, "linestyle": "none"}

# Held-out completions are not trained on, and often alone in their group: their loss, signal and weights say nothing.
_HELD_OUT = ("reward", "raw_reward", "completions/", "entropy", "kl", "pass@")


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


@dataclass(frozen=True)
class Absent:
    """Why there is no figure: a sentence that says what would give one."""

    reason: str


@dataclass(frozen=True)
class Series:
    """One line of a panel: a metric, its name in the legend, and the metric of a band around it, plus and minus."""

    key: str
    name: str = ""
    spread: str | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes; a `share` lies between 0 and 1; of a `whole` a series is 0 where only others are known."""

    title: str
    series: Sequence[Series]
    share: bool = False
    whole: bool = False


def draw_lines(runs: Sequence[Run], panels: Sequence[Panel], reason: str) -> Figure | Absent:
    """Draw runs in panels, from the top; panels without data, and those beyond the twelfth, are left out."""
    there = [(panel, shown) for panel in panels if (shown := _with_data(runs, panel))][:MOST_PANELS]
    if not there:
        return Absent(reason)
    every = [(run, one) for run in runs for _, shown in there for one in shown]
    names = dict.fromkeys(_name(runs, run, one.name) for run, one in every if _known(run, one))
    looks: dict[str, dict[str, Any]] = {
        name: {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        for number, name in enumerate(names)
    }
    columns = _legend_columns([*looks, "held out"])
    rows = -(-(len(looks) + 1) // columns)
    size = (WIDTH, HEIGHT * len(there) + MARGIN + 0.17 * rows)
    figure = Figure(figsize=size, layout="constrained")
    held_out = False
    all_axes: list[Axes] = list(figure.subplots(len(there), 1, squeeze=False, sharex=True)[:, 0])
    for (panel, shown), axis in zip(there, all_axes, strict=True):
        axis.set_title(label(panel.title, 60))
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
        for run in runs:
            steps = sorted({step for one in shown for step in run.series(one.key)[0]} if panel.whole else ())
            for series in (one for one in shown if _known(run, one)):
                name = _name(runs, run, series.name)
                known = dict.fromkeys(steps, 0.0) | _points(run, series.key)
                _draw_band(axis, run, series, looks[name]["color"])
                if known:
                    axis.plot([*known], [*known.values()], markevery=len(known) // 12 or 1, label=name, **looks[name])
                apart = _points(run, f"eval_{series.key}") if series.key.startswith(_HELD_OUT) else {}
                if apart:
                    axis.plot([*apart], [*apart.values()], label=f"{name} (held out)", **looks[name], **_HOLLOW)
                held_out |= bool(apart)
        if panel.share:
            axis.set_ylim(-0.03, 1.03)
    all_axes[-1].set_xlabel("optimizer step")
    handles = [Line2D([], [], label=name, **of) for name, of in looks.items()]
    if held_out:
        handles.append(Line2D([], [], label="held out", color=INK, marker="o", **_HOLLOW))
    if len(handles) > 1:
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


def _name(runs: Sequence[Run], run: Run, series: str) -> str:
    """A line's name in the legend."""
    if len(runs) == 1 and series:
        return label(series, 80)
    return label(f"{run.name} · {series}" if series else run.name, 80)


def _legend_columns(names: Sequence[str]) -> int:
    """The columns of a legend that fit into the width of a figure."""
    longest = max(map(len, names))
    return max(1, min(len(names), 4, int(72 * WIDTH / (48 + 4.6 * longest))))  # points: the handle, and a character


def _with_data(runs: Sequence[Run], panel: Panel) -> list[Series]:
    return [one for one in panel.series if any(_known(run, one) for run in runs)]


def _known(run: Run, series: Series) -> bool:
    return bool(run.series(series.key)[0] or run.series(f"eval_{series.key}")[0])


def _points(run: Run, key: str) -> dict[int, float]:
    return dict(zip(*run.series(key), strict=True))


def _draw_band(axis: Axes, run: Run, series: Series, colour: str) -> None:
    middle = _points(run, series.key)
    spread = _points(run, series.spread) if series.spread else {}
    if steps := [step for step in middle if step in spread]:
        lower, upper = ([middle[step] + sign * spread[step] for step in steps] for sign in (-1, 1))
        axis.fill_between(steps, lower, upper, color=colour, alpha=0.18, linewidth=0)


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
