"""The author's walk: every command and every edit of `docs/writing_plugins.md`, in order, in a fresh environment."""

import json
from pathlib import Path

import pytest

from tests.cli.scaffold.author import make_author
from tests.first_plugin_walk import PAGE, ROOT, differences, make_clone, read_steps, walk, walk_of

STEPS = read_steps(walk_of(PAGE.read_text(encoding="utf-8")))


@pytest.mark.nightly
def test_first_plugin_page_commands(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    walked = walk(STEPS, make_author(tmp_path / "venv"), clone)
    for done in walked:
        assert done.status == 0, f"{done.step.text}{done.out}\n{done.err}"
        wrong = differences(done.step.expected, done.out)
        assert not wrong, f"{done.step.text}did not print {wrong}, but\n{done.out}"
    assert len(walked) == len([step for step in STEPS if step.language == "sh"]) > 5
    assert not (ROOT / "grpo-no-guess").exists()
    assert not (ROOT / "outputs" / "first_plugin").exists()
    metrics = json.loads((clone / "outputs" / "first_plugin" / "metrics.json").read_text())
    logs = [log for log in metrics["history"] if "reward" in log]
    assert [log["step"] for log in logs] == [4, 8]
    for log in logs:
        accuracy, manners = log["rewards/gsm8k_accuracy/mean"], log["rewards/no_guess/mean"]
        assert log["reward"] == pytest.approx(accuracy + 0.5 * manners, abs=1e-6)
    gain = metrics["after"]["no_guess"] - metrics["before"]["no_guess"]
    assert 0.02 < gain < 0.15  # the page says: from 85 of 100 to 92
    assert metrics["before"]["no_guess"] > metrics["before"]["gsm8k_accuracy"]  # a right answer does not guess
