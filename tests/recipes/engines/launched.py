"""Starts a shipped launch file on two CPU processes, with a list of runs, and reads what they left."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.recipes.launching import RECIPES, environment

ON_CPU = Path(__file__).with_name("on_cpu.py")
OVERLAY = {"num_processes": 2, "num_machines": 1, "main_process_port": 0}
"""What is changed in a shipped launch file; all else is as shipped."""


@dataclass
class Run:
    """One run of a script in a launch; `{folder}` in an argument stands for the launch's folder."""

    name: str
    arguments: list[str]
    script: Path = RECIPES / "gsm8k_grpo.py"
    trap: bool = False
    """As shipped, without what makes a tiny model shard under ZeRO-3."""


def overlaid(file: str, folder: Path, **more: Any) -> Path:
    settings = yaml.safe_load((RECIPES / "accelerate" / file).read_text()) | OVERLAY | more
    path = folder / f"overlaid_{file}"
    path.write_text(yaml.safe_dump(settings))
    return path


def launch(file: str, runs: list[Run], folder: Path, timeout: int = 500, **variables: str) -> tuple[int, str]:
    """Start the runs under a launch file and return the launcher's status and what was written to the terminal."""
    plain = [
        {
            "name": run.name,
            "script": str(run.script),
            "trap": run.trap,
            "arguments": [word.replace("{folder}", str(folder)) for word in run.arguments],
        }
        for run in runs
    ]
    (folder / "runs.json").write_text(json.dumps(plain))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(overlaid(file, folder))]
    done = subprocess.run(
        [*command, str(ON_CPU), str(folder / "runs.json"), str(folder)],
        cwd=folder,
        env={**environment(folder), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout


ROOT = RECIPES.parent


def probe(folder: Path, name: str, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}.rank{rank}.json").read_text()))


def metrics(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / name / "metrics.json").read_text()))
