"""The same parity on a CUDA device, in the precision that people train in there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.support import length_reward, relative_gap, train
from tests.trainer.process_worker import vowels
from tests.trainer.test_chains import EXAMPLES, WITH_SHAPERS
from trl_grpo_ext import available

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none on this machine"),
]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_aggregation_under_autocast(tiny_model: Path, tmp_path: Path, loss_type: str) -> None:
    settings = {"use_cpu": False, "bf16": True, "beta": 0.04, "max_steps": 1, "loss_type": loss_type}
    aggregation = {"dapo": "token_mean", "grpo": "seq_mean_token_mean"}[loss_type]
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, **settings)
    ours = train(tiny_model, tmp_path / "ext", loss_aggregation=aggregation, **settings)
    assert relative_gap(ours.gradients[0], theirs.gradients[0]) < 1e-2  # bf16 keeps three digits


def test_nothing_selected_is_trls(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"use_cpu": False, "bf16": True, "max_steps": 2}
    theirs, again = (train(tiny_model, tmp_path / name, GRPOTrainer, **settings) for name in ("trl", "again"))
    ours = train(tiny_model, tmp_path / "ext", **settings)
    for our_step, their_step, same in zip(ours.gradients, theirs.gradients, again.gradients, strict=True):
        # To the bit, where the GPU repeats itself to the bit: some kernels add up in any order.
        assert relative_gap(our_step, their_step) <= 10 * relative_gap(same, their_step)


HOOKS = {name: {"hooks": hooks} for name, hooks in {**EXAMPLES, **WITH_SHAPERS}.items()}
AGGREGATIONS = {info.name: {"loss_aggregation": info.name} for info in available("loss_aggregation") if info.builtin}


@pytest.mark.parametrize("plugin", [*HOOKS.values(), *AGGREGATIONS.values()], ids=[*HOOKS, *AGGREGATIONS])
def test_plugins_train_as_on_the_cpu(tiny_model: Path, tmp_path: Path, plugin: dict[str, Any]) -> None:
    settings: dict[str, Any] = {
        "beta": 0.04,
        "max_steps": 1,
        "num_iterations": 2,  # `future_kl` is refused where the policy never moves
        "reward_funcs": [length_reward, vowels],
        **plugin,
    }
    on_cpu = train(tiny_model, tmp_path / "cpu", **settings)
    on_gpu = train(tiny_model, tmp_path / "gpu", use_cpu=False, **settings)
    gradients = [{n: g.cpu() for n, g in run.gradients[0].items()} for run in (on_gpu, on_cpu)]
    assert relative_gap(*gradients) < 1e-3
