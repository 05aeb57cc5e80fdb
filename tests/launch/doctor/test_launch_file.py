"""Launch files as Accelerate reads them, and what it would say too late, too little, or not at all."""

from pathlib import Path

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.launch.doctor.launch_file import LaunchPlan, read_launch_file

SHIPPED = Path(__file__).parents[3] / "recipes" / "accelerate"
HEAD = "compute_environment: LOCAL_MACHINE\nnum_machines: 1\nmachine_rank: 0\n"


def read(tmp_path: Path, text: str, **options: object) -> LaunchPlan:
    file = tmp_path / "launch.yaml"
    file.write_text(HEAD + text)
    return read_launch_file(file, **options)  # type: ignore[arg-type]


ENGINES = {  # of each shipped file: engine, processes and machines
    "one_process.yaml": ("one_process", 1, 1),
    "cpu_2_processes.yaml": ("ddp", 2, 1),
    "ddp.yaml": ("ddp", 8, 1),
    "zero2.yaml": ("zero2", 8, 1),
    "zero3.yaml": ("zero3", 8, 1),
    "zero3_offload.yaml": ("zero3", 8, 1),
    "fsdp2.yaml": ("fsdp2", 8, 1),
    "fsdp2_qlora.yaml": ("fsdp2", 8, 1),
    "nodes_zero3.yaml": ("zero3", 16, 2),
    "nodes_zero3_hpz.yaml": ("zero3", 16, 2),
    "nodes_fsdp2.yaml": ("fsdp2_hybrid", 16, 2),
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_shipped_files_are_what_they_are_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SHIPPED.parents[1])
    plan = read_launch_file(SHIPPED / name)
    assert (plan.engine, plan.processes, plan.machines) == ENGINES[name]
    assert {path.name for path in SHIPPED.iterdir()} == set(ENGINES)
    assert plan.problems == ()
    assert (plan.accumulation, plan.use_cpu) == (None, False)
    assert plan.offloads("optimizer") == plan.offloads("param") == ("offload" in name)


def test_the_launchers_command_line_beats_its_file() -> None:
    plan = read_launch_file(SHIPPED / "zero2.yaml", processes=4, machine_rank=1, rdzv_backend="c10d")
    assert (plan.processes, plan.machine_rank, plan.rdzv_backend) == (4, 1, "c10d")


def test_without_a_file_the_launcher_takes_every_gpu() -> None:
    plans = [read_launch_file(None, gpus=gpus) for gpus in (0, 1, 4)]
    assert [(plan.engine, plan.processes) for plan in plans] == [("one_process", 1), ("one_process", 1), ("ddp", 4)]


def test_a_json_file_of_deepspeed_decides_the_stage(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}},'
        ' "gradient_accumulation_steps": 3, "gradient_clipping": "auto"}'
    )
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\n"
    text += f"deepspeed_config: {{deepspeed_config_file: {tmp_path}/ds.json}}\n"
    plan = read(tmp_path, text)
    assert (plan.engine, plan.offloads("optimizer"), plan.offloads("param"), plan.accumulation) == (
        "zero1",
        True,
        False,
        3,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: DEEPSPEED\nnum_proceses: 2\n", "Accelerate cannot use .*num_proceses"),
        ("distributed_type: NO\n", 'YAML reads as false: write "NO" in quotes'),
        ("distributed_type: MULTI_GPU\nnum_processes: two\n", "num_processes .* got 'two'"),
        ("distributed_type: MULTI_GPU\n", "num_processes .* got -1"),
        ("distributed_type: SEVERAL_GPUS\nnum_processes: 2\n", "SEVERAL_GPUS"),
        ("num_processes: 2\n", "distributed_type"),
        ("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: true\n", "fsdp_config .* is True, not a mapping"),
        ("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 3}\n", "fsdp_version .* is 3"),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 4}\n", "ZeRO stage .* is 4"),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: gone.json}\n",
            "no file gone.json. Paths are relative to where you launch",
        ),
    ],
)
def test_what_the_launcher_would_refuse_is_refused_with_more_help(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read(tmp_path, text)


def test_a_sagemaker_file_is_not_ours(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\n")
    with pytest.raises(ConfigurationError):
        read_launch_file(file)


def test_keys_that_accelerate_ignores_without_a_word_are_told(tmp_path: Path) -> None:
    text = (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2, reshard_after_foward: true, hm: 1}\n"
    )
    typo, unlike = read(tmp_path, text).problems
    assert (typo.severity, typo.fix) == ("error", "Write 'fsdp_reshard_after_forward'.")
    assert "'reshard_after_foward'" in typo.message
    assert (unlike.severity, unlike.fix) == ("warning", "Take it out.")
