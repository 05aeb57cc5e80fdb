"""Saves that are killed at many moments; and what counts as a whole checkpoint."""

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

from tests import forking
from tests.launch.checkpoints.safe_checkpoint_worker import SafeTrainer, make, same
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.errors import CheckpointError, ConfigurationError
from trl_grpo_ext.launch.checkpoints import SafeCheckpoints
from trl_grpo_ext.records import checkpoint_state
from trl_grpo_ext.records.checkpoint_state import checkpoint_problem, last_complete_checkpoint

ROOT = Path(__file__).parents[3]
SWEEPS = ("sweep_full", "sweep_replaces")
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def sweeps(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Rows]:
    at_night = any(item.path == request.path and item.get_closest_marker("nightly") for item in request.session.items)
    names = SWEEPS if at_night else SWEEPS[:1]
    folder = tmp_path_factory.mktemp("sweeps")
    words = [",".join(names), str(tiny_model), str(folder)]
    done = forking.run("tests.launch.checkpoints.safe_checkpoint_worker", words, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("name", [SWEEPS[0], pytest.param(SWEEPS[1], marks=pytest.mark.nightly)])
def test_safe_checkpoint_survives_a_kill(sweeps: dict[str, Rows], name: str) -> None:
    rows = sweeps[name]
    assert rows[-1]["status"] == 0  # the last attempt was over before its moment, so none was left out after it
    assert {row["status"] for row in rows[:-1]} == {-9, -25}
    assert {row["ours"] for row in rows} == {"old", "new"}
    firsts = [row["ours"] for row in rows if row["kind"] == "event"]
    assert firsts == sorted(firsts, reverse=True)  # old, old, ..., new, new
    if name == "sweep_replaces":  # the one window in which transformers alone would not find it
        assert sum(row["theirs"] != row["ours"] for row in rows) == 1
    else:
        assert all(row["theirs"] == row["ours"] for row in rows)


@pytest.mark.slow
def test_after_a_kill_the_run_goes_on_to_the_same_end(sweeps: dict[str, Rows]) -> None:
    resumed = [(row["ours"], row["resumed"]) for row in sweeps["sweep_full"] if "resumed" in row]
    assert {ours for ours, _ in resumed} == {"old", "new"}
    assert all(after == {"status": 0, "equal": True, "rubbish": False} for _, after in resumed)


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


def test_resuming_from_nothing_is_refused_with_what_is_there(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(CheckpointError, match=r"no complete .*checkpoint-5"):
        make(tiny_model, tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_uploads_begin_at_the_final_place(tiny_model: Path, tmp_path: Path) -> None:
    pushed: list[tuple[str, bool]] = []

    class Hub(GRPOExtTrainer):
        """In place of transformers' method, which needs the network."""

        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            pushed.append((checkpoint_folder, checkpoint_problem(checkpoint_folder) is None))

    class Pushing(SafeCheckpoints, Hub):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.args.push_to_hub = True
            super()._save_checkpoint(model, trial)
            self.args.push_to_hub = False

    make(tiny_model, tmp_path, Pushing, max_steps=1).train()
    assert pushed == [(str(tmp_path / "checkpoint-1"), True)]


def test_a_checkpoint_without_its_weights_is_never_published(tiny_model: Path, tmp_path: Path) -> None:
    class Robbed(SafeTrainer):
        """Something removes the weights while the last files are being written."""

        def _save_rng_state(self, output_dir: str) -> None:
            super()._save_rng_state(output_dir)
            if self.state.global_step == 2:
                Path(output_dir, "model.safetensors").unlink()

    trainer = make(tiny_model, tmp_path, Robbed, max_steps=2, save_total_limit=1)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 .*no weights"):
        trainer.train()
    assert not (tmp_path / "checkpoint-2").exists()
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"max_steps": 2}, {"max_steps": -1, "num_train_epochs": 0.5}])
def test_safe_checkpoint_resumes_a_finished_run(tiny_model: Path, tmp_path: Path, plan: dict[str, Any]) -> None:
    done = make(tiny_model, tmp_path, **plan)
    done.train()
    steps = done.state.global_step
    again = make(tiny_model, tmp_path, **plan)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == steps
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{steps}")
    assert same(again.model.state_dict(), done.model.state_dict())
    more = make(tiny_model, tmp_path, max_steps=steps + 1)
    more.train(resume_from_checkpoint=True)
    assert more.state.global_step == steps + 1


def test_the_handler_of_transformers_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="enable_jit_checkpoint saves"):
        make(tiny_model, tmp_path, enable_jit_checkpoint=True)
