"""`python -m bench.gpu`: its tables go into the page, and a run that fails says so in its row."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import OURS, PAGE, PLAIN, ROOT, SECTIONS, block


def cells(text: str) -> dict[str, list[str]]:
    """What a table shows, by row."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines if "---" not in line[0]}


def test_block_shows_figures_and_failures() -> None:
    whole = {"rows": {PLAIN: dict.fromkeys(SECTIONS["generation"].columns, 1234.56)}, "device": "D", "failed": None}
    broken = {"rows": {OURS: {"step, s": 0.012345, "allocated, GB": None}}, "device": "D", "failed": "out of memory"}
    text = block("generation", {PLAIN: whole, OURS: broken})
    assert cells(text)[PLAIN] == ["1235"] * 6
    assert cells(text)[OURS] == ["0.0123", *["not measured"] * 3, "–", "failed: out of memory"]
    assert text.splitlines()[-1].startswith("D; torch ")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SECTIONS])
def test_section_on_the_cpu(name: str, tmp_path: Path) -> None:
    page = shutil.copy(PAGE, tmp_path)
    command = [sys.executable, "-m", "bench.gpu", "--only", name, "--tiny", "--device", "cpu", "--page", page]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    rows = [row for arm in SECTIONS[name].runs.values() for row in arm]
    text = Path(page).read_text(encoding="utf-8").partition(f"<!-- {name} -->")[2].partition("<!-- end of")[0]
    shown = cells(text)
    assert set(rows) <= set(shown)
    peaks = [column for column in SECTIONS[name].columns if column in ("allocated, GB", "reserved, GB")]
    for row in rows:
        assert all("failed" not in cell and cell != "not measured" for cell in shown[row]), shown[row]
        assert shown[row].count("–") == len(peaks) + ("estimate / measured" in SECTIONS[name].columns)
    assert "Not run yet" not in text
