"""Saves that are killed at many moments, and what their checkpoints are resumed to; uploads; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forking
from tests.launch.checkpoints.safe_checkpoint_worker import SafeTrainer, make, same
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.errors import CheckpointError, ConfigurationError
from trl_grpo_ext.launch.checkpoints import SafeCheckpoints
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
