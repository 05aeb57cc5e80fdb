"""Whose name is it: ours are few and refused elsewhere, so a user's trainer may use every other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import length_reward, prompts, train
from trl_grpo_ext import GRPOExtMixin, GRPOExtTrainer, load_rewards
from trl_grpo_ext.errors import is_out_of_memory
from trl_grpo_ext.trainer import mixin, upstream
from trl_grpo_ext.trainer.batch import BatchKeys
from trl_grpo_ext.trainer.own_loss import try_out


def test_the_table_of_the_adapter_is_what_it_overrides() -> None:
    assert GRPOExtMixin.__mro__ == (GRPOExtMixin, object)
    assert not {name for name in vars(GRPOExtTrainer) if not name.startswith("__")}
    own = {name for name in vars(GRPOExtMixin) if name == "__init__" or not name.startswith("__")}
    rows = [row.split("|")[1] for row in (mixin.__doc__ or "").splitlines() if row.startswith("| `")]
    overridden = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    public = {name for name in own if isinstance(vars(GRPOExtMixin)[name], property)}
    assert own - overridden == public
    assert overridden - {"__init__"} == upstream.METHODS.keys() - upstream.CALLED


def test_every_key_of_ours_says_whose_it_is() -> None:
    keys = [value for name, value in vars(BatchKeys).items() if not name.startswith("__")]
    assert len(set(keys)) == len(keys) >= 8
    assert all(key.startswith("trl_grpo_ext_") for key in keys)


@pytest.mark.parametrize("given", ["rewards", "pass_at_k", "nothing"])
def test_phases_are_timed_wherever_anything_of_ours_is_used(tiny_model: Path, tmp_path: Path, given: str) -> None:
    rewards: Any = load_rewards(["think_format"]) if given == "rewards" else length_reward
    settings: dict[str, Any] = {}
    if given == "pass_at_k":
        settings = {"pass_at_k": [1], "pass_thresholds": {"length_reward": 0.5}}
    data = {"eval_dataset": prompts(2)} if given == "pass_at_k" else {}
    run = train(tiny_model, tmp_path, reward_funcs=rewards, max_steps=1, trainer_arguments=data, **settings)
    timed = [name for log in run.trainer.state.log_history for name in log if name.startswith("time/")]
    assert bool(timed) == (given != "nothing")


def test_out_of_memory_says_nothing_about_a_loss() -> None:
    inputs = {"completion_mask": torch.ones(2, 3), "advantages": torch.ones(2)}

    def full(batch: dict[str, Any], forward_pass: Any) -> torch.Tensor:
        logps_B_T, *_ = forward_pass()
        if batch["advantages"].dim() == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return -(logps_B_T * batch["advantages"].unsqueeze(1)).sum()

    with pytest.raises(torch.OutOfMemoryError):
        try_out(inputs, full, full)
    assert is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("The size of tensor a (3) must match the size of tensor b (2)"))
