"""Every public name and command is documented, and imports no torch for nothing."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from trl_grpo_ext.cli.main import app

ROOT = Path(__file__).parents[1]
API_PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
MODULES = re.findall(r"^\| `(trl_grpo_ext[\w.]*)` \|", API_PAGE, re.MULTILINE)
COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there_and_on_the_page(name: str) -> None:
    module = import_module(name)
    (row,) = [line for line in API_PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    assert sorted(re.findall(r"`(\w+)`", row.split(" | ")[2])) == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


def test_every_command_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert [name for name in COMMANDS if f"trl-grpo-ext {name}" not in pages] == []


def test_the_public_names_that_need_no_torch_load_without_it() -> None:
    light = ["load_rewards", "Rollout", "Outcome", "TRLGRPOExtError", "completion_text", "available"]
    code = f"import sys, trl_grpo_ext\nfor n in {light}: getattr(trl_grpo_ext, n)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
