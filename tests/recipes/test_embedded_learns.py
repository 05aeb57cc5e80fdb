"""The promise of `make demo`: GRPO with the accuracy reward makes the embedded model better at unseen problems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k_grpo.py"


@pytest.mark.nightly
def test_held_out_accuracy_rises_with_the_default_seed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(RECIPE), "--embedded", "--output_dir", str(tmp_path)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},  # beside another process of the suite
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    before, after = (metrics[when]["gsm8k_accuracy"] for when in ("before", "after"))
    assert before <= 0.40
    assert after >= before + 0.35
    assert "512 held-out problems" in done.stdout
