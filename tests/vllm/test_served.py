"""A real `vllm serve` on the CPU, and what a trainer does with it while it answers, pauses, is not there and dies.

TRL sends weights over NCCL alone. Here they go through a file and `/collective_rpc`; everything else is TRL's.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient

from tests.support import Run, relative_gap, train
from tests.vllm import needs_vllm
from tests.vllm.test_colocated import SELECTED, Sampling, Truncated

needs_vllm()

from trl_grpo_ext import GRPOExtTrainer  # noqa: E402

pytestmark = pytest.mark.nightly

ARGUMENTS = ["--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs"]
ARGUMENTS += ["--max-logprobs", "-1", "--max-model-len", "96"]


@dataclass
class Server:
    """The server's first process, and where it listens."""

    process: subprocess.Popen[str]
    url: str

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)  # its engine has a process of its own


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serving(model: Path, said: Path, *arguments: str) -> Iterator[Server]:
    """`vllm serve` while inside; what it prints goes to the file `said`."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--gpu-memory-utilization", "0.15", "--enforce-eager", *arguments]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    with said.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
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
            found.signal(signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server") / "said", *ARGUMENTS) as server:
        yield server


@pytest.fixture(autouse=True)
def _weights_through_a_file(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    """Only the transport: what is sent, and when, stays TRL's."""

    def update(client: VLLMClient, metadata: list[Any], named: Iterator[tuple[str, torch.Tensor]]) -> None:
        folder = tmp_path / "weights"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text((model / "config.json").read_text())
        save_file({name: tensor.contiguous() for name, tensor in named}, folder / "model.safetensors")
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        client.session.post(f"{client.base_url}/collective_rpc", json=asked).raise_for_status()

    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", update)


class Served(Sampling, GRPOExtTrainer):
    """Ours, watched."""


class TheirsReplayed(GRPOTrainer):
    """TRL's, with what the server answered to ours: it numbers its requests, so it never answers the same again."""

    answers: Iterator[Any]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.vllm_generation.generate = lambda *arguments, **keywords: next(self.answers)


def run(model: Path, folder: Path, server: str, trainer_class: type = Served, **settings: Any) -> Run:
    given = {"dtype": "float64", "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server, **settings}
    return train(model, folder, trainer_class, scripted=False, **given)


def replayed(model: Path, folder: Path, server: str, ours: Run, **settings: Any) -> Run:
    TheirsReplayed.answers = iter(ours.trainer.answers)
    return run(model, folder, server, TheirsReplayed, **settings)


def test_a_training_through_the_server(model: Path, tmp_path: Path, server: Server) -> None:
    hook = Truncated()
    both = {"max_steps": 3, "learning_rate": 0.2}
    ours = run(model, tmp_path / "ours", server.url, **both, trainer_arguments={"advantage_hooks": [hook]})
    gaps = [float((r.old_logps_B_T - r.sampling_logps_B_T)[r.mask_B_T.bool()].abs().mean()) for r in hook.seen]
    assert len(gaps) == 3
    assert max(gaps) < 0.1  # the weights of every step arrived: three steps change far more
    for settings in ({}, SELECTED["all of it"]):
        found = run(model, tmp_path / "found", server.url, **both, **settings)
        theirs = replayed(model, tmp_path / "theirs", server.url, found, **both)
        assert relative_gap(found.weights, theirs.weights) < 1e-6
        assert relative_gap(found.weights, ours.weights) > 1e-3  # the server drew others


def test_a_server_that_dies(model: Path, tmp_path: Path, server: Server) -> None:
    def kill(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        server.signal(signal.SIGKILL)
        return [float(ids[0] % 7) for ids in completion_ids]

    with pytest.raises(OSError, match="Connection refused"):  # after TRL's five attempts, a minute
        run(model, tmp_path, server.url, reward_funcs=kill)
