"""What a trainer does with a real `vllm serve` on the CPU while it answers and when it dies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient

from tests.support import Run, relative_gap, train
from tests.vllm import needs_vllm, saved
from tests.vllm.test_colocated import SELECTED, OurTrainer, Truncated

needs_vllm()

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def _weights_through_a_file(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    """Only the transport: what is sent, and when, stays TRL's."""

    def update(client: VLLMClient, metadata: list[Any], named: Iterator[tuple[str, torch.Tensor]]) -> None:
        asked = saved(model, tmp_path / "weights", named)
        client.session.post(f"{client.base_url}/collective_rpc", json=asked).raise_for_status()

    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", update)


class TheirsReplayed(GRPOTrainer):
    """TRL's, with what the server answered to ours: it numbers its requests, so it never answers the same again."""

    answers: Iterator[Any]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.vllm_generation.generate = lambda *arguments, **keywords: next(self.answers)


def run(model: Path, folder: Path, server: str, trainer_class: type = OurTrainer, **settings: Any) -> Run:
    given = {"dtype": "float64", "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server, **settings}
    return train(model, folder, trainer_class, scripted=False, **given)


def test_a_training_through_the_server(model: Path, tmp_path: Path, server: Any) -> None:
    hook = Truncated()
    both = {"max_steps": 3, "learning_rate": 0.2}
    ours = run(model, tmp_path / "ours", server.url, **both, trainer_arguments={"advantage_hooks": [hook]})
    gaps = [float((r.old_logps_B_T - r.sampling_logps_B_T)[r.mask_B_T.bool()].abs().mean()) for r in hook.seen]
    assert len(gaps) == 3
    assert max(gaps) < 0.1  # the weights of every step arrived: three steps change far more
    for settings in ({}, SELECTED["all of it"]):
        found = run(model, tmp_path / "found", server.url, **both, **settings)
        TheirsReplayed.answers = iter(found.trainer.answers)
        theirs = run(model, tmp_path / "theirs", server.url, TheirsReplayed, **both)
        assert relative_gap(found.weights, theirs.weights) < 1e-6
        assert relative_gap(found.weights, ours.weights) > 1e-3  # the server drew others


def test_a_server_that_dies(model: Path, tmp_path: Path, server: Any) -> None:
    def kill(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        server.kill()
        return [float(ids[0] % 7) for ids in completion_ids]

    with pytest.raises(OSError, match="Connection refused"):  # after TRL's five attempts, a minute
        run(model, tmp_path, server.url, reward_funcs=kill)
