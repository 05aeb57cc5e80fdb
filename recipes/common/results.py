"""A run's results: a table on the screen, `metrics.json`, and `reward_curve.png`."""

import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f"error: the recipes need {error.name}: pip install {error.name}") from error

from trl_grpo_ext.plugins.discovery import installed_version

Metrics = Mapping[str, Any]
PACKAGES = ("trl-grpo-ext", "trl", "transformers", "torch", "accelerate", "peft", "vllm")


def first_evaluation(history: Sequence[Metrics]) -> dict[str, Any]:
    """The logged evaluation before the first training step; empty if a resumed run never had one."""
    return next((dict(log) for log in history if log.get("step") == 0 and "eval_runtime" in log), {})


def held_out(metrics: Metrics) -> dict[str, float]:
    """The rewards, pass@k and lengths of one evaluation, by the names that the table shows."""
    shown = {
        key.removeprefix("eval_rewards/").removesuffix("/mean"): value
        for key, value in metrics.items()
        if key.startswith("eval_rewards/") and key.endswith("/mean")
    }
    shown.update({key.removeprefix("eval_"): value for key, value in metrics.items() if key.startswith("eval_pass@")})
    lengths = {
        "completion length (tokens)": "eval_completions/mean_length",
        "cut off": "eval_completions/clipped_ratio",
    }
    shown.update({label: metrics[key] for label, key in lengths.items() if key in metrics})
    return {name: float(value) for name, value in shown.items() if value is not None}


def print_table(before: Mapping[str, float], after: Mapping[str, float], title: str) -> None:
    """Show both evaluations side by side."""
    table = Table(title=title, title_justify="left")
    table.add_column("held-out")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name, value in after.items():
        change = value - before.get(name, float("nan"))
        table.add_row(name, f"{before.get(name, float('nan')):.3f}", f"{value:.3f}", f"{change:+.3f}")
    Console().print(table)


def print_places(folder: Path, **files: Path) -> None:
    """Print where the results are, and the command that shows them."""
    for name, path in {"model": folder, **files}.items():
        print(f"{name:7} {path}")
    command = "trl-grpo-ext"
    ours = Path(sys.executable).with_name("trl-grpo-ext")
    if which(command) is None and ours.exists():
        command = min(str(ours), os.path.relpath(ours), key=len)
    print(f"report  {shlex.join([command, 'report', str(folder), '--open'])}")


def save_metrics(folder: Path, results: Metrics, history: Sequence[Metrics]) -> Path:
    """Write `metrics.json`: the two evaluations, the versions, and every log line of the training."""
    facts = {
        "versions": {name: found for name in PACKAGES if (found := installed_version(name)) is not None},
        "machine": {"processor": platform.machine(), "system": platform.system(), "python": platform.python_version()},
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    path = folder / "metrics.json"
    content = _without_nan({**results, **facts, "history": list(history)})
    path.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    return path


def save_curve(
    folder: Path, history: Sequence[Metrics], before: Mapping[str, float], after: Mapping[str, float], reward: str
) -> Path:
    """Plot one reward over the training steps, with the held-out values at both ends, as `reward_curve.png`.

    Without a first value (a run resumed from a checkpoint that never had one) only the last is shown.
    """
    key = f"rewards/{reward}/mean"
    points = [(log["step"], log[key]) for log in history if log.get(key) is not None]
    last = max((log["step"] for log in history if "step" in log), default=0)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([step for step, _ in points], [value for _, value in points], ".-", label="training batch")
    ends = [(last, after[reward], "right"), *([(0, before[reward], "left")] if reward in before else [])]
    axes.plot(
        [step for step, *_ in ends], [value for _, value, _ in ends], "o", color="black", label="held-out problems"
    )
    for step, value, side in ends:
        axes.annotate(f"{value:.2f}", (step, value), xytext=(0, 8), textcoords="offset points", ha=side)
    axes.set(xlabel="optimizer step", ylabel=reward, ylim=(0, 1.1), title=f"{reward} under GRPO")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path = folder / "reward_curve.png"
    figure.savefig(path, dpi=150)
    return path


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: a mean over nothing (a reward that scored no completion) is null."""
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
