"""Keys of a launch file that Accelerate takes without a word."""

from pathlib import Path

import pytest
import yaml

from trl_grpo_ext.launch.doctor.launch import unknown_keys


@pytest.mark.parametrize(
    ("section", "key", "near"),
    [
        ("deepspeed_config", "zero3_init_flg", "zero3_init_flag"),
        ("fsdp_config", "cpu_ram_eficient_loading", "fsdp_cpu_ram_efficient_loading"),
        ("parallelism_config", "parallelism_config_dp_replicate", "parallelism_config_dp_replicate_size"),
    ],
)
def test_unknown_keys_have_near_ones(tmp_path: Path, section: str, key: str, near: str) -> None:
    file = tmp_path / "launch.yaml"
    known = {"deepspeed_config": {"zero_stage": 3}, "fsdp_config": {"fsdp_version": 2, "version": 2}}
    file.write_text(yaml.safe_dump({**known, "num_processes": 8}))
    assert unknown_keys(str(file)) == []
    file.write_text(yaml.safe_dump({**known, section: {key: 1}}))
    (problem,) = unknown_keys(str(file))
    assert key in problem.message
    assert near in problem.fix
