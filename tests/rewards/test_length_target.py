"""`LengthTarget` by values computed by hand, with fixed targets and those of a column."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.rewards.length_target import LengthTarget


def scored(reward: LengthTarget, lengths: list[int], **columns: Any) -> list[float | None]:
    ids = [[7] * length for length in lengths]
    return reward(prompts=["?"] * len(ids), completions=["x"] * len(ids), completion_ids=ids, **columns)


def test_exact_charges_alpha_for_every_token_too_many_or_too_few() -> None:
    reward = LengthTarget(100, alpha=0.01)
    assert scored(reward, [100, 99, 150, 0]) == pytest.approx([0.0, -0.01, -0.5, -1.0])


def test_the_defaults_are_the_papers() -> None:
    assert scored(LengthTarget(1000), [1100]) == pytest.approx([-0.03])
    assert scored(LengthTarget(1000, mode="max"), [1000, 1100]) == pytest.approx([0.5, 0.47])


def test_max_slopes_around_the_target_and_is_cut_at_0_and_1() -> None:
    reward = LengthTarget(100, mode="max", alpha=0.01, delta=0.5)
    assert scored(reward, [100, 90, 50, 49, 0, 120, 150, 151]) == pytest.approx([0.5, 0.6, 1, 1, 1, 0.3, 0, 0])


def test_a_tolerance_costs_nothing() -> None:
    assert scored(LengthTarget(100, alpha=0.01, tolerance=5), [95, 105, 106, 90]) == pytest.approx([0, 0, -0.01, -0.05])


def test_targets_come_from_a_column() -> None:
    reward = LengthTarget(alpha=0.1)
    assert scored(reward, [5, 5, 5, 5], target_length=[5, 4.0, None, math.nan]) == pytest.approx([0, -0.1, None, None])
    assert scored(LengthTarget(column="tokens", alpha=0.1), [5], tokens=[3]) == pytest.approx([-0.2])


@given(target=st.integers(0, 10**6), length=st.integers(0, 300), alpha=st.floats(1e-9, 10))
def test_nearer_is_never_worse_and_max_never_punishes_a_shorter_one(target: int, length: int, alpha: float) -> None:
    at, longer = scored(LengthTarget(target, alpha=alpha), [length, length + 1])
    assert at is not None
    assert longer is not None
    assert (at <= longer) if length < target else (at > longer)
    at, longer = scored(LengthTarget(target, mode="max", alpha=alpha), [length, length + 1])
    assert at is not None
    assert longer is not None
    assert 0 <= longer <= at <= 1


@pytest.mark.parametrize("entry", [-1, True, "100", 2.5, math.inf, [3], "\ud800" * 500])
def test_a_target_that_is_no_number_of_tokens_is_an_error_with_its_row(entry: Any) -> None:
    with pytest.raises(RewardError, match="'target_length' at row 1 must be a whole number of tokens") as caught:
        scored(LengthTarget(), [1, 1], target_length=[1, entry])
    assert len(str(caught.value).encode()) < 500


def test_a_missing_column_is_named_with_those_that_are_there() -> None:
    with pytest.raises(RewardError, match=r"needs the column 'target_length'; the columns present are \['answer'\]"):
        scored(LengthTarget(), [1], answer=["18"])
    with pytest.raises(RewardError, match="2 completions but 1 entries in 'target_length'"):
        scored(LengthTarget(), [1, 1], target_length=[1])
    with pytest.raises(RewardError, match="needs 'completion_ids'"):
        LengthTarget(5)(completions=["x"])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"target": -1}, "target must be a whole number, 0 or more, got -1"),
        ({"target": 5.0}, "target must be .* got 5.0"),
        ({"target": True}, "target must be .* got True"),
        ({"target": 5, "mode": "min"}, "mode must be 'exact' or 'max', got 'min'"),
        ({"target": 5, "alpha": 0}, "alpha must be a positive number, got 0"),
        ({"target": 5, "alpha": math.nan}, "alpha must be a positive number, got nan"),
        ({"target": 5, "delta": 1.5}, "delta must be a number from 0 to 1, got 1.5"),
        ({"target": 5, "tolerance": -1}, "tolerance must be .* got -1"),
        ({"target": 5, "mode": "max", "tolerance": 3}, "tolerance is for mode 'exact', got 3"),
        ({"column": ""}, "column must be the name of a column, got ''"),
    ],
)
def test_parameters_that_cannot_work_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LengthTarget(**parameters)


def test_it_has_a_name_and_pickles() -> None:
    reward = pickle.loads(pickle.dumps(LengthTarget(10, alpha=0.5)))
    assert scored(reward, [11]) == [-0.5]
    assert reward.__name__ == "length_target"
    assert repr(reward) == "LengthTarget(target=10, mode='exact', alpha=0.5)"
