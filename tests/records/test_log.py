"""The live log: every entry at once, and after a resumption."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.support import length_reward, prompts, train
from trl_grpo_ext.history.report import load_run
from trl_grpo_ext.records.log import LOG_FILE, LiveLog


def log_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG_FILE).read_text(encoding="utf-8").splitlines()]


def as_json(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in log.items()}
        for log in history
    ]


def test_live_log_is_the_history(tiny_model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((state.global_step, log_lines(tmp_path) == as_json(state.log_history)))

    def none_at_all(completions: list[str], **columns: Any) -> list[None]:
        return [None] * len(completions)  # its mean is None in the log

    first = train(
        tiny_model,
        tmp_path,
        max_steps=5,
        reward_funcs=[length_reward, none_at_all],
        trainer_arguments={"eval_dataset": prompts(2), "callbacks": [Look()]},
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
        per_device_eval_batch_size=8,
    )
    assert seen == [(step, True) for step in range(5)]
    assert log_lines(tmp_path) == as_json(first.trainer.state.log_history)
    assert load_run(tmp_path).last_step == 5

    first.trainer.args.max_steps = 3
    first.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    lines = log_lines(tmp_path)
    assert lines == as_json(first.trainer.state.log_history)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]  # 3 anew; 4 and 5 are gone


def test_token_records_of_an_earlier_run_go(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"token_records": 4, "save_strategy": "steps", "save_steps": 2}
    train(tiny_model, tmp_path, max_steps=4, **settings)
    (tmp_path / "token_records" / "step_notes.parquet").touch()  # not ours
    train(tiny_model, tmp_path, max_steps=3, resume=str(tmp_path / "checkpoint-2"), **settings)
    assert recorded(tmp_path) == ["step_00001", "step_00002", "step_00003", "step_notes"]
    train(tiny_model, tmp_path, max_steps=1, **settings)
    assert recorded(tmp_path) == ["step_00001", "step_notes"]
    train(tiny_model, tmp_path, max_steps=1)
    assert recorded(tmp_path) == ["step_notes"]
    assert len([*tmp_path.glob("token_records/step_0000?.parquet.earlier")]) == 4


def recorded(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "token_records").glob("*.parquet"))


def test_a_log_that_cannot_be_written_costs_the_log_alone(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / LOG_FILE).mkdir()
    with pytest.warns(UserWarning, match=LOG_FILE):
        run = train(tiny_model, tmp_path, max_steps=2)
    assert len(run.losses) == 2


def test_live_log_in_plain_trl(tiny_model: Path, tmp_path: Path) -> None:
    run = train(tiny_model, tmp_path, GRPOTrainer, max_steps=2, callbacks=[LiveLog()])
    assert log_lines(tmp_path) == as_json(run.trainer.state.log_history)


def test_findings_that_cannot_be_told_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = SimpleNamespace(is_world_process_zero=True, log_history=[{"step": n, "reward": 1 - n} for n in range(9)])
    arguments: Any = SimpleNamespace(output_dir=str(tmp_path))
    LiveLog().on_train_end(arguments, state, None)
    assert "the reward falls" in capsys.readouterr().err
    closed = io.StringIO()
    closed.close()
    for stderr in (closed, None):
        monkeypatch.setattr("sys.stderr", stderr)
        LiveLog().on_train_end(arguments, state, None)
    monkeypatch.undo()
    LiveLog().on_train_end(arguments, SimpleNamespace(is_world_process_zero=True, log_history=[None] * 9), None)
    assert "cannot be computed" in capsys.readouterr().err
