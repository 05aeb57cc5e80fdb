"""What `new` makes works untouched: its own tests, lint, types, `check` and `list`, in a fresh environment."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.scaffold.author import Author, make_author

pytestmark = pytest.mark.slow

CASES: dict[str, Sequence[str]] = {
    "grpo-answer-length": ("reward", "answer_length"),
    "My.Edge_Cases": ("reward", "a", "--distribution", "My.Edge_Cases"),
    "grpo-my-hook2": ("hook", "my_hook2"),
    "grpo-any": ("aggregation", "any"),
    "grpo-short": ("filter", "short"),
    "grpo-left-out": ("sampler", "left_out"),
    "grpo-hold": ("token-loss", "hold"),
}
"""By distribution the words after `new`; every kind, and names at the edges."""


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Author:
    return make_author(tmp_path_factory.mktemp("author") / "venv")


@pytest.fixture(scope="module")
def made(author: Author, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of `CASES` in it, installed."""
    folder = tmp_path_factory.mktemp("made")
    for words in CASES.values():
        done = author.run("trl-grpo-ext", "new", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
    done = author.run("pip", "install", "-q", *(f"./{distribution}" for distribution in CASES), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("distribution", CASES)
def test_generated_tests_and_types_pass(distribution: str, made: Path, author: Author) -> None:
    done = author.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=made / distribution)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)  # the rules of the kit are among them
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 5, done.stdout
    assert "skipped" not in done.stdout
    assert "warning" not in done.stdout
    done = author.run("mypy", "--cache-dir", made / "mypy_cache", cwd=made / distribution)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found in 3 source files" in done.stdout
