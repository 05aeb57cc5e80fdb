"""Run the recipe on the embedded default with several seeds and print the table that docs/recipes.md shows.

python bench/embedded_learning.py [--seeds 42 1 2 3] [--output_dir outputs/embedded_learning]

The first seed is the recipe's default; its reward curve is `OUTPUT_DIR/seed_42/reward_curve.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "gsm8k_grpo.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2, 3])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/embedded_learning"))
    options = parser.parse_args()

    rows, versions = [], {}
    for seed in options.seeds:
        folder = options.output_dir / f"seed_{seed}"
        command = [sys.executable, str(RECIPE), "--embedded", "--seed", str(seed), "--output_dir", str(folder)]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL)
        results = json.loads((folder / "metrics.json").read_text())
        before, after = (results[when]["gsm8k_accuracy"] for when in ("before", "after"))
        rows.append((seed, before, after, results["run"]["training_seconds"]))
        versions = results["versions"]

    print("\n| seed | before | after | gain | training, seconds |\n| --- | --- | --- | --- | --- |")
    for seed, before, after, seconds in rows:
        print(f"| {seed} | {before:.3f} | {after:.3f} | {after - before:+.3f} | {seconds:.0f} |")
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ", end="")
    print(", ".join(f"{name} {number}" for name, number in versions.items()))


if __name__ == "__main__":
    main()
