"""What `recipes/sort_grpo.py` refuses; `test_two_processes.py` trains with it."""

import sys
from pathlib import Path

from common.errors import exit_with_message

import pytest
import sort_grpo
from sorting.task import save_untrained_model

WRONG = {
    "no such objective in YAML": (
        ["--config", "{folder}/a.yaml"],
        ("--objective", "clipped, unclipped, naive", "'ppo'"),
    ),
    "epsilon without clipping": (
        ["--objective", "unclipped", "--epsilon", "0.1"],
        ("unclipped", "leave --epsilon away"),
    ),
    "a model that cannot read the numbers": (
        ["--model_name_or_path", "{folder}/model", "--largest", "12"],
        ("tokenizer of", "does not know", "lower --largest"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_told_in_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, says = WRONG[name]
    (tmp_path / "a.yaml").write_text("objective: ppo\n")
    if any("{folder}/model" in word for word in words):
        save_untrained_model(tmp_path / "model", largest=9, seed=0)
    words = [word.replace("{folder}", str(tmp_path)) for word in words]
    monkeypatch.setattr(sys, "argv", ["sort_grpo.py", "--output_dir", str(tmp_path / "output"), *words])
    with pytest.raises(SystemExit) as stopped, exit_with_message():
        sort_grpo.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    for word in says:
        assert word in line
