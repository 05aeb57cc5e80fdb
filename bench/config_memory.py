"""What the doctor estimates for every shipped run file, by the first command line in its header.

    python -m bench.config_memory

Prints the table of docs/recipes.md, and the files whose headers differ.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from bench.tables import markdown
from tests.recipes.config_objects import header, launches, option
from tests.recipes.launching import RECIPES
from trl_grpo_ext.cli.main import app

RUN_FILES = sorted((RECIPES / "configs").glob("*.yaml"))
LAUNCH_FILES = sorted((RECIPES / "accelerate").glob("*.yaml"))
GIB = 2**30


@cache
def run_doctor(path: Path, command: int = 0, gpu_memory: float = 80) -> tuple[int, dict[str, Any]]:
    """The doctor's status and its report as JSON, for GPUs with this many GiB."""
    words = launches(path)[command]
    script = next(place for place, word in enumerate(words) if word.endswith(".py"))
    front, after = words[:script], words[script + 1 :]
    config: list[str] = []
    if "--config" in after:
        place = after.index("--config")
        config, after = after[place : place + 2], after[:place] + after[place + 2 :]
    asked = ["doctor", *front, *config, "--script", words[script], "--gpu_memory", str(gpu_memory), "--json"]
    result = CliRunner().invoke(app, [*asked, *(["--", *after] if after else [])])
    return result.exit_code, json.loads(result.stdout)


def peak(path: Path) -> tuple[float, str, float] | None:
    """Gigabytes of each GPU at the peak, its stage, and gigabytes of a checkpoint; None if sizes are unknown."""
    memory = run_doctor(path)[1]["memory"]
    if memory is None:
        return None
    stages = memory["device_bytes"]
    stage = max(stages, key=stages.get)
    return stages[stage] / 1e9, stage, memory["checkpoint_bytes"] / 1e9


def named_gpu(path: Path) -> float | None:
    """Gigabytes of the smallest GPU that the line `# Hardware:` names; None for files that need none."""
    text = " ".join(line.lstrip("# ") for line in header(path))
    found = re.search(r"Hardware:.*?(\d+) GB", text)
    return float(found[1]) if found else None


def table() -> str:
    """Markdown: the run files of gsm8k_grpo.py, what they are launched with, and what the doctor estimates."""
    rows = []
    for path in RUN_FILES:
        found, said = peak(path), run_doctor(path)[1]
        of_gsm8k = any(word.endswith("gsm8k_grpo.py") for word in launches(path)[0])
        if of_gsm8k and found is not None and named_gpu(path) is not None:
            launch = option(launches(path)[0], "--config_file")
            cells = [f"`{path.name}`", f"`{Path(launch or 'none').name}`", str(said["launch"]["processes"])]
            rows.append([*cells, f"{found[0]:.0f}", found[1], f"{found[2]:.1f}"])
    return markdown(("run file", "launch file", "GPUs", "peak of each, GB", "stage", "checkpoint, GB"), rows)


def stale() -> list[str]:
    """What outdated headers should say."""
    wrong = []
    for path in RUN_FILES:
        text = " ".join(line.strip() for line in header(path))
        found, said = peak(path), re.search(r"Memory[^:]*: (\d+) GB[^(]*\((\w+)\), ([\d.]+) GB of disk", text)
        if found and said and said.groups() != (f"{found[0]:.0f}", found[1], f"{found[2]:.1f}"):
            wrong.append(f"{path.name}: {found[0]:.0f} GB ({found[1]}), {found[2]:.1f} GB of disk")
    return wrong


if __name__ == "__main__":
    print(table())
    print("\n".join(["", "Headers to change:", *stale()]))
