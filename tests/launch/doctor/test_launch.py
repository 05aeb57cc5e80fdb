"""Launchers and launch files: the engine and processes that they mean, and keys that Accelerate takes silently."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.doctor.examining import EIGHT, SETTINGS, SETTINGS_ALONE, SLOW, errors, said
from trl_grpo_ext.launch.doctor.command import examine
from trl_grpo_ext.launch.doctor.launch import unknown_keys

pytestmark = pytest.mark.usefixtures("here")


def test_unknown_keys_have_near_ones(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("deepspeed_config: {zero_stage: 3}\nfsdp_config: {fsdp_version: 2, version: 2}\nnum_processes: 8")
    assert unknown_keys(str(file)) == []
    file.write_text("fsdp_config: {cpu_ram_eficient_loading: 1}")
    (problem,) = unknown_keys(str(file))
    assert "cpu_ram_eficient_loading" in problem.message
    assert "fsdp_cpu_ram_efficient_loading" in problem.fix


ZERO3 = {"zero_stage": 3, "zero3_init_flag": True, "gradient_accumulation_steps": 1}
DEEPSPEED = {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO3}
FSDP2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_eficient_loading": False}
FSDP = {"distributed_type": "FSDP", "fsdp_config": FSDP2}


@pytest.mark.parametrize(
    ("file", "words", "engine", "error"),
    [
        ({"distributed_type": "MULTI_GPU"}, ("--num_processes", "4"), "ddp, 4 processes", ""),
        pytest.param(DEEPSPEED, (), "zero3, 2 processes", "", marks=SLOW),
        pytest.param(FSDP, (), "fsdp2, 2 processes", "", marks=SLOW),
        pytest.param({"distributed_type": "NO"}, (), "one_process, 1 process", "asks for 2 processes, and", marks=SLOW),
        pytest.param({"distributed_type": "MULTI_GPU", "use_cpus": True}, (), "", "use_cpus", marks=SLOW),
    ],
    ids=["ddp", "zero3", "fsdp2", "NO for two", "unknown key"],
)
def test_examine_a_launch_file(file: dict[str, Any], words: tuple[str, ...], engine: str, error: str) -> None:
    Path("run.yaml").write_text(f"{SETTINGS}gradient_accumulation_steps: 4\n")
    usual = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, "num_machines": 1, "machine_rank": 0}
    usual |= {"main_training_function": "main", "mixed_precision": "bf16"}
    Path("launch.yaml").write_text(json.dumps({**usual, **file}))
    found = examine(["accelerate", "launch", "--config_file", "launch.yaml", *words, *SETTINGS_ALONE], EIGHT)
    assert [error in one for one in errors(found)] == [True] * bool(error), said(found)
    assert found.described.startswith(engine), said(found)
    if "fsdp_config" in file:
        assert "Did you mean 'fsdp_cpu_ram_efficient_loading'" in said(found)


@pytest.mark.slow
def test_examine_torchrun_and_trl() -> None:
    Path("run.yaml").write_text(f"{SETTINGS}torch_dtype: bfloat16\n")
    words = ["trl", "grpo", "--config", "run.yaml", "--dataset_name", "nobody/nothing", "--num_processes", "4"]
    words += ["--accelerate_config", "multi_gpu"]
    old = examine(words, EIGHT)
    assert ["unrecognized arguments: --torch_dtype" in one for one in errors(old)] == [True]
    assert "torch_dtype is dtype since" in said(old)
    Path("run.yaml").write_text(SETTINGS)
    trl = examine(words, EIGHT)
    assert trl.described.startswith("ddp, 4 processes"), said(trl)
    assert errors(trl) == []
    torch = examine(["torchrun", "--nproc_per_node", "2", "--nnodes", "2", *SETTINGS_ALONE], EIGHT)
    assert torch.described.startswith("ddp, 4 processes on 2 machines"), said(torch)
