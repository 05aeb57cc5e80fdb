"""The metrics that show an aggregation's length bias, by hand."""

import pytest
import torch

from tests.contexts import make_rollout
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.credit.metrics import row_table, weight_metrics

LENGTHS = [1, 2, 3, 6]


def metrics_of(name: str, advantages: list[float], lengths: list[int] = LENGTHS) -> dict[str, float]:
    rollout = make_rollout(lengths, width=8)
    advantages_B_T = flow.expand_advantages(torch.tensor(advantages, dtype=torch.float64), rollout.mask_B_T)
    weights_B_T = flow.token_weights(load_loss_aggregation(name), rollout)
    return weight_metrics(row_table(weights_B_T, advantages_B_T, rollout.mask_B_T))


def test_a_token_mean_has_no_bias() -> None:
    metrics = metrics_of("token_mean", [1, -1, 1, -1])
    assert len(metrics) == 6
    assert metrics == pytest.approx(dict.fromkeys(metrics, 1.0))


def test_a_sequence_mean_favours_the_short_by_hand() -> None:
    # Twelve tokens with a total weight of 1: 1/12 on average. A completion's tokens have 1/4 over its length.
    metrics = metrics_of("seq_mean_token_mean", [1.0, 1.0, -1.0, -1.0])
    expected = {
        "loss_weight/length_q1": 12 / 4,
        "loss_weight/length_q2": 12 / 8,
        "loss_weight/length_q3": 12 / 12,
        "loss_weight/length_q4": 12 / 24,
        "loss_weight/positive_advantage": (1 / 2) / 3 * 12,  # half the weight on three tokens
        "loss_weight/negative_advantage": (1 / 2) / 9 * 12,
    }
    assert metrics == pytest.approx(expected, rel=1e-6)
