"""What `recipes/sort_grpo.py` refuses; `test_two_processes.py` trains with it."""

import sys
from pathlib import Path

from common.errors import exit_with_message

import pytest
import sort_grpo
from sorting.task import save_untrained_model

WRONG = [
    (["--config", "a.yaml"], ("--objective", "clipped, unclipped, naive", "'ppo'")),
    (["--objective", "unclipped", "--epsilon", "0.1"], ("unclipped", "leave --epsilon away")),
    (["--model_name_or_path", "model", "--largest", "12"], ("does not know", "lower --largest")),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=["objective", "epsilon", "model"])
def test_a_mistake_is_told_in_one_sentence(
    words: list[str],
    says: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("objective: ppo\n")
    save_untrained_model(Path("model"), largest=9, seed=0)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["sort_grpo.py", "--output_dir", "output", *words])
    with pytest.raises(SystemExit) as stopped, exit_with_message():
        sort_grpo.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert [word for word in says if word not in line] == []
