"""Reward, loss and KL over the optimizer steps, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Log = Mapping[str, Any]
REWARDS = ("sort_inclusion", "sort_distance", "exactly_sorted")


def points(history: Sequence[Log], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one logged number, where it was logged."""
    logged = [(int(log["step"]), float(log[key])) for log in history if log.get(key) is not None]
    return [step for step, _ in logged], [value for _, value in logged]


def save_curves(folder: Path, history: Sequence[Log], before: Mapping[str, float], after: Mapping[str, float]) -> Path:
    """Plot the rewards with the held-out values at both ends, the loss, and the KL where there is one."""
    panels = [key for key in ("loss", "kl") if points(history, key)[0]]
    figure = Figure(figsize=(7, 3.5 + 1.5 * len(panels)), layout="constrained")
    axes = figure.subplots(1 + len(panels), 1, sharex=True, squeeze=False, height_ratios=[3.0, *[1.2] * len(panels)])
    top = axes[0][0]
    last = max((int(log["step"]) for log in history), default=0)
    for name in REWARDS:
        (line,) = top.plot(*points(history, f"rewards/{name}/mean"), label=name)
        ends = [(step, values[name]) for step, values in ((0, before), (last, after)) if name in values]
        top.plot([step for step, _ in ends], [value for _, value in ends], "o", color=line.get_color())
    top.set(ylabel="reward (dots: held out)", ylim=(0, 1.05))
    top.legend(loc="lower right")
    for (panel,), key in zip(axes[1:], panels, strict=True):
        panel.plot(*points(history, key), color="black", linewidth=1)
        panel.set(ylabel={"kl": "KL (nats)"}.get(key, key))
    for (panel,) in axes:
        panel.grid(alpha=0.3)
    axes[-1][0].set(xlabel="optimizer step")
    axes[-1][0].xaxis.set_major_locator(MaxNLocator(integer=True))
    path = folder / "sort_curve.png"
    figure.savefig(path, dpi=110)
    return path
