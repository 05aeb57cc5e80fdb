"""The Slurm script: what it starts on each node, and what it does on a signal. Slurm's commands are stand-ins."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from tests.recipes.config_objects import ROOT, commands
from tests.recipes.launching import RECIPES, environment

SBATCH = RECIPES / "slurm" / "gsm8k_nodes.sbatch"
STAND_INS = {
    "srun": 'echo "$@" >> "$CALLS/srun.calls"\n'
    '[[ $STATUS ]] && exit "$STATUS"\n'
    'trap "exit 143" USR2\n'
    'echo $$ > "$CALLS/srun_pid"\n'
    "while :; do sleep 0.1; done",
    "scontrol": 'echo "$@" >> "$CALLS/scontrol.calls"\nif [[ $1 == show ]]; then printf "127.0.0.1\\n127.0.0.2\\n"; fi',
    "scancel": 'echo "$@" >> "$CALLS/scancel.calls"\nkill -USR2 "$(cat "$CALLS/srun_pid")"',
}
"""With a STATUS, `srun` ends with it at once; else it waits for the signal of `scancel`, which here is SIGUSR2."""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes with four GPUs each."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = environment(tmp_path)
    env["PATH"] = os.pathsep.join([str(tmp_path), env["PATH"]])
    env |= {"SLURM_JOB_ID": "123", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    env |= {"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "7", "SLURM_SUBMIT_DIR": str(ROOT)}
    return env | {"CALLS": str(tmp_path), "STATUS": "", "VENV": "none", "OUTPUT": str(tmp_path / "output")}


def recorded(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.calls").read_text().splitlines()


def test_slurm_script_is_queued_again_after_a_signal(slurm: dict[str, str], tmp_path: Path) -> None:
    script = subprocess.Popen(["bash", str(SBATCH)], env=slurm)
    deadline = time.monotonic() + 60
    while not (tmp_path / "srun_pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(timeout=60) == 0
    assert recorded(tmp_path, "scancel") == ["--signal=TERM 123"]
    assert recorded(tmp_path, "scontrol")[-1] == "requeue 123"
    (tmp_path / "output" / "checkpoint-7").mkdir(parents=True)
    subprocess.run(["bash", str(SBATCH)], env=slurm | {"STATUS": "0"}, check=True)
    first, second = recorded(tmp_path, "srun")
    assert second == f"{first} --resume_from_checkpoint true"


def test_a_failed_job_is_not_queued_again(slurm: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(SBATCH)], env=slurm | {"STATUS": "3"}, check=False)
    assert done.returncode == 3
    assert recorded(tmp_path, "scontrol") == ["show hostnames node[1-2]"]


def test_the_slurm_script_asks_each_node_for_its_own_rank(slurm: dict[str, str], tmp_path: Path) -> None:
    subprocess.run(["bash", str(SBATCH), "--learning_rate", "5e-7"], env=slurm | {"STATUS": "0"}, check=True)
    (call,) = recorded(tmp_path, "srun")
    options, rest = call.split(" bash -c ")
    assert options.split() == ["--kill-on-bad-exit=1", "--cpus-per-task=7"]
    inner, launcher = rest.split(' "$@" launcher ')
    assert inner == 'exec accelerate launch --machine_rank "$SLURM_NODEID"'  # not yet expanded: each node's own
    args = launch_command_parser().parse_args(["--machine_rank", "1", *shlex.split(launcher)])
    assert (args.num_machines, args.num_processes, args.main_process_ip) == (2, 8, "127.0.0.1")
    assert args.main_process_port == 20000 + 123
    for file in (args.config_file, args.training_script, args.training_script_args[1]):
        assert (ROOT / file).is_file()
    assert args.training_script_args[-4:] == ["--processes", "8", "--learning_rate", "5e-7"]


def test_the_slurm_script_asks_for_a_signal_in_time() -> None:
    options = [line.split()[1] for line in SBATCH.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--ntasks-per-node=1", "--signal=B:USR1@300", "--requeue"} <= set(options)
    for command in commands(SBATCH):
        files = [value for word in command if (value := word.partition("=")[2] or word).startswith("recipes/")]
        assert str(SBATCH.relative_to(ROOT)) in files
        assert all((ROOT / file).is_file() for file in files)
