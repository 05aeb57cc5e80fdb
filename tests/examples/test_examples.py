"""The distributions of `docs/examples` as a stranger meets them: built, installed by pip, and used."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.plugins_env import Environment, make_environment
from tests.recipes.launching import RECIPES, environment

ROOT = RECIPES.parent
EXAMPLES = ROOT / "docs" / "examples"
OFFERS = ("grpo-sql-rewards", "grpo-equation-credit", "grpo-gspo-token", "grpo-difficulty-softmax")
STEPS, BATCH = 3, 32

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not importlib.util.find_spec("sqlglot"), reason="grpo-sql-rewards needs sqlglot (extra `test`)"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the examples, so that building them leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("examples") / "sources"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache", "build"))
    return folder


@pytest.fixture(scope="module")
def wheels(sources: Path) -> dict[str, Path]:
    folder = sources.parent / "wheels"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder]
    finished(subprocess.run([*pip, *(sources / name for name in OFFERS)], **HOW))
    return {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in OFFERS}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Environment:
    """All three in one environment. Tests must not change it."""
    made = make_environment(tmp_path_factory.mktemp("examples_environment") / "venv")
    made.pip("install", "-q", "--no-deps", "--no-index", *wheels.values())
    return made


HOW: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600, "check": False}


def finished(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def run(made: Environment, *words: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    folder = folder or made.directory
    command = [str(made.python), *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment(folder), **HOW)


@pytest.mark.parametrize("name", OFFERS)
def test_their_own_tests_pass(installed: Environment, sources: Path, name: str) -> None:
    shown = finished(run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=sources / name))
    assert re.search(r"[1-9]\d* passed", shown)
    assert "skipped" not in shown


@pytest.fixture(scope="module")
def word_problems(installed: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe with `gsm8k_with_examples.yaml`; every completion of every step recorded token by token."""
    folder = tmp_path_factory.mktemp("word_problems")
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "num_generations": 4,
        "num_generations_eval": 4,
        "per_device_eval_batch_size": 16,
        "train_problems": 64,
        "eval_problems": 16,
        "logging_steps": 1,
        "token_records": BATCH,
        "output_dir": folder / "output",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    config = EXAMPLES / "gsm8k_with_examples.yaml"
    finished(run(installed, RECIPES / "gsm8k_grpo.py", "--config", config, "--embedded", *words, folder=folder))
    return folder / "output"


@pytest.fixture(scope="module")
def steps(word_problems: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The log line and the records of each step."""
    history = json.loads((word_problems / "metrics.json").read_text())["history"]
    logs = [line for line in history if "rewards/gsm8k_accuracy/mean" in line]
    files = sorted((word_problems / "token_records").glob("*.parquet"))
    records = [pyarrow.parquet.read_table(file).to_pylist() for file in files]
    assert len(logs) == len(records) == STEPS
    assert all(len(rows) == BATCH for rows in records)
    return list(zip(logs, records, strict=True))


NUMBERS = r"(?<![\d.,+*/-])(\d+)([+-])(\d+) ?= ?(?:<<[^<>\n]*>>)?(\d+)(?![\d.])", r"<<(\d+)([+-])(\d+)=(\d+)>>"


def sums(text: str) -> list[tuple[tuple[str, ...], bool, range]]:
    """The sums that the tiny model writes: what they say, whether that is so, and where the result stands."""
    found = {match.start(4): match for pattern in NUMBERS for match in re.finditer(pattern, text)}
    inside_last = sorted(found.values(), key=lambda match: text.index("=", match.start()))
    return [(match.groups(), holds(*match.groups()), range(*match.span(4))) for match in inside_last]


def holds(a: str, sign: str, b: str, result: str) -> bool:
    return int(a) + int(sign + b) == int(result)


def test_the_rewards_are_those_of_the_completions(steps: Any) -> None:
    with_sums = 0
    for log, rows in steps:
        scores = []
        for row in rows:
            distinct = {what: is_so for what, is_so, _ in sums(row["completion"])}
            expected = sum(distinct.values()) / len(distinct) if distinct else None
            given = dict(row["rewards"])
            assert given["equation_accuracy"] == (None if expected is None else pytest.approx(expected)), row
            assert given["sql_match"] is None
            scores += [] if expected is None else [expected]
        with_sums += len(scores)
        assert log["rewards/equation_accuracy/mean"] == pytest.approx(sum(scores) / len(scores))
        assert "rewards/sql_match/mean" not in log
        assert log["rewards/sql_match/none"] == 1.0
        assert log["outcomes/sql_match/unparseable_reference"] == 1.0
    assert with_sums > STEPS * BATCH / 8


def test_the_script_for_sql_trains(installed: Environment, tmp_path: Path) -> None:
    words = ["--output_dir", tmp_path / "output", "--max_steps", "2"]
    finished(run(installed, EXAMPLES / "train_sql.py", *words, folder=tmp_path))
    history = [line for line in json.loads((tmp_path / "output" / "history.json").read_text()) if "reward" in line]
    assert all(line["rewards/sql_match/mean"] <= line["rewards/sql_execution/mean"] for line in history)
