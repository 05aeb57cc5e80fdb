"""Run `sort_grpo.py` with each of the lecture's choices and several seeds; print a table and draw the mean curves.

    python recipes/sorting/compare.py [--seeds 42 1 2] [--output_dir outputs/sort_compare] [-- SETTINGS OF sort_grpo.py]

Each run is a process of its own. A run whose `metrics.json` is there already, with the same settings, is not repeated.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.figure import Figure

from sorting.curves import points

RECIPE = Path(__file__).resolve().parents[1] / "sort_grpo.py"
RUNS = {
    "raw": "--variant raw",
    "centred": "--variant centred",
    "normalised": "--variant normalised",
    "max only": "--variant max_only",
    "unclipped": "--objective unclipped",
    "naive": "--objective naive",
    "KL 0.05": "--beta 0.05",
    "sort_distance": "--reward sort_distance",
}
"""What each run changes of the defaults, which are the run `normalised`."""
PANELS = {
    "four advantages": {name: name for name in ("raw", "centred", "normalised", "max only")},
    "three objectives": {"naive": "naive", "unclipped": "unclipped", "clipped": "normalised"},
    "KL, and the other reward": {"KL off": "normalised", "KL 0.05": "KL 0.05", "sort_distance": "sort_distance"},
}
"""By the title of each column of the picture: labels, and the runs that they stand for."""
SHOWN = "sort_inclusion"


def main() -> None:
    """Run what has not been run, print the table, save the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/sort_compare"))
    parser.add_argument("--at_once", type=int, default=2, help="processes, each of one thread")
    parser.add_argument("settings", nargs="*", help="of sort_grpo.py, for all runs")
    options = parser.parse_args()

    with ThreadPoolExecutor(options.at_once) as pool:
        jobs = {
            (name, seed): pool.submit(run, options.output_dir, name, seed, options.settings)
            for seed in options.seeds
            for name in RUNS
        }
        done = {key: job.result() for key, job in jobs.items()}

    rewards = ("sort_inclusion", "sort_distance", "exactly_sorted")
    print(f"| settings | {' | '.join(rewards)} | training, seconds |\n| --- |{' --- |' * (len(rewards) + 1)}")
    for name in RUNS:
        runs = [done[name, seed] for seed in options.seeds]
        cells = [_mean_and_range([one["after"][reward] for one in runs]) for reward in rewards]
        cells.append(f"{statistics.fmean(one['run']['training_seconds'] for one in runs):.0f}")
        print(f"| {name} | {' | '.join(cells)} |")
    before = [_mean_and_range([one["before"][reward] for one in done.values()]) for reward in rewards]
    print(f"| before | {' | '.join(before)} | |")
    versions = next(iter(done.values()))["versions"]
    print(f"\nSeeds {options.seeds}; mean (lowest to highest). {platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"Python {platform.python_version()}, {', '.join(f'{name} {number}' for name, number in versions.items())}")
    if peak := resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss:
        print(f"Peak memory of the largest run: {peak / 1024**2:.2f} GiB")
    print(f"picture {draw(options.output_dir / 'sort.png', done, options.seeds)}")


def run(folder: Path, name: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Run one setting with one seed, unless it has been, and return its `metrics.json`."""
    output = folder / f"{name.replace(' ', '_')}_seed_{seed}"
    words = [*shlex.split(RUNS[name]), *settings, "--seed", str(seed)]
    last = output / "command.json"
    metrics = output / "metrics.json"
    if not (metrics.is_file() and last.is_file() and json.loads(last.read_text()) == words):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(RECIPE), *words, "--output_dir", str(output)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"error: {shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
        last.write_text(json.dumps(words))
    return dict(json.loads(metrics.read_text()))


def draw(path: Path, done: dict[tuple[str, int], dict[str, Any]], seeds: list[int]) -> Path:
    """Plot the training reward and the loss of every run, a column for each comparison; thick is the mean of seeds."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    axes = figure.subplots(2, len(PANELS), sharex=True, sharey="row", height_ratios=[2, 1])
    for column, (title, names) in enumerate(PANELS.items()):
        for row, key in enumerate((f"rewards/{SHOWN}/mean", "loss")):
            panel = axes[row][column]
            for label, name in names.items():
                curves = [points(done[name, seed]["history"], key) for seed in seeds]
                steps = curves[0][0]
                mean = [statistics.fmean(at) for at in zip(*(y for _, y in curves), strict=True)]
                (line,) = panel.plot(steps, mean, label=label, linewidth=1.8)
                for x, y in curves if len(curves) > 1 else []:
                    panel.plot(x, y, color=line.get_color(), linewidth=0.5, alpha=0.5)
            panel.grid(alpha=0.3)
        axes[0][column].set(title=title, ylim=(0, 1.02))
        axes[0][column].legend(loc="lower right", fontsize=8)
        axes[1][column].set(xlabel="optimizer step")
    axes[0][0].set(ylabel=f"{SHOWN} in training")
    axes[1][0].set(ylabel="loss")
    figure.savefig(path, dpi=90)
    return path


def _mean_and_range(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
