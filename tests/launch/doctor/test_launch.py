"""Keys of a launch file that Accelerate takes without a word."""

from pathlib import Path

from trl_grpo_ext.launch.doctor.launch import unknown_keys


def test_unknown_keys_have_near_ones(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("deepspeed_config: {zero_stage: 3}\nfsdp_config: {fsdp_version: 2, version: 2}\nnum_processes: 8")
    assert unknown_keys(str(file)) == []
    file.write_text("fsdp_config: {cpu_ram_eficient_loading: 1}")
    (problem,) = unknown_keys(str(file))
    assert "cpu_ram_eficient_loading" in problem.message
    assert "fsdp_cpu_ram_efficient_loading" in problem.fix
