"""The doctor as a command: what cannot be examined is said, in a pipe and in a terminal, and real processes run."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.launch.doctor.examining import MODEL, said
from trl_grpo_ext.cli.main import app
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.launch.doctor.command import examine

pytestmark = pytest.mark.usefixtures("here")

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_what_cannot_be_examined_is_said() -> None:
    for words in (["bash", "run.sh"], ["gone.yaml"], [], ["python"]):
        with pytest.raises(ConfigurationError):
            examine(words)
    Path("train.py").write_text("print('nothing to train')\n")
    nothing = examine(["train.py"])
    assert (nothing.exit_code, nothing.unreached) == (2, "the script ended without constructing a trainer")
    offline = "raise ConnectionError('the hub is away')\n"
    Path("train.py").write_text(offline)
    away = examine(["train.py"])
    assert (away.exit_code, away.unreached) == (2, "the script stopped before its trainer")
    made = f"GRPOConfig('out', bf16=False, max_completion_length=64)\nModelConfig({MODEL!r})\n"
    Path("train.py").write_text(f"from trl import GRPOConfig, ModelConfig\n{made}{offline}")
    alone = examine(["train.py"])
    assert alone.exit_code == 0, said(alone)
    assert said(alone).startswith("No problems found in the settings, which is all that was examined: ")
    Path("train.py").write_text("import os\nprint('last words')\nos._exit(3)\n")
    assert "last words" in said(examine(["train.py"]))
    Path("train.py").write_text("raise SystemExit('no data: [bold]\\x1b[31m')\n")
    (stopped,) = examine(["train.py"]).problems
    assert "[bold]\\x1b[31m" in stopped.message


def test_the_command_does_not_fold_in_a_pipe() -> None:
    Path("run.yaml").write_text(f"model_name_or_path: {MODEL}\nlearning_rat: 1.0\n")
    ended = CliRunner(env={"COLUMNS": ""}).invoke(app, ["doctor", "--gpus", "0", "--", "run.yaml"])
    assert max(map(len, ended.stdout.splitlines())) > 80, ended.output


@pytest.mark.slow
def test_the_command_runs_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    words = ["doctor", "--gpus", "2", "--gpu-memory", "24", "--", "accelerate", "launch", "--num_processes", "2"]
    words += ["--multi_gpu", "recipes/gsm8k_grpo.py", "--embedded"]
    ended = CliRunner(env={"COLUMNS": "80"}).invoke(app, words)
    plain = " ".join(ended.stdout.split())
    assert ended.exit_code == 0, ended.output
    assert "ddp, 2 processes" in plain
    assert "memory: about" in plain
    assert max(map(len, ended.stdout.splitlines())) <= 80
