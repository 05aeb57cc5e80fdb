"""Draw how much faster an update is over the length of the prompt, from the figures of `bench.compact_shared`.

python -m bench.compact_shared --json shared.json
python docs/figures/shared_prompts.py shared.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

OUTPUT = Path(__file__).parents[1] / "images" / "shared_prompts.svg"
LINES = {"plain TRL": "#777777", "exact": "#c07000", "exact, shared": "#1060c0"}
NAMES = {"plain TRL": "TRL", "exact": "compact", "exact, shared": "compact, shared prompts"}


def main() -> None:
    """Draw a panel for each kind of completions."""
    mpl.rcParams["svg.hashsalt"] = "shared prompts"  # the same file for the same figures
    results: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    kinds = list(dict.fromkeys(found["completions"] for found in results))
    figure, panels = pyplot.subplots(1, len(kinds), figsize=(4.6 * len(kinds), 3.6), squeeze=False, sharey=True)
    for panel, kind in zip(panels[0], kinds, strict=True):
        cells = sorted((found for found in results if found["completions"] == kind), key=lambda found: found["prompt"])
        prompts = [found["prompt"] for found in cells]
        for arm, colour in LINES.items():
            speeds = [found["seconds"]["plain TRL"] / found["seconds"][arm] for found in cells]
            panel.plot(prompts, speeds, "o-", color=colour, label=NAMES[arm])
        panel.plot(prompts, [found["padding"] for found in cells], ":", color="#208020", label="floor")
        panel.set(xscale="log", title=f"completions: {kind}", xlabel="tokens of the prompt")
        apart = [at for at, after in zip(prompts, [*prompts[1:], 2 * prompts[-1]], strict=True) if after > 1.3 * at]
        panel.set_xticks(apart, [str(prompt) for prompt in apart])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("times faster than TRL")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(OUTPUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
