"""`trl-grpo-ext new` as a person meets it: what it prints, in which width, and what it refuses."""

import shlex
from pathlib import Path

import pytest

from tests.cli.terminal import assert_readable, invoke


@pytest.mark.parametrize("width", [None, 60])
def test_it_says_what_it_made_and_what_to_do_next(width: int | None, tmp_path: Path) -> None:
    done = invoke("new", "reward", "polite", width=width, cwd=tmp_path)
    assert_readable(done.out, width)
    shown = "./grpo-polite"
    files = {path.relative_to(tmp_path / shown).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    listed, _, following = done.plain.partition("Next:\n")
    assert {word for word in listed.split() if word in files} == files  # whole
    assert "tests/test_polite.py" in files
    assert [shlex.split(command) for command in following.strip().split("\n")] == [
        ["pip", "install", "--editable", shown],
        ["trl-grpo-ext", "list", "reward", "--distribution", "grpo-polite"],
        ["trl-grpo-ext", "check", "grpo-polite:polite"],
        ["python", "-m", "pytest", shown],
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["reward", "think_format"], "'think_format' from trl-grpo-ext 0.1.0"),
        (["aggregation", "dapo"], "'token_mean'"),
        (["hook", "MyHook"], "got 'MyHook'"),
        (["reward", "x", "--distribution", "taken"], "File exists"),
        (["thing", "polite"], "'thing'"),
    ],
)
def test_new_refuses_and_makes_nothing(words: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    done = invoke("new", *words, cwd=tmp_path, env={"COLUMNS": "200"})
    assert (done.status, done.out) == (2, "")
    assert reason in done.err
    assert "\x1b" not in done.err
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.rglob("*")] == ["taken", "mine"]
