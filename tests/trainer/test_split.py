"""The same rollouts cut into micro-batches in different ways give the same gradient, for every aggregation by weights.

float64 weights (TRL's log-probabilities stay float32), plain SGD, two optimizer steps. TRL shuffles the generation
batch before it cuts it, so different cuts also meet different rows. Ranks are in `test_two_processes`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import relative_gap, train

CUTS = [(16, 1), (8, 2), (4, 4), (2, 8)]
"""Rows per micro-batch, accumulation."""


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"])
def test_gradient_does_not_depend_on_the_cut(tiny_model: Path, tmp_path: Path, aggregation: str, beta: float) -> None:
    runs = [
        train(
            tiny_model,
            tmp_path / f"{rows}x{accumulation}",
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            loss_aggregation=aggregation,
            beta=beta,
            max_steps=2,  # at the first step the policy is its reference and the KL penalty has no gradient
            prompt_count=8,
            dtype="float64",
            advantage_hooks=["leave_one_out", "entropy_shaping"],
        )
        for rows, accumulation in CUTS
    ]
    for run in runs[1:]:
        for step in (0, 1):
            assert relative_gap(run.gradients[step], runs[0].gradients[step]) < 1e-5


def test_the_local_token_mean_does_depend_on_it(tiny_model: Path, tmp_path: Path) -> None:
    whole, cut = (
        train(
            tiny_model,
            tmp_path / f"{rows}",
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=16 // rows,
            loss_aggregation="token_mean_local",
            max_steps=1,
        )
        for rows in (16, 2)
    )
    assert relative_gap(cut.gradients[0], whole.gradients[0]) > 0.05
