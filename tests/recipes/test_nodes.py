"""The Slurm script: what it starts on each node, what it does on a signal, and, at night, one job on two launchers.

There is no Slurm here: `srun` is a stand-in of a few lines that starts the script's own command once for each node,
with the variables that Slurm sets. The launch file is the shipped one with less in it: two processes, and a threshold
under which ZeRO-3 would keep this tiny model whole.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from tests import forking
from tests.recipes.config_objects import ROOT, commands
from tests.recipes.launching import RECIPES, SMALL, environment, options

SBATCH = RECIPES / "slurm" / "gsm8k_nodes.sbatch"
NODES = RECIPES / "accelerate" / "nodes_zero3.yaml"

SRUN = """#!/bin/bash
# Stands in for Slurm's: the command once on each of two "nodes"; SIGUSR2 here is SIGTERM to them, as from scancel.
echo "$@" >> "$CALLS/srun.calls"
echo "$$" > "$CALLS/srun_pid"
[[ ${ONLY_RECORDED:-} ]] && exit "$ONLY_RECORDED"
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_NODES=2
pids=()
for node in 0 1; do
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" > "$CALLS/node$node.log" 2>&1 &
    pids+=($!)
done
trap 'kill -TERM "${pids[@]}"' USR2
status=0
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2> /dev/null; do
        wait "$pid" || status=$?
    done
done
exit "$status"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$CALLS/scontrol.calls"
if [[ $1 == show ]]; then printf '127.0.0.1\\n127.0.0.2\\n'; fi
"""
SCANCEL = """#!/bin/bash
echo "$@" >> "$CALLS/scancel.calls"
kill -USR2 "$(cat "$CALLS/srun_pid")"
"""


def small_nodes(folder: Path) -> Path:
    """`nodes_zero3.yaml` with two processes; ZeRO's settings are in JSON, since YAML cannot say the threshold."""
    settings: dict[str, Any] = yaml.safe_load(NODES.read_text())
    zero = settings["deepspeed_config"]
    follow = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    content: dict[str, Any] = dict.fromkeys(follow, "auto")
    content["zero_optimization"] = {
        "stage": zero.pop("zero_stage"),
        "stage3_gather_16bit_weights_on_model_save": zero.pop("zero3_save_16bit_model"),
        "stage3_param_persistence_threshold": 0,
    }
    content["bf16"] = {"enabled": "auto"}
    assert (zero.pop("offload_optimizer_device"), zero.pop("offload_param_device")) == ("none", "none")
    (folder / "zero.json").write_text(json.dumps(content))
    zero["deepspeed_config_file"] = str(folder / "zero.json")
    del settings["mixed_precision"]
    settings["num_processes"] = 2
    (folder / "nodes.yaml").write_text(yaml.safe_dump(settings))
    return folder / "nodes.yaml"


def words(**changes: Any) -> list[str]:
    """What the recipe is told: the embedded model in seconds, and a reward that meets the other rank."""
    found = ["--embedded", "--use_cpu", "--engine", "zero3", *options(**{**SMALL, "train_problems": 512, **changes})]
    return [*found, "--rewards", "gsm8k_accuracy", "{name: 'tests.recipes.spy:spy', weight: 0}"]


def assert_one_job(folder: Path) -> None:
    """Both ranks saw a sum over both, and each its own half of the completions."""
    seen = [[json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)]
    assert seen[0]
    for ranks in zip(*seen, strict=False):
        assert [(rank["world"], rank["sum"]) for rank in ranks] == [(2, 3.0)] * 2
        assert ranks[0]["prompts"] != ranks[1]["prompts"]


# ----------------------------------------------------------------------------------------------------- the Slurm script


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes with one GPU each, and stand-ins for Slurm's commands."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    while (port := forking.free_port()) not in range(20000, 40000):  # where the script puts its own
        pass
    return environment(tmp_path, SPY=str(tmp_path), PYTHONPATH=str(ROOT), DS_ACCELERATOR="cpu") | {
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "CALLS": str(tmp_path),
        "SLURM_JOB_ID": str(port - 20000),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "VENV": "none",
        "LAUNCH": str(small_nodes(tmp_path)),
        "CONFIG": str(RECIPES / "embedded" / "defaults.yaml"),
        "OUTPUT": str(tmp_path / "output"),
    }


def recorded(folder: Path, name: str) -> list[str]:
    file = folder / f"{name}.calls"
    return file.read_text().splitlines() if file.is_file() else []


@pytest.mark.nightly
def test_slurm_script_is_queued_again_after_a_signal(slurm: dict[str, str], tmp_path: Path) -> None:
    command = ["bash", str(SBATCH), *words(max_steps=100, save_steps=1000, logging_steps=1)]  # only a signal saves
    with (tmp_path / "sbatch.log").open("w") as log:
        script = subprocess.Popen(command, env=slurm, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while "2/100 " not in told(tmp_path, 10**6):
            assert script.poll() is None, told(tmp_path)
            assert time.monotonic() < deadline, told(tmp_path)
            time.sleep(0.3)
        script.send_signal(signal.SIGUSR1)
        status = script.wait(timeout=200)
    finally:
        script.kill()
    assert_one_job(tmp_path)
    assert recorded(tmp_path, "scancel") == [f"--signal=TERM {slurm['SLURM_JOB_ID']}"]
    assert recorded(tmp_path, "scontrol")[-1] == f"requeue {slurm['SLURM_JOB_ID']}"
    assert status == 0
    (last,) = (tmp_path / "output").glob("checkpoint-*")
    assert f"SIGTERM: saved {last.name} in" in told(tmp_path)
    assert json.loads((last / "trainer_state.json").read_text())["global_step"] < 100
    assert len(list(last.glob("global_step*/*optim_states.pt"))) == 2  # a shard of the optimizer from each node

    again = subprocess.run(command, env=slurm | {"ONLY_RECORDED": "0"}, check=False)
    assert again.returncode == 0
    first, second = recorded(tmp_path, "srun")
    assert second.split("gsm8k_grpo.py")[0] == first.split("gsm8k_grpo.py")[0]
    assert "--resume_from_checkpoint true" in second
    assert "--resume_from_checkpoint" not in first


def told(folder: Path, last: int = 2500) -> str:
    files = [folder / name for name in ("sbatch.log", "node0.log", "node1.log")]
    return "\n".join(f"== {file.name}\n{file.read_text()[-last:]}" for file in files if file.is_file())


def test_a_failed_job_is_not_queued_again(slurm: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(SBATCH)], env=slurm | {"ONLY_RECORDED": "3"}, check=False)
    assert done.returncode == 3
    assert recorded(tmp_path, "scontrol") == ["show hostnames node[1-2]"]


def test_the_slurm_script_asks_each_node_for_its_own_rank(slurm: dict[str, str], tmp_path: Path) -> None:
    more = {"ONLY_RECORDED": "0", "SLURM_CPUS_PER_TASK": "7", "SLURM_GPUS_ON_NODE": "4"}
    del slurm["LAUNCH"], slurm["CONFIG"]
    subprocess.run(["bash", str(SBATCH), "--learning_rate", "5e-7"], env=slurm | more, check=True)
    (call,) = recorded(tmp_path, "srun")
    options, rest = call.split(" bash -c ")
    assert options.split() == ["--kill-on-bad-exit=1", "--cpus-per-task=7"]
    inner, launcher = rest.split(' "$@" launcher ')
    assert inner == 'exec accelerate launch --machine_rank "$SLURM_NODEID"'  # not yet expanded: each node's own
    args = launch_command_parser().parse_args(["--machine_rank", "1", *shlex.split(launcher)])
    assert (args.num_machines, args.num_processes, args.main_process_ip) == (2, 8, "127.0.0.1")
    assert args.main_process_port == 20000 + int(slurm["SLURM_JOB_ID"]) % 20000
    for file in (args.config_file, args.training_script, args.training_script_args[1]):
        assert (ROOT / file).is_file()
    assert args.training_script_args[-4:] == ["--processes", "8", "--learning_rate", "5e-7"]


def test_the_slurm_script_parses_and_asks_for_a_signal_in_time() -> None:
    assert subprocess.run(["bash", "-n", str(SBATCH)], check=False).returncode == 0
    options = [line.split()[1] for line in SBATCH.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--ntasks-per-node=1", "--signal=B:USR1@300", "--requeue"} <= set(options)
    for command in commands(SBATCH):
        files = [value for word in command if (value := word.partition("=")[2] or word).startswith("recipes/")]
        assert str(SBATCH.relative_to(ROOT)) in files
        assert all((ROOT / file).is_file() for file in files)
