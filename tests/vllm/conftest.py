"""One engine of vLLM for all trainings of a file, on the CPU."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import pytest

from tests.support import save_tiny_model, train
from tests.vllm import COLOCATED


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with heads of a size that vLLM's attention knows."""
    return save_tiny_model(tmp_path_factory.mktemp("model_for_vllm"), head_dim=32)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The engine that every trainer of the file gets; each loads its own weights into it before it samples.

    It draws from torch's random numbers, which TRL seeds when a trainer is built. Starting it draws some too, so it is
    started for a trainer that nobody looks at.
    """
    from trl.generation import vllm_generation

    start, started = vllm_generation.LLM, []

    def only(**settings: Any) -> Any:
        if not started:
            started.append(start(**settings, enforce_eager=True))
        return started[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_generation, "LLM", only)
        train(model, tmp_path_factory.mktemp("first"), scripted=False, max_steps=1, **COLOCATED)
        yield started[0]
