"""`trl-grpo-ext audit` and every command's help, in terminals and in pipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.terminal import assert_readable, run_command
from tests.public_api.surface import commands

HOSTILE = "no number [red]x[/red] \x1b[31m\u202e \ud83d\ude00 " + "y" * 120


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "rows.jsonl"
    answers = ["#### 18", HOSTILE.encode("utf-16", "surrogatepass").decode("utf-16"), "#### 1/0"]
    rows = [{"prompt": f"q{n}", "answer": answer} for n, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [60, 100, None])
def test_the_audit_is_readable_and_shows_hostile_references_as_text(data: Path, width: int | None) -> None:
    done = run_command("audit", data, "--reward", "gsm8k_accuracy", width=width)
    assert done.status == 1
    if width is not None:
        assert_readable(done.out.rpartition("\r")[2], width)  # behind the progress bar, which is taken away
    seen = "".join(character for character in done.plain if character not in " \n│┃")
    assert "[red]x[/red]" in seen
    assert "\\x1b[31m" in seen
    assert "\\u202e" in seen
    assert seen.count("y") >= 120 + 80  # folded, not cut: the reference, and what the reward says of it
    assert "\u202e" not in done.out
    assert done.err.strip() == ""


def test_a_pipe_gets_no_colours_and_json_nothing_but_data(data: Path) -> None:
    plain = run_command("audit", data, "--reward", "gsm8k_accuracy")
    assert "\x1b" not in plain.out
    found = json.loads(run_command("audit", data, "--reward", "gsm8k_accuracy", "--json").out)
    assert [finding["problem"] for finding in found["findings"]] == ["does not parse"] * 2


@pytest.mark.parametrize("width", [60, 100, None])
@pytest.mark.parametrize("name", ["", *commands()])
def test_help_is_readable(name: str, width: int | None) -> None:
    done = run_command(*filter(None, [name]), "--help", width=width)
    assert done.status == 0
    assert "Usage" in done.plain
    assert "..." not in done.plain.partition("Options:")[2]  # nothing is cut
    if width is not None:
        assert_readable(done.out, width)
    else:
        assert "\x1b" not in done.out
