"""What torch reads is set before a recipe imports it; at the end gloo's threads abort nothing, and Ctrl-C is a line."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forking
from tests.recipes.launching import RECIPES

RANK = """
import sys, time
from types import SimpleNamespace
import torch
from accelerate import Accelerator
from common.processes import leave

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
layer(torch.ones(3)).sum().backward()
accelerator.wait_for_everyone()
sys.setswitchinterval(1000)  # a thread that waits for the interpreter gets it only where this one lets go of it
for _ in range(50):  # nobody waits for these: the threads are the last to hold their tensors
    torch.distributed.all_gather([torch.empty(1000) for _ in range(2)], torch.ones(1000), async_op=True)
leave(SimpleNamespace(accelerator=accelerator))
"""


@pytest.mark.slow
def test_two_processes_end_without_an_abort(tmp_path: Path) -> None:
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(forking.free_port())}
    common |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(RECIPES)}
    ranks = []
    for rank in ("0", "1"):
        env = {**common, "RANK": rank, "LOCAL_RANK": rank}
        command = [sys.executable, "-c", RANK]
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


@pytest.mark.parametrize("script", sorted(RECIPES.glob("*_grpo.py")), ids=lambda path: path.stem)
def test_common_is_imported_before_torch(script: Path) -> None:
    imports = re.findall(r"^(?:from|import) (\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    others = [name for name in imports if name not in sys.stdlib_module_names]
    assert others[0] == "common", others


IMPORTING = ["-c", "import common, os, time; os.kill(os.getpid(), 2); time.sleep(60)"]
TRAINING = [str(RECIPES / "gsm8k_grpo.py"), "--embedded", "--per_device_train_batch_size", "8", "--logging_steps", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [IMPORTING, [*TRAINING, "--eval_problems", "128"]], ids=["importing", "training"])
def test_ctrl_c_is_one_line(words: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(RECIPES), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # nohup leaves it ignored
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=env, **pipes) as run:
        assert run.stdout is not None
        if words != IMPORTING:
            assert any("step    1" in line for line in run.stdout), run.communicate()[1]
            run.send_signal(signal.SIGINT)
        error = run.communicate(timeout=60)[1]
    assert error.strip().splitlines()[-1:] == ["interrupted"]
    assert "Traceback" not in error
    assert run.returncode == -signal.SIGINT  # 130 in a shell
