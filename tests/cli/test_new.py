"""`trl-grpo-ext new` as a person meets it: what it prints, in which width, and what it refuses."""

import shlex
from pathlib import Path

import pytest

from tests.cli.terminal import assert_readable, invoke

FILES = [
    *("src/grpo_polite/polite.py", "tests/test_polite.py", "pyproject.toml", "README.md", "CHANGELOG.md"),
    *("src/grpo_polite/__init__.py", ".gitignore", ".github/workflows/ci.yml", ".github/workflows/publish.yml"),
    *("LICENSE", "src/grpo_polite/py.typed"),
]


def commands(out: str) -> list[list[str]]:
    """The commands below "Next:", as a shell reads them."""
    return [shlex.split(command) for command in out.partition("Next:\n")[2].strip().split("\n")]


@pytest.mark.parametrize("width", [None, 60])
def test_it_says_what_it_made_and_what_to_do_next(width: int | None, tmp_path: Path) -> None:
    done = invoke("new", "reward", "polite", width=width, cwd=tmp_path)
    assert done.status == 0, done
    assert_readable(done.out, width)
    shown = "./grpo-polite"
    words = done.plain.split()
    assert [word for word in words if word in FILES] == FILES  # whole, and in this order
    assert sorted(FILES) == sorted(
        p.relative_to(tmp_path / shown).as_posix() for p in tmp_path.rglob("*") if p.is_file()
    )
    assert commands(done.plain) == [
        ["pip", "install", "--editable", shown],
        ["trl-grpo-ext", "list", "reward", "--distribution", "grpo-polite"],
        ["trl-grpo-ext", "check", "grpo-polite:polite"],
        ["python", "-m", "pytest", shown],
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["reward", "think_format"], "'think_format' is taken, by 'think_format' from trl-grpo-ext 0.1.0"),
        (["aggregation", "dapo"], "The name 'dapo' is taken, by 'token_mean'"),
        (["hook", "MyHook"], "got 'MyHook'"),
        (["reward", "x", "--distribution", "taken"], "The folder taken cannot be made: File exists."),
        (["thing", "polite"], "'thing' is not one of 'reward', 'hook', 'aggregation'"),
    ],
)
def test_new_refuses_and_makes_nothing(words: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    done = invoke("new", *words, cwd=tmp_path, env={"COLUMNS": "200"})
    assert done.status == 2
    assert not done.out
    assert reason in done.err
    assert "\x1b" not in done.err
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.rglob("*")] == ["taken", "mine"]
