"""The study's statistics, its table and its plot: from the lines of `results.jsonl` to `docs/evidence.md`."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tables import markdown, write_block

KINDS = {"hook": ("#0072B2", "o"), "aggregation": ("#D55E00", "s"), "plain": ("#000000", "D")}
"""Colour (Okabe and Ito's, which everybody can distinguish) and marker."""

Line = Mapping[str, Any]


# ------------------------------------------------------------------------------------------------------- statistics


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple tests (Holm): below 0.05, a result holds at a family-wise error rate of 5 %."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def t_within(t: float, df: int) -> float:
    """P(|X| < |t|) for Student's t with an integer number of degrees of freedom: a finite sum, no approximation."""
    angle = math.atan(abs(t) / math.sqrt(df))
    sine = math.sin(angle)
    cosine = math.cos(angle)
    term, total = (cosine, 0.0) if df % 2 else (1.0, 0.0)
    for k in range(df % 2, df - 1, 2):  # odd: cos + 2/3 cos³ + ...; even: 1 + 1/2 cos² + ...
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return (angle + sine * total) * 2 / math.pi if df % 2 else sine * total


def t_quantile(within: float, df: int) -> float:
    """The t with `t_within(t, df) == within`; 2.776 for 95 % and 4 degrees of freedom."""
    low = 0.0
    high = 1.0
    while t_within(high, df) < within:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, df) < within else (low, middle)
    return high


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its 95 % interval by Student's t, and the two-sided p of a mean of zero."""

    mean: float
    half_width: float
    p: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half_width:.3f}"


def estimate(values: Sequence[float]) -> Estimate:
    """From at least two values. Where all are equal the interval is that point."""
    mean = statistics.fmean(values)
    df = len(values) - 1
    error = statistics.stdev(values) / math.sqrt(len(values))
    if error == 0:
        return Estimate(mean, 0.0, float(mean == 0))
    return Estimate(mean, t_quantile(0.95, df) * error, 1 - t_within(mean / error, df))


@dataclass(frozen=True)
class Row:
    """One method on one task."""

    method: str
    kind: str
    learning_rate: float
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    accuracy: Estimate
    difference: Estimate | None = None
    """Accuracy minus plain TRL's at the same seed."""
    p: float | None = None
    """Of that difference, adjusted."""


def rows_of(task: str, lines: Sequence[Line], rates: Mapping[str, float], kinds: Mapping[str, str]) -> list[Row]:
    """The methods of a task that have two evaluation seeds or more, in the order of `rates`."""
    found: dict[str, dict[int, Line]] = {}
    for line in lines:
        method = line["method"]
        if (line["task"], line["stage"], line["learning_rate"]) == (task, "evaluation", rates.get(method)):
            found.setdefault(method, {})[line["seed"]] = line
    rows = []
    plain = found.get(next(name for name, kind in kinds.items() if kind == "plain"), {})
    for method, rate in rates.items():
        seeds = tuple(sorted(found.get(method, ())))
        if len(seeds) < 2:
            continue
        values = tuple(found[method][seed]["accuracy"] for seed in seeds)
        both = [seed for seed in seeds if seed in plain]
        paired = [found[method][seed]["accuracy"] - plain[seed]["accuracy"] for seed in both]
        difference = estimate(paired) if kinds[method] != "plain" and len(both) > 1 else None
        rows.append(Row(method, kinds[method], rate, seeds, values, estimate(values), difference))
    compared = [row for row in rows if row.difference is not None]
    adjusted = dict(
        zip(
            [row.method for row in compared],
            holm([row.difference.p for row in compared if row.difference]),
            strict=True,
        )
    )
    return [Row(**{**vars(row), "p": adjusted.get(row.method)}) for row in rows]


# ------------------------------------------------------------------------------------------------------------- page


def table(rows: Sequence[Row]) -> str:
    """Markdown: the methods of one task."""
    out = []
    for row in rows:
        name = row.method if row.kind == "plain" else f"`{row.method}`"
        difference = f"{row.difference.mean:+.3f} ± {row.difference.half_width:.3f}" if row.difference else ""
        out.append([name, str(row.accuracy), difference])
    return markdown(["method", "accuracy", "difference to plain TRL"], out)


def findings(rows: Sequence[Row], grid: Sequence[float], seeds: int) -> str:
    """What the numbers say, in sentences: differences that stand, how small a one could have been seen, caveats."""
    compared = [row for row in rows if row.difference is not None and row.p is not None]
    if not compared:
        return "There is nothing to compare yet."
    stand = [f"`{row.method}` ({row.difference.mean:+.3f})" for row in compared if row.p < 0.05]
    level = f"at the 5 % level, by Holm's correction for {len(compared)} comparisons"
    said = [f"No method differs from plain TRL {level}."]
    if stand:
        said = [f"{len(stand)} differ from plain TRL {level}: {', '.join(stand)}."]
        said.append("For the others no difference was shown." if len(stand) < len(compared) else "")
    widths = statistics.median(row.difference.half_width for row in compared)
    said.append(f"The median half-width of the paired intervals is {widths:.3f}; much smaller differences go unseen.")
    edge = [row.method for row in rows if row.learning_rate in (min(grid), max(grid))]
    if edge:
        said.append(f"Tuned to a rate at the edge of the grid, so possibly better beyond it: {', '.join(edge)}.")
    short = [f"{row.method} ({len(row.seeds)})" for row in rows if len(row.seeds) < seeds]
    if short:
        said.append(f"Not complete, with fewer than {seeds} seeds: {', '.join(short)}.")
    return " ".join(filter(None, said))


def page(lines: Sequence[Line], rows: Mapping[str, Sequence[Row]], settings: Mapping[str, Any], start: str) -> str:
    """Everything between the markers."""
    parts = ["![accuracy of each method with its 95 % interval](images/study.png)"]
    for task, found in rows.items():
        used = settings["tasks"][task]
        before = [line for line in lines if line["task"] == task and line["method"] == start]
        said = (
            f"{used['token_budget']:,} completion tokens per training, {used['batch_size']} completions a step in "
            f"groups of {used['num_generations']}; {used['held_out']} test problems. "
        )
        chosen = ", ".join(f"{rate:g}" for rate in sorted({row.learning_rate for row in found}))
        said += f"Learning rate {chosen}{' by method' if ',' in chosen else ' for all'}"
        said += f", out of {', '.join(f'{rate:g}' for rate in used['learning_rates'])}."
        if before:
            said += f" Before training the accuracy is {before[0]['accuracy']:.3f}."
        complete = findings(found, used["learning_rates"], len(settings["evaluation_seeds"]))
        parts += [f"### {task.capitalize()}", said, table(found), complete]
    versions = ", ".join(f"{name} {number}" for name, number in settings["versions"].items())
    hours = sum(line["seconds"] for line in lines) / 3600
    parts.append(
        f"{len(lines)} runs, {len(settings['evaluation_seeds'])} seeds, "
        f"{hours:.1f} hours of one core, on {settings['machine']}; {versions}."
    )
    return "\n\n".join(parts)


def plot(path: Path, rows: Mapping[str, Sequence[Row]]) -> None:
    """Each task's methods with their intervals, their seeds as small dots, and plain TRL's mean as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    panels = figure.subplots(1, max(len(rows), 1), squeeze=False)[0]
    for axes, (task, found) in zip(panels, rows.items(), strict=False):
        for place, row in enumerate(reversed(found)):
            colour, marker = KINDS[row.kind]
            axes.plot(row.values, [place] * len(row.values), ".", color=colour, alpha=0.35, markersize=6)
            bar = row.accuracy.half_width
            axes.errorbar(row.accuracy.mean, place, xerr=bar, fmt=marker, color=colour, capsize=3, markersize=6)
            if row.kind == "plain":
                axes.axvline(row.accuracy.mean, color=colour, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(found)), [row.method for row in reversed(found)])
        axes.set(title=task.capitalize(), xlabel="test accuracy, 95 % interval")
        axes.grid(axis="x", alpha=0.3)
    names = {"plain": "plain TRL", "hook": "advantage hook", "aggregation": "loss aggregation"}
    handles = [
        panels[0].plot([], [], linestyle="", color=KINDS[kind][0], marker=KINDS[kind][1], label=name)[0]
        for kind, name in names.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def write(
    docs: Path,
    lines: Sequence[Line],
    rates: Mapping[str, Mapping[str, float]],
    kinds: Mapping[str, str],
    settings: Mapping[str, Any],
    start: str,
) -> None:
    """Put the results between the markers of `evidence.md` and the plot beside it."""
    rows = {task: rows_of(task, lines, rates[task], kinds) for task in rates}
    rows = {task: found for task, found in rows.items() if found}
    if not rows:
        raise SystemExit("error: no method has two evaluation seeds yet; there is nothing to report.")
    plot(docs / "images" / "study.png", rows)
    write_block(docs / "evidence.md", "results", page(lines, rows, settings, start))
    print(f"{docs / 'evidence.md'}\n{docs / 'images' / 'study.png'}")
