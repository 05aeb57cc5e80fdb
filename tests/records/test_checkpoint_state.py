"""What counts as a whole checkpoint, which one is the newest, and what is not resumed from."""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.launch.checkpoints.safe_checkpoint_worker import make
from trl_grpo_ext.errors import CheckpointError
from trl_grpo_ext.records import checkpoint_state
from trl_grpo_ext.records.checkpoint_state import checkpoint_problem, last_complete_checkpoint


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a run."""
    folder = tmp_path_factory.mktemp("plain")
    make(tiny_model, folder, max_steps=2, save_total_limit=None).train()
    return folder


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[content.index(b"\x80\x02") + 20] ^= 0xFF  # in the pickle; between entries are bytes that nobody reads
    file.write_bytes(content)


TRAINING_STATE = ("optimizer.pt", "scheduler.pt", "rng_state.pth")

BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no state": (lambda f: (f / "trainer_state.json").unlink(), "trainer_state.json is missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "it has no weights"),
    "weights cut": (
        lambda f: os.truncate(f / "model.safetensors", 50_000),
        "model.safetensors is cut short or damaged",
    ),
    "no optimizer": (lambda f: (f / "optimizer.pt").unlink(), "it has scheduler.pt and no optimizer.pt"),
    **{f"{name} damaged": (lambda f, name=name: flip(f / name), f"{name} is") for name in TRAINING_STATE},
    "a rank missing": (lambda f: [shutil.copy(f / "rng_state.pth", f / f"rng_state_{r}.pth") for r in (0, 2)], "ranks"),
    "DeepSpeed without its folder": (lambda f: (f / "latest").write_text("global_step2"), "'global_step2' is missing"),
    "FSDP without metadata": (lambda f: (f / "pytorch_model_fsdp_0").mkdir(), ".metadata is missing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_passed_over(
    plain: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(checkpoint_state.logger, "warning", lambda text, *values: said.append(text % values))
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    damage, reason = BROKEN[name]
    damage(tmp_path / "checkpoint-2")
    assert reason in str(checkpoint_problem(tmp_path / "checkpoint-2"))
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    assert reason in said[-1]


def saved(folder: Path, step: int, log: list[int], time: int) -> Path:
    """A small checkpoint without a training state, with a log of so many losses, saved at that time."""
    made = folder / f"checkpoint-{step}"
    made.mkdir(exist_ok=True)
    save_file({"w": torch.zeros(1)}, made / "model.safetensors")
    state = made / "trainer_state.json"
    state.write_text(json.dumps({"global_step": step, "log_history": [{"loss": loss} for loss in log]}))
    os.utime(state, (time, time))
    return made


FOLDERS: dict[str, tuple[list[tuple[int, list[int], int]], int, str]] = {
    "one run": ([(2, [], 1), (4, [1], 2), (6, [1, 2], 3)], 6, ""),
    "copied, times equal": ([(2, [], 9), (4, [1], 9), (6, [1, 2], 9)], 6, ""),
    "copied, times reversed": ([(4, [1], 9), (6, [1, 2], 8), (10, [1, 2, 3], 7)], 10, ""),
    "stopped in a used folder": (
        [(2, [8], 8), (3, [8, 9], 9), (4, [1], 1), (6, [1, 2], 2)],
        3,
        "checkpoint-4, checkpoint-6",
    ),
    "stopped before its first log": ([(3, [], 9), (6, [1, 2], 2)], 3, "checkpoint-6"),
    "longer, in a used folder": ([(6, [1, 2], 2), (8, [8, 9], 9)], 8, "checkpoint-6"),
    "a NaN in the log": ([(4, [math.nan], 9), (6, [math.nan, 2], 8)], 6, ""),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_newest_checkpoint_of_a_used_folder(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(checkpoint_state.logger, "warning", lambda text, *values: said.append(text % values))
    there, newest, others = FOLDERS[name]
    for step, log, time in there:
        saved(tmp_path, step, log, time)
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{newest}")
    assert [f"training: {others}." in one for one in said] == [True] * bool(others)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_resumed(plain: Path, tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain / "checkpoint-2", tmp_path / "checkpoint-2")
    flip(folder / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        make(tiny_model, tmp_path, max_steps=3).train(resume_from_checkpoint=str(folder))


@pytest.mark.slow
def test_what_transformers_goes_on_without_is_a_warning(
    plain: Path, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(plain / "checkpoint-2", tmp_path / "checkpoint-2")
    for file in TRAINING_STATE:  # as `save_only_model` leaves it
        (folder / file).unlink()
    assert last_complete_checkpoint(tmp_path) == str(folder)
    trainer = make(tiny_model, tmp_path, max_steps=3, save_only_model=True)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-2 has no optimizer state and rng_state.pth" in caplog.text
    assert trainer.state.global_step == 3
