"""Run the recipe on the embedded default with several seeds and print the table that docs/recipes.md shows.

python bench/embedded_learning.py [--seeds 42 1 2 3] [--output_dir outputs/embedded_learning]

The first seed is the recipe's default; its reward curve is `OUTPUT_DIR/seed_42/reward_curve.png`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.tables import machine, markdown  # noqa: E402

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

    titles = ("seed", "before", "after", "gain", "training, seconds")
    cells = [(f"{n}", f"{b:.3f}", f"{a:.3f}", f"{a - b:+.3f}", f"{seconds:.0f}") for n, b, a, seconds in rows]
    print(f"\n{markdown(titles, cells)}\n")
    print(f"{machine()}, {', '.join(f'{name} {number}' for name, number in versions.items())}")


if __name__ == "__main__":
    main()
