"""Run the recipe on the embedded default with several seeds and print the table that docs/recipes.md shows.

Each seed runs twice in turn: as it is, and with TRL's own sampling and update (nothing shared, nothing compact).

python bench/embedded_learning.py [--seeds 42 1 2 3] [--output_dir outputs/embedded_learning]

The first seed is the recipe's default; its reward curve is `OUTPUT_DIR/seed_42/reward_curve.png`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.tables import machine, markdown  # noqa: E402

RECIPE = ROOT / "recipes" / "gsm8k_grpo.py"
PHASES = ("step_time", "time/generation", "time/rewards", "time/update")
AS_TRL = ["--compact_updates", "off", "--share_prompts", "false"]


def run(folder: Path, seed: int, *words: str) -> Any:
    """The metrics file of one training."""
    command = [sys.executable, str(RECIPE), "--embedded", "--seed", str(seed), "--output_dir", str(folder), *words]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL)
    return json.loads((folder / "metrics.json").read_text())


def seconds(results: Any, phase: str) -> float:
    """Seconds of one phase of a step, the mean over the training."""
    return statistics.fmean(entry[phase] for entry in results["history"] if phase in entry)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2, 3])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/embedded_learning"))
    options = parser.parse_args()

    rows = []
    phases = []
    versions = {}
    for seed in options.seeds:
        as_trl = run(options.output_dir / f"seed_{seed}_as_trl", seed, *AS_TRL)
        results = run(options.output_dir / f"seed_{seed}", seed)
        before, after = (results[when]["gsm8k_accuracy"] for when in ("before", "after"))
        slow, fast = (each["run"]["training_seconds"] for each in (as_trl, results))
        scores = [f"{seed}", f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"]
        rows.append((*scores, f"{slow:.0f}", f"{fast:.0f}", f"{slow / fast:.2f}"))
        phases.append({name: [seconds(each, name) for each in (as_trl, results)] for name in PHASES})
        versions = results["versions"]

    titles = ("seed", "before", "after", "gain", "training, s: TRL's own", "ours", "times faster")
    print(f"\n{markdown(titles, rows)}\n")
    for name in PHASES:
        slow, fast = (statistics.fmean(phase[name][arm] for phase in phases) for arm in (0, 1))
        print(f"{name}: {slow:.3f} s a step, ours {fast:.3f} s")
    print(f"{machine()}, {', '.join(f'{name} {number}' for name, number in versions.items())}")


if __name__ == "__main__":
    main()
