"""The quickstart notebook runs from top to bottom, without Jupyter, and the model learns in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"
SHOW = """
print("ACCURACY", [entry["rewards/gsm8k_accuracy/mean"] for entry in trainer.state.log_history if "reward" in entry])
coloured_rows = Page("".join(map(coloured, mixed[0][:4])))._repr_html_()
print("COLOURED", coloured_rows.count("<pre>"), comparison.pairs[0].moved > 0)
"""


def cells(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.nightly
def test_the_notebook_runs_and_the_model_learns(tmp_path: Path) -> None:
    script = tmp_path / "quickstart.py"
    script.write_text("\n".join([*cells("code"), SHOW]))
    done = subprocess.run(
        [sys.executable, script],
        cwd=NOTEBOOK.parent,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (accuracy,) = (json.loads(line[9:]) for line in done.stdout.splitlines() if line.startswith("ACCURACY "))
    assert accuracy[-1] > accuracy[0] + 0.1
    assert "COLOURED 4 True" in done.stdout
