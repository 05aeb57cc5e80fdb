"""With no plugin selected the trainer is TRL's: the same losses, gradients, metrics and weights, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.support import train
from trl_grpo_ext import GRPOExtTrainer

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation, two iterations, KL": {"gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.04},
    "sequence ratios, entropy bonus": {"importance_sampling_level": "sequence", "entropy_coef": 0.01},
    "evaluation in between": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_three_steps_are_trls_to_the_bit(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    # Nothing is scripted: the completions are sampled, so even the random numbers drawn have to be the same.
    from tests.support import prompts

    common: dict[str, Any] = {"scripted": False, "max_steps": 3, "prompt_count": 8, **settings}
    if "eval_strategy" in settings:
        common["trainer_arguments"] = {"eval_dataset": prompts(2)}
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, **common)
    ours = train(tiny_model, tmp_path / "ext", GRPOExtTrainer, **common)

    assert len(theirs.gradients) == 3
    assert ours.logs == theirs.logs
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert our_step.keys() == their_step.keys()
        assert any(bool(gradient.any()) for gradient in their_step.values())
        assert all(torch.equal(our_step[name], their_step[name]) for name in their_step)
    assert all(torch.equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)
