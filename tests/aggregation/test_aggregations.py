"""Every built-in aggregation against values worked out by hand and against a slow loop over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import make_rollout, mask_of, padded
from trl_grpo_ext import load_loss_aggregation, pipeline
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError

LOSSES = [[1.0, 3.0], [2.0, 2.0, 0.0, 4.0], [6.0]]
"""Three completions of 2, 4 and 1 tokens: 7 tokens, token sums 4, 8, 6, token means 2, 2, 6."""

BY_HAND = {
    "token_mean": 18 / 7,
    "token_mean_local": 18 / 7,  # one micro-batch holds them all
    "seq_mean_token_mean": (2 + 2 + 6) / 3,
    "seq_mean_token_sum": (4 + 8 + 6) / 3,
    "constant_length": (4 + 8 + 6) / (3 * 8),
}
WEIGHT_TYPE = sorted(set(BY_HAND) - {"token_mean_local"})


def value_of(name: str, losses: list[list[float]], width: int | None = None, limit: int = 8) -> torch.Tensor:
    aggregation = load_loss_aggregation(name)
    rollout = make_rollout([len(row) for row in losses], width=width, limit=limit)
    loss_B_T = padded(losses, rollout.mask_B_T.size(1))
    if hasattr(aggregation, "weights"):
        return (pipeline.token_weights(aggregation, rollout) * loss_B_T).sum()
    return pipeline.reduced_loss(aggregation, loss_B_T, rollout.mask_B_T, rollout.totals)


def slow(name: str, losses: list[list[float]], limit: int) -> float:
    tokens, total = sum(len(row) for row in losses), sum(sum(row) for row in losses)
    if name in ("token_mean", "token_mean_local"):
        return total / max(tokens, 1)
    if name == "seq_mean_token_mean":
        return sum(sum(row) / len(row) for row in losses if row) / len(losses)
    return total / (len(losses) * (limit if name == "constant_length" else 1))


@pytest.mark.parametrize(("name", "expected"), BY_HAND.items())
def test_by_hand(name: str, expected: float) -> None:
    assert value_of(name, LOSSES).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", BY_HAND)
@given(
    losses=st.lists(st.lists(st.floats(-10, 10), max_size=5), min_size=1, max_size=6),
    padding=st.integers(0, 3),
    limit=st.integers(5, 9),
)
@settings(max_examples=60, deadline=None)
def test_equals_a_loop_over_tokens_whatever_the_padding(
    name: str, losses: list[list[float]], padding: int, limit: int
) -> None:
    width = max(1, *(len(row) for row in losses)) + padding if len(losses) > 1 else max(1, len(losses[0])) + padding
    assert value_of(name, losses, width, limit).item() == pytest.approx(slow(name, losses, limit), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", BY_HAND)
def test_no_live_token_gives_zero_and_not_nan(name: str) -> None:
    assert value_of(name, [[], []], width=3).item() == 0.0


@pytest.mark.parametrize("name", WEIGHT_TYPE)
def test_rows_may_come_in_any_order(name: str) -> None:
    lengths = [2, 4, 1]
    weights = pipeline.token_weights(load_loss_aggregation(name), make_rollout(lengths))
    order = [2, 0, 1]
    permuted = pipeline.token_weights(load_loss_aggregation(name), make_rollout([lengths[i] for i in order]))
    torch.testing.assert_close(permuted, weights[order], rtol=0, atol=0)


def test_constant_length_takes_its_length_from_the_parameter_or_the_run() -> None:
    rollout = make_rollout([2], limit=10)
    assert load_loss_aggregation("constant_length").weights(rollout).tolist() == [[0.1, 0.1]]
    four = load_loss_aggregation({"name": "constant_length", "length": 4})
    assert four.weights(rollout).tolist() == [[0.25, 0.25]]


@pytest.mark.parametrize("length", [0, -3, 2.5, True, "8"])
def test_constant_length_refuses_a_length_that_is_none(length: object) -> None:
    with pytest.raises((ConfigurationError, PluginParameterError), match="positive number of tokens"):
        load_loss_aggregation({"name": "constant_length", "length": length})


def test_token_mean_local_depends_on_the_cut_and_token_mean_does_not() -> None:
    # The reason to prefer the global mean: cut as {1, 2} and {3}, the local one is the mean of 12/6 and 6.
    local = load_loss_aggregation("token_mean_local")
    totals = make_rollout([2, 4, 1]).totals
    halves = [local.reduce(padded(rows), mask_of([len(r) for r in rows]), totals) for rows in (LOSSES[:2], LOSSES[2:])]
    assert float(sum(halves)) / 2 == pytest.approx((12 / 6 + 6) / 2)
    weights = pipeline.token_weights(load_loss_aggregation("token_mean"), make_rollout([2, 4, 1]))
    terms = (weights * padded(LOSSES)).sum(1)
    assert float(terms[:2].sum() + terms[2:].sum()) == pytest.approx(18 / 7)
