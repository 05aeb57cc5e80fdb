"""Parity in the precision and with the checkpointing that every shipped run file has: bfloat16 on the CPU.

In bfloat16 a sum depends on its order, so two ways to the same gradient differ. How far they may is measured: TRL's own
gradient in float32 is as far from TRL's in bfloat16 as rounding takes it. An aggregation and what is not selected
change nothing, to the bit. Compact updates cut the rows differently, so they round differently: as far from float32 as
TRL is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from tests.support import Run, relative_gap, train
from tests.trainer.compact.runs import COMMON
from tests.trainer.launch import launch
from tests.trainer.process_worker import Job, uneven_rollout
from trl_grpo_ext import GRPOExtTrainer

pytestmark = pytest.mark.slow

MODES: dict[str, dict[str, Any]] = {
    "autocast": {"bf16": True},
    "bfloat16 weights": {"bf16": True, "dtype": "bfloat16"},
    "autocast, checkpointing": {"bf16": True, "gradient_checkpointing": True},
    "bfloat16 weights, reentrant checkpointing": {
        "bf16": True,
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


def trained(model: Path, folder: Path, trainer_class: type, lora: bool = False, **settings: Any) -> Run:
    more: dict[str, Any] = {"rollout_func": uneven_rollout}
    if lora:
        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)  # the adapters' weights
    found = {**COMMON, "beta": 0.04, "max_steps": 1, **settings}
    return train(model, folder, trainer_class, **found, trainer_arguments=more)


def gap(ours: Run, theirs: Run) -> float:
    return relative_gap(ours.gradients[0], theirs.gradients[0])


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_within_bfloat16s_own_noise(tiny_model: Path, tmp_path: Path, mode: Mapping[str, Any], lora: bool) -> None:
    exact = trained(tiny_model, tmp_path / "float32", GRPOTrainer, lora)
    theirs = trained(tiny_model, tmp_path / "trl", GRPOTrainer, lora, **mode)
    noise = gap(theirs, exact)
    assert noise > 1e-3, "bfloat16 is on"
    for selected in ({}, {"loss_aggregation": "token_mean"}):
        ours = trained(tiny_model, tmp_path / "ours", GRPOExtTrainer, lora, **mode, **selected)
        assert gap(ours, theirs) == 0.0, selected
    compact = trained(tiny_model, tmp_path / "compact", GRPOExtTrainer, lora, **mode, compact_updates="exact")
    assert gap(compact, exact) < 1.5 * noise
    assert 0 < gap(compact, theirs) < 2 * noise, "two errors of one size, in other directions"


def test_two_ranks_within_bfloat16s_own_noise(tiny_model: Path, tmp_path: Path) -> None:
    job: Job = {**COMMON, "uneven": True, "beta": 0.04, "max_steps": 1, "reward_funcs": None, "quiet_rank": True}
    jobs: dict[str, Job] = {"float32": {**job, "stock": True}, "trl": {**job, "stock": True, "bf16": True}}
    jobs["compact"] = {**job, "bf16": True, "compact_updates": "exact", "gradient_checkpointing": True}
    jobs["aggregation"] = {**job, "bf16": True, "loss_aggregation": "token_mean"}
    for rank in launch(jobs, tiny_model, tmp_path):
        exact, theirs, compact, aggregation = (rank[name]["gradients"][0] for name in jobs)
        noise = relative_gap(theirs, exact)
        assert noise > 1e-3
        assert relative_gap(aggregation, theirs) == 0.0
        assert relative_gap(compact, exact) < 1.5 * noise
        assert 0 < relative_gap(compact, theirs) < 2 * noise
