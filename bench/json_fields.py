"""What a real language model learns from each reward: the table of docs/recipes.md.

    python -m bench.json_fields --output outputs/json_fields [--seeds 1 2 3] [--docs docs/recipes.md] [--draw]

Trains `json_fields_grpo.py` with each of its three rewards and each seed, one after the other, with the recipe's
defaults and so at equal steps and completions; words after `--` go to the recipe. A run that has finished is not run
again, and `--draw` shows those alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.tables import machine, show, versions

ROOT = Path(__file__).resolve().parents[1]
ARMS = {
    "schema": "plain TRL, `json_schema`",
    "fields": "plain TRL, `json_fields`",
    "spans": "`part_credit`, each field a part",
}
MEASURED = ("json_fields", "json_schema")


def train(folder: Path, arm: str, seed: int, words: list[str]) -> None:
    """One run as a person starts it, unless it is there."""
    if (folder / "metrics.json").exists():
        return
    recipe = [sys.executable, str(ROOT / "recipes" / "json_fields_grpo.py"), "--output_dir", str(folder)]
    subprocess.run([*recipe, "--reward", arm, "--seed", str(seed), *words], check=True)


def tokens_of(run: dict[str, Any]) -> float:
    """Tokens that the training computed with, those of the prompts too."""
    return float(max((log["num_tokens"] for log in run["history"] if "num_tokens" in log), default=0.0))


def rows_of(runs: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """A row for the start and for each reward: mean, and lowest to highest of the seeds."""

    def cells(found: list[dict[str, Any]], which: str) -> list[str]:
        columns = [[run[which][name] for run in found if name in run[which]] for name in MEASURED]
        return [f"{statistics.mean(one):.3f} ({min(one):.3f} to {max(one):.3f})" if one else "" for one in columns]

    rows = [["before", "", *cells([run for found in runs.values() for run in found], "before"), "", ""]]
    for arm, found in runs.items():
        tokens = statistics.mean(map(tokens_of, found))
        minutes = statistics.mean(run["run"]["training_seconds"] for run in found) / 60
        rows.append([ARMS[arm], str(len(found)), *cells(found, "after"), f"{tokens:,.0f}", f"{minutes:.0f}"])
    return rows


def draw(runs: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """The share of right fields over the steps: a thin line for each seed, their mean, and the held-out ends."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (arm, found) in enumerate(runs.items()):
        curves = [[log["rewards/json_fields/mean"] for log in run["history"] if "loss" in log] for run in found]
        steps = range(1, len(curves[0]) + 1)
        color = f"C{number}"
        for curve in curves:
            axes.plot(steps, curve, color=color, alpha=0.35, linewidth=1)
        axes.plot(
            steps, [statistics.mean(values) for values in zip(*curves, strict=True)], color=color, label=ARMS[arm]
        )
        for step, which in ((0, "before"), (len(steps), "after")):
            axes.plot([step] * len(found), [run[which]["json_fields"] for run in found], "o", color=color, markersize=4)
    axes.set(xlabel="optimizer step", ylabel="share of right fields", ylim=(0, 1), title="SmolLM2-135M-Instruct")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=150)


def main() -> None:
    """Train what is missing, and show what is there."""
    parser = argparse.ArgumentParser(prog="python -m bench.json_fields", description=str(__doc__).split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/json_fields"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--docs", type=Path, help="write the table into this page, too")
    parser.add_argument("--curve", type=Path, help="draw the seeds' curves into this picture")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("recipe", nargs="*", help="settings of the recipe, after --")
    asked = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in asked.seeds:
        for arm in asked.arms:
            folder = asked.output / f"{arm}-{seed}"
            if not asked.draw:
                train(folder, arm, seed, asked.recipe)
            if (folder / "metrics.json").exists():
                runs.setdefault(arm, []).append(json.loads((folder / "metrics.json").read_text(encoding="utf-8")))
    if not runs:
        sys.exit(f"error: {asked.output} holds no finished run of these. Run without --draw.")
    if asked.curve:
        draw(runs, asked.curve)
    said = f"{machine()}; {versions('trl', 'transformers', 'torch', 'peft')}. Mean (lowest to highest) of the seeds."
    columns = ["trained on", "seeds", *(f"{name}, held out" for name in MEASURED), "tokens", "minutes"]
    show("Fields as JSON, SmolLM2-135M-Instruct", columns, rows_of(runs), said, asked.docs)


if __name__ == "__main__":
    main()
