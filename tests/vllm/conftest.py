"""One engine of vLLM for all trainings of a file, in this process or in a server, on the CPU."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import pytest

from tests.forking import free_port
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


@dataclass
class Server:
    """The server's first process, and where it listens."""

    process: subprocess.Popen[bytes]
    url: str

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # its engine has a process of its own


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`vllm serve`, once it answers."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--gpu-memory-utilization", "0.15", "--enforce-eager"]
    command += ["--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs"]
    command += ["--max-logprobs", "-1", "--max-model-len", "96"]
    said = tmp_path_factory.mktemp("server") / "said"
    with said.open("w") as out:
        how: dict[str, Any] = {"stdout": out, "stderr": out, "start_new_session": True}
        process = subprocess.Popen(command, env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"}, **how)
    found = Server(process, f"http://127.0.0.1:{port}")
    try:
        while True:
            assert process.poll() is None, said.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{found.url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield found
    finally:
        with suppress(ProcessLookupError):
            found.kill()
        process.wait()
