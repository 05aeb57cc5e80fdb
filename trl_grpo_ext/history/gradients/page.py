"""One HTML page with the figure and the tables, in the style of the report and as locked down, without any script."""

from __future__ import annotations

import os
from pathlib import Path

from markupsafe import Markup

from ...errors import ConfigurationError
from ...records.files import write_atomically
from ..report.drawing import COLOURS, INK, label, style
from ..report.page import environment, join_assets, policy
from ..report.svg import svg_of
from . import PLAIN, POLICY_GRADIENT, Estimate, GradientQuality
from .tables import head, main_table, share_tables

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ConfigurationError(f"The page needs {error.name}: pip install 'trl-grpo-ext[report]'") from error


def draw(found: GradientQuality) -> Figure:
    """The worth of each selection and its cosine to the policy gradient, with intervals; call it under `style`."""
    shown = [one for one in found.selections if one.name != PLAIN]
    figure = Figure(figsize=(6.4, 1.0 + 0.26 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, one in enumerate(reversed(shown)):
        p = one.worth_p if one.name != POLICY_GRADIENT else None
        _bar(left, one.worth, place, p is not None and p < 0.05)
        if one.name != POLICY_GRADIENT:
            _bar(right, one.to_policy_gradient, place, one.bias_p is not None and one.bias_p < 0.05)
    left.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    left.set(title="worth × completions of plain TRL", xlabel="filled: differs from 1 (p < 0.05)")
    plain = next(one for one in found.selections if one.name == PLAIN).to_policy_gradient.value
    if plain is not None:
        right.axvline(plain, color=INK, linewidth=0.8, linestyle=":")
    right.set(title="cosine to the policy gradient", xlabel="dotted: plain TRL; filled: below 1 (p < 0.05)")
    left.set_yticks(range(len(shown)), [label(one.name) for one in reversed(shown)])
    return figure


def _bar(axes: Axes, one: Estimate, place: int, filled: bool) -> None:
    if one.value is None:
        axes.text(0.5, place, "no signal seen", transform=axes.get_yaxis_transform(), ha="center", va="center")
        return
    if one.low is not None and one.high is not None:
        axes.plot([one.low, one.high], [place, place], "-", color=COLOURS[0], linewidth=1.5)
    axes.plot(one.value, place, "o", color=COLOURS[0], markerfacecolor=COLOURS[0] if filled else "none")


def write_page(found: GradientQuality, path: str | os.PathLike[str]) -> Path:
    """Write the page atomically."""
    with style():
        figure = draw(found)
    sheet = join_assets(("page.css", "browser.css", "narrow.css"))
    html = (
        environment()
        .get_template("gradients.html.jinja")
        .render(
            policy=policy(sheet, ""),
            style=Markup(sheet),
            head=head(found),
            notes=found.notes,
            svg=Markup(svg_of(figure, "gradients", "Worth and direction of each selection's gradient")),
            tables=[main_table(found), *share_tables(found)],
        )
    )
    path = Path(path)
    try:
        write_atomically(path, html.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigurationError(f"The page cannot be written to {path} ({error.strerror}).") from error
    return path
