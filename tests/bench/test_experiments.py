"""`bench.experiments`: what the page shows comes from the committed runs."""

import re
import shutil
from pathlib import Path

import pytest

from bench import experiments, study

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", list(experiments.EXPERIMENTS))
def test_page_and_figure_are_those_of_the_committed_runs(name: str, tmp_path: Path) -> None:
    lines = study.Results(experiments.RUNS / f"{name}.jsonl").lines
    if not lines:
        pytest.skip("not run to the end yet, as the page says")
    (tmp_path / "images").mkdir()
    page = Path(shutil.copy(DOCS / "evidence.md", tmp_path))
    experiments.draw(name, lines, tmp_path)
    assert page.read_text() == (DOCS / "evidence.md").read_text()
    drawn, committed = (folder / "images" / f"experiment_{name}.svg" for folder in (tmp_path, DOCS))
    made_by = re.compile(r"Matplotlib v[\d.]+")
    if made_by.findall(drawn.read_text()) == made_by.findall(committed.read_text()):
        assert drawn.read_bytes() == committed.read_bytes()
