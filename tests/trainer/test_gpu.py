"""The same parity on a CUDA device, in the precision that people train in there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trl import GRPOTrainer

from tests.support import relative_gap, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none on this machine"),
]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_own_aggregation_gives_trls_gradient_under_bf16_autocast(
    tiny_model: Path, tmp_path: Path, loss_type: str
) -> None:
    settings = {"use_cpu": False, "bf16": True, "beta": 0.04, "max_steps": 1, "loss_type": loss_type}
    aggregation = {"dapo": "token_mean", "grpo": "seq_mean_token_mean"}[loss_type]
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, **settings)
    ours = train(tiny_model, tmp_path / "ext", loss_aggregation=aggregation, **settings)
    assert relative_gap(ours.gradients[0], theirs.gradients[0]) < 1e-2  # bf16 keeps three digits


def test_nothing_selected_is_trls(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"use_cpu": False, "bf16": True, "max_steps": 2}
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, **settings)
    ours = train(tiny_model, tmp_path / "ext", **settings)
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert all(torch.equal(our_step[name], their_step[name]) for name in their_step)
