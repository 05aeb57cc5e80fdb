"""The table beside verl, SkyRL and TRL is that of the committed results, and TRL's rows still hold."""

import json

import pytest
import yaml

from bench.fidelity import BLOCK, COMPARED, RESULTS, compare, label, table
from tests.docs_site.blocks import ROOT

LINES = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
ROWS = yaml.safe_load(COMPARED.read_text(encoding="utf-8"))


def test_page_has_the_committed_results() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert f"<!-- {BLOCK} -->\n\n{table(LINES)}\n\n<!-- end of {BLOCK} -->" in page


def test_results_are_of_what_is_compared() -> None:
    compared = [
        (label(row), *next(iter(theirs.items())), theirs.get("why", ""))
        for rows in ROWS.values()
        for row in rows
        for theirs in row["theirs"]
    ]
    assert [(one["ours"], one["project"], one["theirs"], one["why"]) for one in LINES] == compared


def test_differences_have_reasons() -> None:
    for one in LINES:  # their divisors have an epsilon of 1e-8, which is no reason
        largest = max(one["values"], one.get("gradients", 0.0))
        assert largest > 1e-8 if one["why"] else largest < 5e-8, one


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS["losses"] if "TRL" in str(row["theirs"])], ids=label)
def test_trls_loss(row: dict[str, object]) -> None:
    for one in compare("losses", row, {}):
        assert max(one["values"], one["gradients"]) < 1e-12
