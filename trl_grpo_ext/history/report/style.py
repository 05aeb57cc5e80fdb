"""How every figure looks: colours that the colour-blind can tell apart, dashes and markers for who sees none.

The palette is that of Okabe and Ito (2008), without its black and yellow, which vanish on one of the two backgrounds.
Text, axes and grid are drawn in `INK`, which `svg` makes `currentColor`, so that they are readable on light and dark.
Names of rewards and runs come from strangers: `label` takes out what is not printable, and `text.parse_math` is off, so
that a dollar sign is a dollar sign.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...guard.printable import escaped

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

WIDTH, HEIGHT, MARGIN = 6.4, 1.9, 0.5
"""Inches: of a figure, of one of its panels, and of what stands below them."""

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
    **dict.fromkeys(
        (
            "text.color",
            "axes.edgecolor",
            "axes.labelcolor",
            "axes.titlecolor",
            "xtick.color",
            "ytick.color",
            "grid.color",
        ),
        INK,
    ),
}


@contextmanager
def style() -> Iterator[None]:
    """The settings under which figures are made and saved; needed around both."""
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # whatever the user's own file says
        mpl.rcParams.update(_SETTINGS)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser has more fonts than we
        yield


def label(text: str, longest: int = 36) -> str:
    """A name as it may stand in a figure: on one line, printable, not too long, and never left out of a legend."""
    shown = escaped(text[: longest + 1])
    shown = shown if len(shown) <= longest else f"{shown[: longest - 1]}…"
    return f" {shown}" if shown.startswith("_") else shown or "(no name)"


def panels_figure(titles: list[str], unit: str = "optimizer step", below: int = 0) -> tuple[Figure, list[Axes]]:
    """A figure with panels below each other, each with its title.

    Args:
        titles: One for each panel.
        unit: Of the horizontal axis.
        below: Lines of a legend under the panels.
    """
    height = HEIGHT * len(titles) + MARGIN + 0.17 * below
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(titles), 1, squeeze=False, sharex=True)[:, 0])
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(label(title, 72))
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes[-1].set_xlabel(unit)
    return figure, axes
