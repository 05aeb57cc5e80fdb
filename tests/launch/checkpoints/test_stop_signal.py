"""A signal ends a training on all ranks at one step with a checkpoint; a rank that cannot write stops all of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forking
from tests.launch.checkpoints.safe_checkpoint_worker import make, same
from tests.launch.checkpoints.stop_signal_worker import JOBS, InSecondStep
from trl_grpo_ext.errors import PluginRunError
from trl_grpo_ext.launch.checkpoints.stop_signal import SaveOnSignal

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
NOTHING: Any = None
WORKER = "tests.launch.checkpoints.stop_signal_worker"


@pytest.fixture(scope="module")
def jobs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all jobs, each of two processes; `NAME.statuses` has how they ended."""
    folder = tmp_path_factory.mktemp("stop_signal")
    for name, job in JOBS.items():
        common = {**ENVIRONMENT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(forking.free_port())}
        ranks = []
        for rank in "01":
            here = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if "nodes" in job else {"LOCAL_RANK": rank}
            words = [str(tiny_model), str(folder), name]
            ranks.append(forking.start(WORKER, words, cwd=ROOT, env={**common, "RANK": rank, **here}))
        (folder / f"{name}.statuses").write_text(json.dumps([rank.wait(120) for rank in ranks]))
    return folder


def ranks(folder: Path, name: str) -> list[dict[str, Any]]:
    results = [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(2)]
    assert [result["processes"] for result in results] == [2, 2]
    assert all(result["handler_is_back"] for result in results)
    return results


def statuses(folder: Path, name: str) -> list[int]:
    return list(json.loads((folder / f"{name}.statuses").read_text()))


def names(folder: Path) -> list[str]:
    beside = ("README.md", *(f"trl_grpo_ext_{name}" for name in ("log.jsonl", "plugins.json", "settings.json")))
    return sorted(path.name for path in folder.iterdir() if path.name not in beside)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_and_the_resumed_run_ends_as_the_straight_one(jobs: Path) -> None:
    assert statuses(jobs, "one_rank") == [143, 143]
    assert [result["step"] for result in ranks(jobs, "one_rank")] == [2, 2]
    assert statuses(jobs, "one_rank_resumed") == statuses(jobs, "straight") == [0, 0]
    assert [result["first"] for result in ranks(jobs, "one_rank_resumed")] == [2, 2]
    for file in ("weights-0.pt", "weights-1.pt"):
        assert same(torch.load(jobs / "straight" / file), torch.load(jobs / "one_rank" / file))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_stop_signal_with_a_rank_that_cannot_write(jobs: Path, rank: int) -> None:
    said = json.loads((jobs / f"rank_{rank}_full.{rank}").read_text())
    assert said["error"].startswith("checkpoint-2 could not be written to ")
    assert "Make room" in said["error"]
    assert statuses(jobs, f"rank_{rank}_full")[1 - rank] != 0  # the other one waited for it in vain
    assert {*names(jobs / f"rank_{rank}_full" / "output")} - {"_unfinished_checkpoint"} == {"checkpoint-1"}


@pytest.mark.slow
def test_the_best_checkpoint_is_named_by_its_final_place(jobs: Path) -> None:
    # Stopped: the evaluation of that step is left out, and transformers does not delete what was saved to go on from.
    stopped = ranks(jobs, "best_stopped")
    assert [result["evaluations"] for result in stopped] == [1, 1]
    assert names(jobs / "best_stopped" / "output") == ["checkpoint-1", "checkpoint-2"]
    for checkpoint in (jobs / "best_stopped" / "output").glob("checkpoint-*"):
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(jobs / "best_stopped" / "output" / "checkpoint-1")


@pytest.mark.slow
def test_two_machines_publish_once_for_each_disk(jobs: Path) -> None:
    assert statuses(jobs, "shared") == statuses(jobs, "apart") == [0, 0]
    assert names(jobs / "shared" / "output") == ["checkpoint-4"]
    for rank in range(2):
        assert names(jobs / "apart" / f"output-{rank}") == ["checkpoint-4"]
        assert (jobs / "apart" / f"output-{rank}" / "checkpoint-4" / f"rng_state_{rank}.pth").is_file()


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_ends(tiny_model: Path, tmp_path: Path) -> None:
    config = ROOT / "recipes" / "accelerate" / "cpu_2_processes.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["-m", WORKER, str(tiny_model), str(tmp_path), "launched"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log)
        output = tmp_path / "launched" / "output"
        deadline = time.monotonic() + 120
        while len([*output.glob("reached-*")]) < 2:
            assert process.poll() is None, (tmp_path / "log").read_text()[-5000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=60)
    assert status != 0
    first, second = ranks(tmp_path, "launched")
    assert (first["status"], first["step"]) == (second["status"], second["step"]) == (143, second["step"])
    assert [name for name in names(output) if not name.startswith("reached")] == [f"checkpoint-{first['step']}"]


def test_a_signal_inside_a_generation_batch_waits_for_its_end(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 6, "num_iterations": 3, "save_steps": 100}
    whole = make(tiny_model, tmp_path / "whole", **settings)
    whole.train()
    stopped = make(tiny_model, tmp_path / "stopped", **settings)
    stopped.add_callback(InSecondStep({"signalled": [0]}))
    stopped.train()
    assert (stopped.stopped_by_signal, stopped.state.global_step) == (signal.SIGTERM, 3)
    resumed = make(tiny_model, tmp_path / "stopped", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert same(resumed.model.state_dict(), whole.model.state_dict())


def test_stop_signal_after_the_last_step() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    stop = SaveOnSignal([signal.SIGUSR1])
    stop.on_train_begin(NOTHING, NOTHING, NOTHING)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert came == []
    stop.on_train_end(NOTHING, NOTHING, NOTHING)
    assert came == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_dies_of_the_signal() -> None:
    stop = SaveOnSignal([signal.SIGTERM])
    stop.on_train_begin(NOTHING, NOTHING, NOTHING)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, b".")
        time.sleep(30)
        os._exit(0)
    os.read(reads, 1)  # until then Python itself drops a signal that has a handler
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    stop.restore()


def test_an_error_in_training_puts_the_handler_back(tiny_model: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer = make(tiny_model, tmp_path)
    trainer.reward_funcs = [lambda **columns: 1 / 0]
    with pytest.raises(PluginRunError):
        trainer.train()
    assert signal.getsignal(signal.SIGTERM) == before
