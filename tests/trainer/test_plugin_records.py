"""A run and its checkpoints record their plugins, and a run with other plugins does not resume by accident."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support import arguments, length_reward, prompts, scripted_rollout
from tests.trainer.launch import on_two_ranks
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.errors import CheckpointError, ManifestError
from trl_grpo_ext.launch.checkpoints import SafeCheckpoints
from trl_grpo_ext.records.manifest import FILE, Manifest
from trl_grpo_ext.trainer.plugin_records import ManifestWarning


class SafeTrainer(SafeCheckpoints, GRPOExtTrainer):
    """With checkpoints that survive."""


WEIGHTS = {"name": "sign_scaling", "negative": 2.0}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}


def made(
    model: Path,
    folder: Path,
    trainer_class: type = GRPOExtTrainer,
    hooks: Any = None,
    aggregation: Any = None,
    **settings: Any,
) -> Any:
    args = arguments(folder, **{**SAVING, **settings})
    given = {"train_dataset": prompts(), "rollout_func": scripted_rollout}
    return trainer_class(str(model), length_reward, args, advantage_hooks=hooks, loss_aggregation=aggregation, **given)


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, each with a checkpoint. Tests must not change it."""
    folder = tmp_path_factory.mktemp("manifest") / "run"
    made(tiny_model, folder, hooks=[WEIGHTS, "centred"], aggregation="token_sum").train()
    return folder


def resume(tiny_model: Path, run: Path, folder: Path, checkpoint: str = "checkpoint-1", **given: Any) -> Any:
    trainer = made(tiny_model, folder, **{"hooks": [WEIGHTS, "centred"], "aggregation": "token_sum", **given})
    trainer.train(resume_from_checkpoint=str(run / checkpoint))
    return trainer


def names(path: Path) -> list[str]:
    return [record.name for record in Manifest.read(path / FILE).plugins]


def test_a_run_and_each_checkpoint_have_it(run: Path) -> None:
    expected = ["length_reward", "centred", "sign_scaling", "token_sum"]  # in the order in which they act
    for folder in (run, run / "checkpoint-1", run / "checkpoint-2"):
        assert names(folder) == expected
    by_name = {record.name: record for record in Manifest.read(run / FILE).plugins}
    assert by_name["sign_scaling"].parameters == {"negative": 2.0}
    assert by_name["sign_scaling"].distribution == "trl-grpo-ext"
    assert by_name["length_reward"].target == "tests.support:length_reward"
    assert not by_name["length_reward"].selected
    assert all(len(record.source_hash or "") == 64 for record in by_name.values())
    assert not list(run.rglob(f".{FILE}*"))  # nothing unfinished


OTHER = [{**WEIGHTS, "negative": 3.0}, "centred"]
CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "a parameter": ({"hooks": OTHER}, "sign_scaling: parameter negative 2.0 in the checkpoint, 3.0 here"),
    "a weight": ({"reward_weights": [0.5]}, "length_reward: weight 1.0 in the checkpoint, 0.5 here"),
}


@pytest.mark.parametrize(("given", "difference"), CHANGED.values(), ids=CHANGED.keys())
def test_change_stops_resuming(
    tiny_model: Path, run: Path, tmp_path: Path, given: dict[str, Any], difference: str
) -> None:
    with pytest.raises(ManifestError) as stopped:
        resume(tiny_model, run, tmp_path, **given)
    assert difference in str(stopped.value)
    assert f"{run / 'checkpoint-1'}" in str(stopped.value)
    assert str(stopped.value).count(" in the checkpoint") == 1  # that one and no other
    assert not (tmp_path / FILE).exists()


@pytest.mark.slow
def test_what_is_a_warning(tiny_model: Path, run: Path, tmp_path: Path) -> None:
    with pytest.warns(ManifestWarning, match=r"3\.0"):
        resume(tiny_model, run, tmp_path / "told to", hooks=OTHER, plugin_changes="warn")
    shutil.copytree(run / "checkpoint-1", tmp_path / "copy" / "checkpoint-1")
    (tmp_path / "copy" / "checkpoint-1" / FILE).write_text('{"format": 1, "plu')
    with pytest.warns(ManifestWarning, match="JSONDecodeError"):
        resume(tiny_model, tmp_path / "copy", tmp_path / "out", plugin_changes="warn")
    with pytest.raises(ManifestError, match="JSONDecodeError"):
        resume(tiny_model, tmp_path / "copy", tmp_path / "stops")


def test_a_damaged_training_state_is_not_resumed_in_silence(tiny_model: Path, run: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(run / "checkpoint-1", tmp_path / "damaged" / "checkpoint-1")
    content = (damaged / "optimizer.pt").read_bytes()
    third = len(content) // 3
    (damaged / "optimizer.pt").write_bytes(content[:third] + bytes(third) + content[2 * third :])
    lacking = shutil.copytree(run / "checkpoint-1", tmp_path / "lacking" / "checkpoint-1")
    for name in ("scheduler.pt", "rng_state.pth"):
        (lacking / name).unlink()
    for folder, says in ((damaged, "optimizer.pt is"), (lacking, "no scheduler.pt and no rng_state.pth")):
        with pytest.raises(CheckpointError, match=f"Cannot resume from .*{says}"):
            resume(tiny_model, folder.parent, tmp_path / "out")


def attempt(model: Path, output_dir: str, resume: Any = None, safe: bool = False, **settings: Any) -> dict[str, Any]:
    """Train once on this rank, and say how it ended."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer = made(model, Path(output_dir), SafeTrainer if safe else GRPOExtTrainer, **settings)
            trainer.train(resume_from_checkpoint=resume)
        except ManifestError as error:
            return {"error": type(error).__name__, "message": str(error)}
    notes = [str(w.message) for w in caught if w.category is ManifestWarning]
    return {"steps": trainer.state.global_step, "warnings": notes}


def run_attempts(attempts: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """The outcome of each on this rank; `by_rank` has settings of each rank alone."""
    by_rank = [one.pop("by_rank", [{}, {}])[int(os.environ["RANK"])] for one in attempts]
    return [attempt(Path(model), **{**one, **mine}) for one, mine in zip(attempts, by_rank, strict=True)]


@pytest.mark.slow
def test_two_processes_stop_together(tiny_model: Path, tmp_path: Path) -> None:
    run = {"output_dir": str(tmp_path / "run"), "hooks": [WEIGHTS], "per_device_train_batch_size": 4}
    other = {"hooks": [{**WEIGHTS, "negative": 3.0}], "output_dir": str(tmp_path / "other")}
    from_first = {"resume": str(tmp_path / "run" / "checkpoint-1")}
    attempts = [
        {**run, "safe": True},
        {**run, **other, **from_first},
        {**run, **from_first, "by_rank": [{}, other]},
        {**run, **other, **from_first, "plugin_changes": "warn"},
        {**run, "resume": True, "max_steps": 3, "safe": True},
    ]
    both = on_two_ranks(run_attempts, attempts, tiny_model)
    for trained, all_differ, one_differs, warned, resumed in both:
        assert (trained["steps"], trained["warnings"]) == (2, [])
        assert all_differ["error"] == one_differs["error"] == "ManifestError"
        assert "On rank 0: Not resumed" in all_differ["message"]
        assert "parameter negative 2.0 in the checkpoint, 3.0 here" in all_differ["message"]
        assert "On rank 1: Not resumed" in one_differs["message"]
        assert warned["steps"] == 2
        assert (resumed["steps"], resumed["warnings"]) == (3, [])
    assert both[0][1] == both[1][1]
    assert [len(outcomes[3]["warnings"]) for outcomes in both] == [1, 0]  # once, not on every rank
