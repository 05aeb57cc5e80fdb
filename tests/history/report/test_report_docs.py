"""docs/report.md names the figures, options and metrics that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from trl_grpo_ext.cli.main import app
from trl_grpo_ext.history.report.figures import PLOTS

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8")


def test_the_table_has_every_figure_in_their_order() -> None:
    table = PAGE.split("## The figures")[1].split("##")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [plot.name for plot in PLOTS]


def test_the_table_has_every_option() -> None:
    command: Any = get_command(app)
    options = {o for option in command.commands["report"].params for o in option.opts if o.startswith("--")}
    table = PAGE.split("## What to switch on")[0]
    assert set(re.findall(r"^\| `(--[\w-]+)", table, re.MULTILINE)) == options - {"--help"}
