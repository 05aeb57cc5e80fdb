"""The plot of a detox run: rewards, KL and its coefficient over the steps, as `detox_curve.png`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common.results  # noqa: F401  (says what to install where matplotlib is missing)

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .kl_log import COEFFICIENT, KL


def save_detox_curve(folder: Path, history: Sequence[Mapping[str, Any]], target: float | None) -> Path:
    """Plot what the training lines of `history` hold; `target` is the KL that the coefficient steers to."""
    training = [log for log in history if "reward" in log]
    names = sorted({key for log in training for key in log if key.startswith("rewards/") and key.endswith("/mean")})
    figure = Figure(figsize=(7, 7), layout="constrained")
    rewards, kl, coefficient = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    for name in names:
        _line(rewards, training, name, name.split("/")[1])
    rewards.set(ylabel="mean over the rollouts", title="detoxification under GRPO")
    _line(kl, training, KL, "KL to the reference")
    if target is not None:
        kl.axhline(target, color="black", linestyle=":", label="target")
    kl.set(ylabel="nats per completion")
    _line(coefficient, training, COEFFICIENT, "coefficient")
    coefficient.set(ylabel="price of a nat", xlabel="optimizer step")
    coefficient.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (rewards, kl, coefficient):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    path = folder / "detox_curve.png"
    figure.savefig(path, dpi=120)
    return path


def _line(axes: Any, logs: Sequence[Mapping[str, Any]], key: str, label: str) -> None:
    points = [(log["step"], log[key]) for log in logs if log.get(key) is not None]
    if points:
        axes.plot([step for step, _ in points], [value for _, value in points], ".-", label=label)
