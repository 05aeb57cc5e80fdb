"""Keys of a launch file that Accelerate takes without a word."""

from pathlib import Path

import yaml

from trl_grpo_ext.launch.doctor.launch import unknown_keys


def test_unknown_keys_have_near_ones(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    known = {"deepspeed_config": {"zero_stage": 3}, "fsdp_config": {"fsdp_version": 2, "version": 2}}
    file.write_text(yaml.safe_dump({**known, "num_processes": 8}))
    assert unknown_keys(str(file)) == []
    file.write_text(yaml.safe_dump({**known, "fsdp_config": {"cpu_ram_eficient_loading": 1}}))
    (problem,) = unknown_keys(str(file))
    assert "cpu_ram_eficient_loading" in problem.message
    assert "fsdp_cpu_ram_efficient_loading" in problem.fix
