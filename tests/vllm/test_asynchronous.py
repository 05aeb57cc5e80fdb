"""TRL's asynchronous trainer with plugins, sampling with a real `vllm serve` on the CPU.

TRL sends weights over NCCL alone; here they go through a file. The rest of the worker, and of what it asks the server,
is TRL's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from safetensors.torch import save_file

from tests.vllm import needs_vllm

needs_vllm()

from tests.asynchronous.support import NoTransfer, train, without_cuda  # noqa: E402
from tests.vllm.test_served import ARGUMENTS, Server, serving  # noqa: E402

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server") / "said", *ARGUMENTS) as server:
        yield server


class ThroughAFile(NoTransfer):
    """The server reads what the trainer wrote."""

    def __init__(self, url: str, model: Path, folder: Path) -> None:
        self.url, self.model, self.folder = url, model, folder

    def send_weights(self, iterator: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text((self.model / "config.json").read_text())
        save_file({name: tensor.contiguous() for name, tensor in iterator}, self.folder / "model.safetensors")
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        requests.post(f"{self.url}/collective_rpc", json=asked, timeout=60).raise_for_status()
        self.sent += 1


def test_a_training(model: Path, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    transfer = ThroughAFile(server.url, model, tmp_path / "weights")
    plugins = {"advantage_hooks": ["prefix_tree"], "loss_aggregation": "seq_mean_token_mean", "group_filter": "signal"}
    of_server = {"worker_class": None, "weight_transfer": transfer, "vllm_server_base_url": server.url}
    small = {"max_steps": 4, "learning_rate": 0.1, "max_inflight_tasks": 8, "max_staleness": 1}
    found = train(model, tmp_path, given=plugins, **of_server, **small)
    logs = [log for log in found.logs if "loss" in log]
    assert transfer.sent == 5  # before the first step, and after each
    assert logs[0]["kl"] < 1e-3  # the sampler's log-probabilities are the model's
    assert max(log["kl"] for log in logs) < 0.3  # and follow it, a step or two behind
    assert all(log["advantage/prefix_tree/mass_moved"] > 0 for log in logs)
