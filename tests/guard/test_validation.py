"""What a reward function may return, and what is refused with the row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from trl_grpo_ext.errors import PluginOutputError
from trl_grpo_ext.guard.validation import checked_scores
from trl_grpo_ext.types import SpanScore


def generated(*values: float | None) -> Iterator[float | None]:
    yield from values


@pytest.mark.parametrize(
    "returned",
    [
        [1.0, None, 0.5],
        (1, None, 0.5),
        generated(1.0, None, 0.5),
        [True, None, Fraction(1, 2)],
        [np.float32(1.0), None, np.float64(0.5)],
        [torch.tensor(1.0), None, Decimal("0.5")],
        [np.int64(1), None, torch.tensor(0.5, requires_grad=True)],
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_one_number_or_none_per_completion(returned: Any) -> None:
    scores = checked_scores(returned, 3, "r")
    assert scores == [1.0, None, 0.5]
    assert [type(score) for score in scores if score is not None] == [float, float]


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
def test_an_array_of_one_axis_is_a_list(make: Any) -> None:
    assert checked_scores(make([1.0, 0.0, 0.5]), 3, "r") == [1.0, 0.0, 0.5]
    with pytest.raises(PluginOutputError, match=r"of shape \(3, 1\); it must be \(3,\)"):
        checked_scores(make([[1.0], [0.0], [0.5]]), 3, "r")
    with pytest.raises(PluginOutputError, match=r"of shape \(\); it must be \(3,\)"):
        checked_scores(make(1.0), 3, "r")


def test_spans_stay_and_nan_passes() -> None:
    spans = SpanScore(0.5, [(0, 1, 0.5)])
    scores = checked_scores([spans, math.nan], 2, "r")
    assert scores[0] is spans
    assert scores[1] is not None
    assert math.isnan(scores[1])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, 1.0, 1.0], "returned 3 values for 2 completions"),
        (generated(1.0), "returned 1 values for 2 completions"),
        (None, "Did the function forget its return"),
        (0.5, "returned float, 0.5; it must return a list"),
        ("ab", "returned str, 'ab'"),
        ({0: 1.0, 1: 1.0}, "returned dict"),
        ({1.0, 0.0}, "returned set"),
        ([1.0, "0"], "returned str, '0', at row 1"),
        ([1.0, [0.0]], r"returned list, \[0.0\], at row 1"),
        ([1.0, 1j], "returned complex"),
        ([1.0, math.inf], "returned inf at row 1; it must be finite"),
        ([-math.inf, 1.0], "returned -inf at row 0"),
        ([1.0, 10**400], "at row 1; it must be finite"),
        ([1.0, torch.ones(2)], "returned Tensor"),
    ],
)
def test_anything_else_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(PluginOutputError, match=f"The reward 'my_reward' .*{message}"):
        checked_scores(returned, 2, "my_reward")
