"""The figures of some runs: as SVG for the page, as PNG beside the run.

`plots` lists them with their stable names; adding one there adds it everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigurationError
from .run import Run

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ConfigurationError(f"The report needs {error.name}: pip install 'trl-grpo-ext[report]'") from error

from .plots import PLOTS, Plot
from .series import Absent
from .style import style
from .svg import svg_of

PNG_FOLDER = "figures"
"""Where the PNGs of a run go, in its folder."""

_DPI = 150


@dataclass(frozen=True)
class Shown:
    """A figure as the page shows it.

    Attributes:
        name: Stable, of letters and underscores.
        theme: Its heading.
        title: Of the figure.
        caption: One sentence that says what to look for.
        svg: One `<svg>` element, safe to put into HTML: it has no style, no script, no link out of itself, and
            everything that came from outside is text. None where there is no figure.
        reason: Why there is none; empty where there is one.
    """

    name: str
    theme: str
    title: str
    caption: str
    svg: str | None
    reason: str = ""


def figures(runs: Sequence[Run]) -> list[Shown]:
    """All figures of these runs, in the order in which they are shown.

    Args:
        runs: Overlaid in every figure.
    """
    shown = []
    for plot, drawn in drawn_plots(runs):
        found = (None, drawn.reason) if isinstance(drawn, Absent) else (svg_of(drawn, plot.name, plot.title), "")
        shown.append(Shown(plot.name, plot.theme, plot.title, plot.caption, *found))
    return shown


def drawn_plots(runs: Sequence[Run]) -> Iterator[tuple[Plot, Figure | Absent]]:
    """Each figure as matplotlib has it, or why there is none."""
    for plot in PLOTS:
        with style():
            drawn = plot.draw(runs)
        yield plot, drawn


def save_pngs(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """Write every figure that there is as `FOLDER/NAME.png`, on white.

    Returns:
        The files, in order. A file of an earlier call whose figure is no longer there is left.

    Raises:
        ConfigurationError: They cannot be written there.
    """
    folder = Path(folder)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plot, drawn in drawn_plots(runs):
            if isinstance(drawn, Absent):
                continue
            unfinished = folder / f".{plot.name}.png"
            with style():
                drawn.suptitle(plot.title)
                drawn.savefig(unfinished, format="png", dpi=_DPI, facecolor="white", transparent=False)
            written.append(unfinished.replace(folder / f"{plot.name}.png"))
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigurationError(f"The figures cannot be written to {folder}: {why}. Name another folder.") from error
    return written
