"""`vllm_colocate.yaml` by `accelerate launch`, with what a CPU and the tiny model need: it trains and ends cleanly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.launching import MODEL, RECIPES, SMALL
from tests.vllm import COLOCATED, needs_vllm

needs_vllm()

pytestmark = pytest.mark.nightly

ON_THE_CPU = {
    "embedded": True,
    "model_name_or_path": MODEL,
    "use_cpu": True,
    "bf16": False,
    "vllm_enable_sleep_mode": False,
    **COLOCATED,
    "vllm_max_model_length": 256,
    "max_completion_length": 24,
    **SMALL,
    "gradient_accumulation_steps": 1,
}


@pytest.mark.parametrize(
    ("file", "engine", "processes"), [("one_process", "one_process", 1), ("cpu_2_processes", "ddp", 2)]
)
def test_the_run_file_trains_and_ends_cleanly(tmp_path: Path, file: str, engine: str, processes: int) -> None:
    from vllm import __version__

    settings = {**ON_THE_CPU, "engine": engine, "processes": processes, "output_dir": tmp_path}
    command = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    command += ["--config_file", f"{RECIPES}/accelerate/{file}.yaml"]
    command += [f"{RECIPES}/gsm8k_grpo.py", "--config", f"{RECIPES}/configs/vllm_colocate.yaml"]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    # The second is vLLM's own: without compiling, which takes longer than all the rest.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_CI_ENV": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)  # TRL's, for an engine in this process
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert f"{processes} process(es)" in done.stdout
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    manifest = json.loads((tmp_path / "trl_grpo_ext_plugins.json").read_text())
    assert metrics["versions"]["vllm"] == manifest["versions"]["vllm"] == "0.31.0+cpu"
    assert __version__.startswith("0.31.0")
    assert any("sampling/sampling_logp_difference/mean" in log for log in metrics["history"])
