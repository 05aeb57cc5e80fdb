"""The figures of some runs, as SVG for the page.

`PLOTS` lists them with their stable names: each is metrics as lines in panels, all in one style. The palette begins
with that of Okabe and Ito (2008), without its black and yellow, which vanish on a dark or a light background; `svg_of`
makes `INK` the `currentColor`. Names of rewards and runs are untrusted (`label`).
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ...errors import ConfigurationError
from ...guard.untrusted import escape
from .trained_run import Run

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
except ModuleNotFoundError as error:
    raise ConfigurationError(f"The report needs {error.name}: pip install {error.name}") from error

INK = "#010203"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C6D31", "#7F7F7F", "#9467BD", "#B5CF6B")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
WIDTH = 5.0  # inches, of a figure, which stays legible on a phone
HEIGHT = 1.7  # of a panel
MARGIN = 0.5  # of what stands below the panels
_STYLE = Path(__file__).parent / "assets" / "figures.mplstyle"
MOST_PANELS = 12
_HOLLOW: dict[str, Any] = {"markersize": 8.0, "markerfacecolor": "none", "markeredgewidth": 1.6, "linestyle": "none"}

# Held-out completions are not trained on, and often alone in their group: their loss, signal and weights say nothing.
_HELD_OUT = ("reward", "raw_reward", "completions/", "entropy", "kl", "pass@")


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib settings for making and for saving figures."""
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # ignore the user's own file
        mpl.rcParams.update(mpl.rc_params_from_file(_STYLE, use_default_template=False))
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # browsers have more fonts than matplotlib
        yield


def label(text: str, longest: int = 36) -> str:
    """A name made fit for a figure: one line, printable, not too long, never hidden from a legend."""
    shown = escape(text[: longest + 1])
    shown = shown if len(shown) <= longest else f"{shown[: longest - 1]}…"
    return f" {shown}" if shown.startswith("_") else shown or "(no name)"


@dataclass(frozen=True)
class Series:
    """One line of a panel: a metric, its name in the legend, and the metric of a band around it, plus and minus."""

    key: str
    name: str = ""
    spread: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes; a `share` lies between 0 and 1; of a `whole` a series is 0 where only others are known."""

    title: str
    series: Sequence[Series]
    share: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Plot:
    """One figure: its stable name, its title, one sentence to read it by, its panels, and why it may have none."""

    name: str
    title: str
    caption: str
    panels: Callable[[Sequence[Run]], Sequence[Panel]]
    absent: str = "No such metric is in the history."


_OUTCOMES = ("right", "scored", "wrong", "no_answer", "unparseable_reference", "none", "timeout", "died", "refused")
"""In this order; others follow."""


def _matches(runs: Sequence[Run], pattern: str) -> list[re.Match[str]]:
    """The names of metrics that match, in order of first appearance."""
    keys = dict.fromkeys(chain.from_iterable(run.keys() for run in runs))
    return [found for key in keys if (found := re.fullmatch(pattern, key, re.DOTALL))]


def _always(*panels: Panel) -> Callable[[Sequence[Run]], Sequence[Panel]]:
    return lambda runs: panels


def reward_functions(runs: Sequence[Run]) -> list[Panel]:
    """One panel per reward function: mean, and plus and minus the standard deviation."""
    names = dict.fromkeys(found[1] for found in _matches(runs, r"(?:eval_)?rewards/(.+)/mean"))
    return [Panel(name, [Series(f"rewards/{name}/mean", spread=f"rewards/{name}/std")]) for name in names]


def parts(runs: Sequence[Run]) -> list[Panel]:
    """Two panels per reward that consists of parts: the mean score of each part, and where it is present."""
    by_reward: dict[str, list[str]] = {}
    for found in _matches(runs, r"parts/([^/]+)/(.+)/mean"):
        by_reward.setdefault(found[1], []).append(found[2])
    panels = []
    for reward, names in by_reward.items():
        means = [Series(f"parts/{reward}/{name}/mean", name) for name in names]
        present = [Series(f"parts/{reward}/{name}/present", name) for name in names]
        panels.append(Panel(f"{reward}: mean score of each part", means))
        panels.append(Panel(f"{reward}: share of completions that have it", present, share=True))
    return panels


def outcomes(runs: Sequence[Run]) -> list[Panel]:
    """One panel per reward with outcomes: their shares."""
    found: dict[str, list[str]] = {}
    for match in _matches(runs, r"outcomes/(.+)/([^/]+)"):
        found.setdefault(match[1], []).append(match[2])
    panels = []
    for reward, names in found.items():
        order = sorted(names, key=lambda name: (_OUTCOMES.index(name) if name in _OUTCOMES else len(_OUTCOMES), name))
        shares = [Series(f"outcomes/{reward}/{name}", name) for name in order]
        panels.append(Panel(reward, shares, share=True, whole=True))
    return panels


def at_k(runs: Sequence[Run]) -> list[Panel]:
    """Per reward a panel of pass@k with a line for each k."""
    found: dict[str, list[Series]] = {}
    for k, reward in sorted({(int(m[1]), m[2] or "") for m in _matches(runs, r"eval_pass@(\d+)(?:/(.+))?")}):
        key = f"pass@{k}"
        found.setdefault(reward, []).append(Series(f"{key}/{reward}" if reward else key, key))
    return [
        Panel(f"{reward}: pass@k" if reward else "pass@k", series, share=True)
        for reward, series in sorted(found.items())
    ]


def hooks(runs: Sequence[Run]) -> list[Panel]:
    """What each hook did to the advantages: one panel per measure."""
    names = list(dict.fromkeys(found[1] for found in _matches(runs, r"advantage/(.+)/mean")))
    measures = {
        "sign_flips": "share of tokens whose advantage changed sign",
        "mass_moved": "mass moved: sum of changes / sum of advantages",
        "mean": "mean advantage after the hook",
        "std": "standard deviation of advantages after the hook",
    }
    return [
        Panel(title, [Series(f"advantage/{name}/{measure}", name) for name in names])
        for measure, title in measures.items()
    ]


PLOTS: tuple[Plot, ...] = (
    Plot(
        "reward_total",
        "Total reward",
        "The weighted sum that is trained on (band: standard deviation). It should rise, and the held-out points "
        "with it. If hooks shape rewards, the sum before them is shown too.",
        _always(
            Panel("reward", [Series("reward", spread="reward_std")]),
            Panel("reward before the shapers", [Series("raw_reward", spread="raw_reward_std")]),
        ),
    ),
    Plot(
        "reward_functions",
        "Reward per function",
        "Each function's mean over the batch (band: standard deviation); look for one that rises at another's "
        "expense, and for a band that vanishes.",
        reward_functions,
        "No rewards are in the history.",
    ),
    Plot(
        "parts",
        "Parts of rewards",
        "Each part's score, and how many completions have it; look for parts that do not improve, or are missing.",
        parts,
        "No reward of these runs returns Parts.",
    ),
    Plot(
        "outcomes",
        "Outcomes of rewards",
        "What became of the completions; if anything but right and wrong grows, the reward cannot judge.",
        outcomes,
        "No reward of these runs has outcomes; guard: {} gives any reward some.",
    ),
    Plot(
        "pass_at_k",
        "pass@k, held out",
        "The share of held-out problems that at least one of k completions solves; if pass@1 rises while a large k "
        "falls, the policy is giving up problems that it could solve.",
        at_k,
        "No evaluation logged pass@k: set pass_at_k.",
    ),
    Plot(
        "no_signal",
        "Groups without signal",
        "The share of groups whose completions all got the same reward; near 1 nothing is learned, because the "
        "problems are too easy or too hard, or the reward is too coarse.",
        _always(
            Panel("groups without spread in the reward", [Series("frac_reward_zero_std")], share=True),
            Panel("groups without spread, by the plugins' count", [Series("groups/zero_variance")], share=True),
        ),
    ),
    Plot(
        "hooks",
        "What each hook changed",
        "Signs flipped and mass moved by each advantage hook; one that moves nothing does nothing, and one that "
        "flips many signs rewards what was punished.",
        hooks,
        "No advantage hook is selected.",
    ),
    Plot(
        "lengths",
        "Lengths",
        "Tokens of the completions; watch for lengths that run away or collapse, and for a growing share cut off at "
        "the limit.",
        _always(
            Panel("mean tokens of a completion", [Series("completions/mean_length")]),
            Panel("mean tokens of those that ended by themselves", [Series("completions/mean_terminated_length")]),
            Panel("tokens of the longest", [Series("completions/max_length")]),
            Panel("share cut off at the limit", [Series("completions/clipped_ratio")], share=True),
        ),
    ),
    Plot(
        "entropy",
        "Entropy",
        "Mean entropy of the next token; a fall to 0 means that the policy no longer explores, a steep rise that it "
        "breaks down.",
        _always(Panel("entropy, nats", [Series("entropy")])),
    ),
    Plot(
        "optimisation",
        "KL divergence, loss, gradient norm, learning rate",
        "A jump of the KL divergence from the reference, or of the gradient norm, often comes before a collapse; the "
        "loss of GRPO says little.",
        _always(
            Panel("KL, nats per token", [Series("kl")]),
            Panel("loss", [Series("loss")]),
            Panel("gradient norm before clipping", [Series("grad_norm")]),
            Panel("learning rate", [Series("learning_rate")]),
        ),
    ),
)

FINDINGS: Mapping[str, tuple[str, str]] = {
    "reward_against_metric": ("reward_functions", "wrong-rewarded"),
    "reward_fell": ("reward_total", "all"),
    "no_signal": ("no_signal", "all"),
    "truncated": ("lengths", "truncated"),
    "entropy_gone": ("entropy", "all"),
    "constant_reward": ("reward_functions", "all"),
    "failing_reward": ("outcomes", "unparseable"),
    "part_never_right": ("parts", "all"),
    "part_always_right": ("parts", "all"),
    "part_missing": ("parts", "all"),
}
"""Where each finding is seen: the name of a figure, and a filter of the completion browser."""


@dataclass(frozen=True)
class _Line:
    """One series of one run in a panel, by step."""

    run: Run
    name: str  # in the legend
    points: dict[int, float]
    spread: dict[int, float]
    held_out: dict[int, float]


def _lines(runs: Sequence[Run], panel: Panel) -> Iterator[_Line]:
    for run in runs:
        steps = sorted({step for one in panel.series for step in run.series(one.key)[0]} if panel.whole else ())
        for one in panel.series:
            points, spread, held_out = (
                dict(zip(*run.series(key), strict=True)) for key in (one.key, one.spread, f"eval_{one.key}")
            )
            if points or held_out:
                name = f"{run.name} · {one.name}" if one.name and len(runs) > 1 else one.name or run.name
                held_out = held_out if one.key.startswith(_HELD_OUT) else {}
                yield _Line(run, label(name, 80), dict.fromkeys(steps, 0.0) | points, spread, held_out)


def draw_lines(runs: Sequence[Run], panels: Sequence[Panel]) -> Figure | None:
    """Draw runs in panels, from the top; panels without data, and those beyond the twelfth, are left out."""
    there = [(panel, lines) for panel in panels if (lines := [*_lines(runs, panel)])][:MOST_PANELS]
    if not there:
        return None
    every = [line for run in runs for _, lines in there for line in lines if line.run is run]
    looks: dict[str, dict[str, Any]] = {
        name: {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        for number, name in enumerate(dict.fromkeys(line.name for line in every))
    }
    names = [*looks, "held out"]
    longest = max(map(len, names))
    columns = max(1, min(len(names), 4, int(72 * WIDTH / (48 + 4.6 * longest))))  # points: the handle, and a character
    rows = -(-(len(looks) + 1) // columns)
    figure = Figure(figsize=(WIDTH, HEIGHT * len(there) + MARGIN + 0.17 * rows), layout="constrained")
    all_axes: list[Axes] = list(figure.subplots(len(there), 1, squeeze=False, sharex=True)[:, 0])
    for (panel, lines), axis in zip(there, all_axes, strict=True):
        axis.set_title(label(panel.title, 60))
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
        for line in lines:
            _draw(axis, line, looks[line.name])
        if panel.share:
            axis.set_ylim(-0.03, 1.03)
    all_axes[-1].set_xlabel("optimizer step")
    handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
    if any(line.held_out for line in every):
        handles.append(Line2D([], [], label="held out", color=INK, marker="o", **_HOLLOW))
    if len(handles) > 1:
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


def _draw(axis: Axes, line: _Line, look: Mapping[str, Any]) -> None:
    points = line.points
    if steps := [step for step in points if step in line.spread]:
        lower = [points[step] - line.spread[step] for step in steps]
        upper = [points[step] + line.spread[step] for step in steps]
        axis.fill_between(steps, lower, upper, color=look["color"], alpha=0.18, linewidth=0)
    if points:
        axis.plot([*points], [*points.values()], markevery=len(points) // 12 or 1, label=line.name, **look)
    if line.held_out:
        places = [*line.held_out]
        axis.plot(places, [*line.held_out.values()], label=f"{line.name} (held out)", **look, **_HOLLOW)


def svgs(runs: Sequence[Run]) -> Iterator[tuple[Plot, str | None]]:
    """Each figure as one `<svg>` element without style, script or outside link; None if there is nothing to draw."""
    for plot in PLOTS:
        with style():
            drawn = draw_lines(runs, plot.panels(runs))
        yield plot, None if drawn is None else svg_of(drawn, plot.name, plot.title)


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
