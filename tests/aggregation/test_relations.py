"""Where two aggregations must be the same, and in what they differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from tests.aggregation.batches import Batch, batches, completion, loss_and_gradient

some = settings(max_examples=30)

ALIKE: dict[str, tuple[Any, str]] = {
    "length_power 0": ({"name": "length_power", "alpha": 0, "normalize": False}, "seq_mean_token_sum"),
    "length_power 1": ({"name": "length_power", "alpha": 1, "normalize": False}, "seq_mean_token_mean"),
    "length_softmax 0": ({"name": "length_softmax", "lam": 0}, "token_mean"),
    "difficulty_weighted of one factor": ({"name": "difficulty_weighted", "low": 1, "high": 1}, "token_mean"),
    "one micro-batch": ("token_mean_local", "token_mean"),
    "one step": ("token_mean_step", "token_mean"),
}

ALIKE_WHERE_NONE_IS_EMPTY: dict[str, tuple[Any, str]] = {
    "length_power normalised 0": ({"name": "length_power", "alpha": 0}, "seq_mean_token_sum"),
    "tail_mean 1": ({"name": "tail_mean", "fraction": 1}, "seq_mean_token_mean"),
    "power_mean 1": ({"name": "power_mean", "p": 1}, "seq_mean_token_mean"),
}


def assert_alike(first: Any, second: Any, batch: Batch) -> None:
    loss, gradient = loss_and_gradient(first, batch)
    expected_loss, expected = loss_and_gradient(second, batch)
    assert loss == pytest.approx(expected_loss, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("first", "second"), ALIKE.values(), ids=ALIKE)
@given(batch=batches())
@some
def test_the_same(first: Any, second: str, batch: Batch) -> None:
    assert_alike(first, second, batch)


@pytest.mark.parametrize(("first", "second"), ALIKE_WHERE_NONE_IS_EMPTY.values(), ids=ALIKE_WHERE_NONE_IS_EMPTY)
@given(batch=batches())
@some
def test_the_same_where_no_completion_is_empty(first: Any, second: str, batch: Batch) -> None:
    one_token = {"losses": (1.5,), "live": (True,), "ids": (0,)}
    assert_alike(first, second, [row if row.size else replace(row, **one_token) for row in batch])


def test_tail_mean_and_power_mean_look_at_sequences_and_not_at_tokens() -> None:
    # One token of 9 in a sequence whose mean is 1, against a sequence of 2s: the latter is worse.
    batch = [completion([9.0, -7.0]), completion([2.0, 2.0])]
    assert loss_and_gradient("tail_mean", batch)[0] == 2.0
    _, slopes = loss_and_gradient({"name": "power_mean", "p": 50}, batch)
    assert slopes[0].sum() < 1e-9 < slopes[1].sum()
