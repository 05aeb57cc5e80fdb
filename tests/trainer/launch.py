"""Launch a list of trainings in several real processes (gloo, DDP) and read what each rank saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.trainer.process_worker import Job

ROOT = Path(__file__).parents[2]
Results = dict[str, dict[str, Any]]


def launch(jobs: dict[str, Job], model: Path, folder: Path, processes: int, timeout: int = 300) -> list[Results]:
    """Run every job once in `processes` processes and return each rank's results, in rank order."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    worker = ["-m", "tests.trainer.process_worker", str(folder / "jobs.json"), str(model), str(folder)]
    done = subprocess.run(
        [*launcher, *worker],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    results: list[Results] = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]
    for result in results:
        assert result.keys() == jobs.keys()
    return results
