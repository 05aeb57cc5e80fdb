"""The commands that answer at once: what they import and which files they touch, with 200 plugins too.

How long that takes is measured by `bench/discovery.py`; here is counted what makes it long.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cli.distributions import MARKED, imported, write_distribution

HEAVY = ("torch", "trl", "transformers", "accelerate", "numpy", "pyarrow", "jinja2", "datasets", "peft")
MANY = 200

PROBE = """
import contextlib, io, json, sys
opened = []
def watch(event, arguments):
    if event in ("open", "os.listdir", "os.scandir"):
        opened.append((event, str(arguments[0])))
sys.addaudithook(watch)
from trl_grpo_ext.cli.main import app
answers = []
for words in {commands!r}:
    sys.argv = ["trl-grpo-ext", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            app()
        except SystemExit as end:
            status = end.code
    answers.append(dict(words=words, status=status, out=out.getvalue(), modules=sorted(sys.modules)))
print(json.dumps(dict(answers=answers, opened=opened)))
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 distributions with a plugin each."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(MANY):
        name = f"many_{number:03}"
        text = f'{MARKED}def reward(completions, **columns):\n    """Score {number}."""\n'
        write_distribution(folder, name, {"reward": {name: f"{name}:reward"}}, {f"{name}/__init__.py": text})
    return folder


def probed(folder: Path | None, *commands: list[str]) -> dict[str, Any]:
    """What commands print one after the other in a fresh process, the modules after each, and what all have opened."""
    environ = {**os.environ, "PYTHONPATH": "" if folder is None else str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    environ.pop("COLUMNS", None)
    command = [sys.executable, "-c", PROBE.format(commands=commands)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def heavy(modules: list[str]) -> list[str]:
    return [name for name in modules if name in HEAVY]


COMMANDS = (
    *(["--help"], ["--version"], ["list"], ["list", "--json"], ["show", "--help"]),
    *([name, "--help"] for name in ("check", "new", "compare", "report", "doctor", "audit")),
)


def test_commands_import_nothing_heavy() -> None:
    plugins = ("trl_grpo_ext.rewards", "trl_grpo_ext.advantages", "trl_grpo_ext.aggregation")
    for answer in probed(None, *COMMANDS)["answers"]:
        assert answer["status"] == 0, answer["words"]
        assert answer["out"], answer["words"]
        assert heavy(answer["modules"]) == [], answer["words"]
        assert [name for name in answer["modules"] if name.startswith(plugins)] == [], answer["words"]


def test_list_with_200_plugins_imports_none(many: Path) -> None:
    seen = probed(many, ["list"])
    (answer,) = seen["answers"]
    assert sum(line.startswith("many_") for line in answer["out"].splitlines()) == MANY
    assert "Score 199." in answer["out"]
    assert heavy(answer["modules"]) == []
    assert imported(many) == []
    opened = [Path(path) for _, path in seen["opened"] if path.startswith(str(many))]
    counts = Counter((path.parent.suffix or "module", path.name) for path in opened)
    assert counts["module", "__init__.py"] == MANY
    assert counts[".dist-info", "entry_points.txt"] <= 2 * MANY
    assert counts[".dist-info", "METADATA"] <= MANY
    assert counts[".dist-info", "RECORD"] == 0, "which lists all files, and may be long"
    assert len(opened) <= 6 * MANY, counts.most_common(5)
