"""Trainings that sample with vLLM on the CPU, in the environment of `make vllm`."""

from importlib.util import find_spec
from typing import Any

import pytest

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
