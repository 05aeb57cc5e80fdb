"""Starts a shipped launch file on two CPU processes, with a list of runs, and reads what they left."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.recipes.launching import RECIPES, environment

ROOT = RECIPES.parent
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


def launch(file: str, runs: list[Run], folder: Path, timeout: int = 1200, **variables: str) -> None:
    """Start the runs under a launch file; what each says and comes to is in files of the folder."""
    plain = json.dumps([asdict(run) for run in runs], default=str).replace("{folder}", str(folder))
    (folder / "runs.json").write_text(plain)
    (folder / file).write_text(yaml.safe_dump(yaml.safe_load((RECIPES / "accelerate" / file).read_text()) | OVERLAY))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / file)]
    command += [str(ON_CPU), str(folder / "runs.json"), str(folder)]
    env = {**environment(folder), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), **variables}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=folder, env=env, timeout=timeout, **streams, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + "".join(said(folder, run.name) for run in runs)[-4000:]


def said(folder: Path, name: str) -> str:
    """What all ranks wrote to the terminal in a run."""
    return "".join(file.read_text() for file in sorted(folder.glob(f"{name}.[oe][ur][tr][0-9]")))


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def finished(folder: Path, name: str) -> None:
    for rank in (0, 1):
        found = read(folder / f"{name}.status{rank}.json")
        assert found == 0, f"{name}, rank {rank}: {found}\n{said(folder, name)[-2000:]}"


def probe(folder: Path, name: str, rank: int) -> Any:
    return read(folder / f"{name}.rank{rank}.json")


def metrics(folder: Path, name: str) -> Any:
    return read(folder / name / "metrics.json")
