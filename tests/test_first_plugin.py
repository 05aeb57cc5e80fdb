"""The author's walk: every command and every edit of `docs/writing_plugins.md`, in order, in a fresh environment."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.scaffold.author import make_author
from tests.first_plugin_walk import PAGE, ROOT, Step, apply_edits, differences, make_clone, read_steps, walk, walk_of

STEPS = read_steps(walk_of(PAGE.read_text(encoding="utf-8")))


def test_the_walk_reads_a_page_and_notices_what_differs(tmp_path: Path) -> None:
    page = "a\n```sh\necho 1\n```\n\n```text\none  2.5\n...\nthree\n```\n```diff\n--- f\n-b\n+c\n```\n"
    command, edit = read_steps(page)
    assert command == Step("sh", "echo 1\n", "one  2.5\n...\nthree\n")
    (tmp_path / "f").write_text("a\nb\n")
    apply_edits(edit.text, tmp_path)
    assert (tmp_path / "f").read_text() == "a\nc\n"
    with pytest.raises(AssertionError, match="0 times"):
        apply_edits(edit.text, tmp_path)
    assert differences(command.expected, "one 2.5\nnoise\nthree") == []
    assert differences(command.expected, "three one 2.5") == ["three"]  # the order counts
    assert differences(command.expected, "one 2.6 three") == ["one  2.5"]
    assert differences(command.expected, "one 2.6 three", tolerance=0.1) == []
    assert differences("one ... 2.5", "one in 3 s 2.5\n") == []
    assert differences("one ... 2.5", "one\n 2.5") == ["one ... 2.5"]  # on one line
    assert differences("one ... 2.5", "one in 3 s 2.6") == ["one ... 2.5"]
    assert differences("8 kept", "9 kept", tolerance=10.0) == ["8 kept"]  # counts are exact
    assert differences("no (3%)", "no (9%)", tolerance=0.1) == []
    assert differences("no (3%)", "no (14%)", tolerance=0.1) == ["no (3%)"]


@pytest.mark.nightly
def test_first_plugin_page_commands(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    walked = walk(STEPS, make_author(tmp_path / "venv"), clone)
    for done in walked:
        assert done.status == 0, f"{done.step.text}{done.out}\n{done.err}"
        training = done.step.text.startswith("accelerate")
        wrong = differences(done.step.expected, done.out, tolerance=0.1 if training else 0.0)
        assert not wrong, f"{done.step.text}did not print {wrong}, but\n{done.out}"
    assert len(walked) == len([step for step in STEPS if step.language == "sh"]) > 5
    assert not (ROOT / "grpo-no-guess").exists()
    assert not (ROOT / "outputs" / "first_plugin").exists()
    metrics: dict[str, Any] = json.loads((clone / "outputs" / "first_plugin" / "metrics.json").read_text())
    logs = [log for log in metrics["history"] if "reward" in log]
    assert [log["step"] for log in logs] == [4, 8]
    for log in logs:
        accuracy, manners = log["rewards/gsm8k_accuracy/mean"], log["rewards/no_guess/mean"]
        assert log["reward"] == pytest.approx(accuracy + 0.5 * manners, abs=1e-6)
    gain = metrics["after"]["no_guess"] - metrics["before"]["no_guess"]
    assert 0.02 < gain < 0.15  # the page says: from 85 of 100 to 92
    assert metrics["before"]["no_guess"] > metrics["before"]["gsm8k_accuracy"]  # a right answer does not guess
