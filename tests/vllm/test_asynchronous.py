"""TRL's asynchronous trainer with plugins, sampling with a real `vllm serve` on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import requests

from tests.vllm import needs_vllm, saved

needs_vllm()

from tests.asynchronous.support import NoTransfer, train, without_cuda  # noqa: E402

pytestmark = pytest.mark.nightly


class ThroughAFile(NoTransfer):
    """The server reads what the trainer wrote."""

    def __init__(self, url: str, model: Path, folder: Path) -> None:
        self.url = url
        self.model = model
        self.folder = folder

    def send_weights(self, iterator: Any) -> None:
        asked = saved(self.model, self.folder, iterator)
        requests.post(f"{self.url}/collective_rpc", json=asked, timeout=60).raise_for_status()
        self.sent += 1


def test_a_training(model: Path, tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
