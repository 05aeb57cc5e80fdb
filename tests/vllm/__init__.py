"""Trainings that sample with vLLM on the CPU, in the environment of `make vllm`."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

COLOCATED: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.15,  # of the machine's memory, on the CPU
    "vllm_max_model_length": 96,
}


def needs_vllm() -> None:
    """Skip the whole file where vLLM is not installed."""
    if find_spec("vllm") is None:
        pytest.skip("needs vLLM: `make vllm` makes an environment that has it", allow_module_level=True)


def saved(model: Path, folder: Path, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Write weights to a file, since TRL sends them over NCCL alone, and what to ask the server."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((model / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in named}, folder / "model.safetensors")
    return {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
