"""`trl-grpo-ext compare` as a person runs it: widths, pipes, JSON, exit codes, completions that attack the terminal."""

import json
from pathlib import Path

import pytest

from tests.cli.terminal import assert_readable, invoke
from tests.history.compare.saved_files import two_groups, write_words

pytestmark = pytest.mark.slow

HOSTILE = [
    "\x1b[2J\x1b]0;owned\x07 bell\x07 \r\x08\x08 back",
    "[red]not markup[/red] [/] [link=http://x]y[/link] :smile:",
    "\u202e right to left \u200b lone",
    "x " * 50_000,
]
REWARD = "[bold]\x1b[31mreward\u202e"


@pytest.fixture
def selections(tmp_path: Path) -> list[str]:
    (tmp_path / "base.yaml").write_text("advantage_hooks: [centred]\n")
    (tmp_path / "[red]other.yaml").write_text("advantage_hooks: [raw_reward]\nloss_aggregation: seq_mean_token_mean\n")
    return ["--with", str(tmp_path / "base.yaml"), "--with", str(tmp_path / "[red]other.yaml")]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    rows = [
        {"group": number, "member": member, "prompt": text, "completion": text, "rewards": {REWARD: float(member)}}
        for number, text in enumerate(HOSTILE)
        for member in range(2)
    ]
    return write_words(tmp_path / "\x1b[2Jhostile", rows)


@pytest.mark.parametrize("width", [60, None])
def test_everything_can_be_read_whatever_the_completions_are(
    hostile: Path, selections: list[str], width: int | None
) -> None:
    done = invoke("compare", hostile, *selections, width=width)
    assert done.status == 0, done
    assert_readable(done.out, width)
    shown = "".join(done.plain.split())
    for text in ("[bold]\\x1b[31mreward\\u202e", "[red]other", "\\x1b[2Jhostile"):
        assert text in shown, text
    if width is None:
        assert "the saved ones are used" in done.err
        assert "\x1b" not in done.out + done.err


def test_json_has_everything_and_nothing_else_is_on_stdout(tmp_path: Path, selections: list[str]) -> None:
    done = invoke("compare", two_groups(tmp_path), *selections, "--step", "0..3", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["notes"] == done.err.splitlines()
    assert found["pairs"][0]["moved"] == pytest.approx(2 / 3, abs=1e-6)
    assert [one["name"] for one in found["selections"]] == ["base", "[red]other"]


def test_conclusions_say_what_a_person_needs(tmp_path: Path) -> None:
    words: list[str] = []
    for name, weight in (("base", 1), ("same", 2), ("opposite", -1), ("flat", 0)):
        (tmp_path / f"{name}.yaml").write_text(f"reward_weights: [{weight}]\n")
        words += ["--with", str(tmp_path / f"{name}.yaml")]
    shown = " ".join(invoke("compare", two_groups(tmp_path), *words).out.split())
    assert "same and base train the same: no gradient mass moves, nor is any turned." in shown
    assert "opposite moves 0.0% of base's gradient mass" in shown
    assert "50.0% of the completions are pushed the same way" in shown
    assert "flat has no gradient mass: nothing is learnt." in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--step", "a"], "--step is 'a'"), (["--model", "/not/there"], "'/not/there' cannot be loaded")],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    tmp_path: Path, selections: list[str], words: list[str], said: str
) -> None:
    done = invoke("compare", two_groups(tmp_path), *selections, *words)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1), done.err
    assert said in done.err
