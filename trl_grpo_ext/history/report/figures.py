"""The figures of some runs, as SVG for the page.

`PLOTS` lists them with their stable names. Each draws a list of runs or says why it cannot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ...errors import ConfigurationError
from .trained_run import Run

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ConfigurationError(f"The report needs {error.name}: pip install {error.name}") from error

from .drawing import Absent, Panel, Series, draw_lines, style, svg_of

Draw = Callable[[Sequence[Run]], Figure | Absent]

_OUTCOMES = ("right", "scored", "wrong", "no_answer", "unparseable_reference", "none", "timeout", "died", "refused")
"""In this order; others follow."""


@dataclass(frozen=True)
class Plot:
    """One figure: its stable name, its title, and one sentence to read it by."""

    name: str
    title: str
    caption: str
    draw: Draw


def _matches(runs: Sequence[Run], pattern: str) -> list[re.Match[str]]:
    """The names of metrics that match, in order of first appearance."""
    keys = dict.fromkeys(chain.from_iterable(run.keys() for run in runs))
    return [found for key in keys if (found := re.fullmatch(pattern, key, re.DOTALL))]


def _of_metrics(*panels: Panel) -> Draw:
    return lambda runs: draw_lines(runs, panels, "No such metric is in the history.")


def reward_functions(runs: Sequence[Run]) -> Figure | Absent:
    """One panel per reward function: mean, and plus and minus the standard deviation."""
    names = dict.fromkeys(found[1] for found in _matches(runs, r"(?:eval_)?rewards/(.+)/mean"))
    panels = [Panel(name, [Series(f"rewards/{name}/mean", spread=f"rewards/{name}/std")]) for name in names]
    return draw_lines(runs, panels, "No rewards are in the history.")


def parts(runs: Sequence[Run]) -> Figure | Absent:
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
    return draw_lines(runs, panels, "No reward of these runs returns Parts.")


def outcomes(runs: Sequence[Run]) -> Figure | Absent:
    """One panel per reward with outcomes: their shares."""
    found: dict[str, list[str]] = {}
    for match in _matches(runs, r"outcomes/(.+)/([^/]+)"):
        found.setdefault(match[1], []).append(match[2])
    panels = []
    for reward, names in found.items():
        order = sorted(names, key=lambda name: (_OUTCOMES.index(name) if name in _OUTCOMES else len(_OUTCOMES), name))
        shares = [Series(f"outcomes/{reward}/{name}", name) for name in order]
        panels.append(Panel(reward, shares, share=True, whole=True))
    return draw_lines(runs, panels, "No reward of these runs has outcomes; guard: {} gives any reward some.")


def at_k(runs: Sequence[Run]) -> Figure | Absent:
    """Per reward a panel of pass@k with a line for each k."""
    panels: dict[str, list[Series]] = {}
    for k, reward in sorted({(int(m[1]), m[2] or "") for m in _matches(runs, r"eval_pass@(\d+)(?:/(.+))?")}):
        key = f"pass@{k}"
        panels.setdefault(reward, []).append(Series(f"{key}/{reward}" if reward else key, key))
    shown = [
        Panel(f"{reward}: pass@k" if reward else "pass@k", found, share=True)
        for reward, found in sorted(panels.items())
    ]
    return draw_lines(runs, shown, "No evaluation logged pass@k: set pass_at_k.")


def hooks(runs: Sequence[Run]) -> Figure | Absent:
    """What each hook did to the advantages: one panel per measure."""
    names = list(dict.fromkeys(found[1] for found in _matches(runs, r"advantage/(.+)/mean")))
    measures = {
        "sign_flips": "share of tokens whose advantage changed sign",
        "mass_moved": "mass moved: sum of changes / sum of advantages",
        "mean": "mean advantage after the hook",
        "std": "standard deviation of advantages after the hook",
    }
    panels = [
        Panel(title, [Series(f"advantage/{name}/{measure}", name) for name in names])
        for measure, title in measures.items()
    ]
    return draw_lines(runs, panels, "No advantage hook is selected.")


PLOTS: tuple[Plot, ...] = (
    Plot(
        "reward_total",
        "Total reward",
        "The weighted sum that is trained on (band: standard deviation). It should rise, and the held-out points "
        "with it. If hooks shape rewards, the sum before them is shown too.",
        _of_metrics(
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
    ),
    Plot(
        "parts",
        "Parts of rewards",
        "Each part's score, and how many completions have it; look for parts that do not improve, or are missing.",
        parts,
    ),
    Plot(
        "outcomes",
        "Outcomes of rewards",
        "What became of the completions; if anything but right and wrong grows, the reward cannot judge.",
        outcomes,
    ),
    Plot(
        "pass_at_k",
        "pass@k, held out",
        "The share of held-out problems that at least one of k completions solves; if pass@1 rises while a large k "
        "falls, the policy is giving up problems that it could solve.",
        at_k,
    ),
    Plot(
        "no_signal",
        "Groups without signal",
        "The share of groups whose completions all got the same reward; near 1 nothing is learned, because the "
        "problems are too easy or too hard, or the reward is too coarse.",
        _of_metrics(
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
    ),
    Plot(
        "lengths",
        "Lengths",
        "Tokens of the completions; watch for lengths that run away or collapse, and for a growing share cut off at "
        "the limit.",
        _of_metrics(
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
        _of_metrics(Panel("entropy, nats", [Series("entropy")])),
    ),
    Plot(
        "optimisation",
        "KL divergence, loss, gradient norm, learning rate",
        "A jump of the KL divergence from the reference, or of the gradient norm, often comes before a collapse; the "
        "loss of GRPO says little.",
        _of_metrics(
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


def svgs(runs: Sequence[Run]) -> Iterator[tuple[Plot, str | Absent]]:
    """Each figure as one `<svg>` element without style, script or outside link, or why there is none."""
    for plot in PLOTS:
        with style():
            drawn = plot.draw(runs)
        yield plot, drawn if isinstance(drawn, Absent) else svg_of(drawn, plot.name, plot.title)
