"""What of a launch file does not reach the launcher."""

from pathlib import Path
from types import SimpleNamespace

import yaml

from trl_grpo_ext.launch.doctor.launch import _ignored

AS_WRITTEN = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True},
    "distributed_type": "DEEPSPEED",
    "downcast_bf16": "no",
    "machine_rank": 0,
    "num_machines": 1,
    "num_processes": 8,
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "use_cpu": False,
}
"""A file as `accelerate config` writes it."""


def sentences(folder: Path, used: dict[str, object], **changed: object) -> list[str]:
    file = folder / "launch.yaml"
    file.write_text(yaml.safe_dump({**AS_WRITTEN, **changed}))
    launcher = {"zero_stage": 3, "zero3_init_flag": True, "downcast_bf16": False, "same_network": False}
    launcher |= {"num_machines": 1, "num_processes": 8, "tpu_env": [], "tpu_use_cluster": False}
    return [problem.message for problem in _ignored(str(file), SimpleNamespace(**{**launcher, **used}), ())]


def test_a_file_as_accelerate_writes_it_is_used_as_it_stands(tmp_path: Path) -> None:
    assert sentences(tmp_path, {}) == []


def test_a_key_that_does_not_reach_the_launcher_is_named(tmp_path: Path) -> None:
    (several,) = sentences(tmp_path, {"num_machines": 2}, num_machines=2)
    assert "same_network" in several
    (other,) = sentences(tmp_path, {"num_processes": 4})
    assert "num_processes: 8, and the launcher uses 4" in other
    (unknown,) = sentences(tmp_path, {}, num_proceses=8)
    assert "num_proceses" in unknown
