"""Sums, means and deviations over groups, which the sequence-level estimators are made of."""

from __future__ import annotations

import math

import torch
from trl_grpo_ext.advantages.group_statistics import (
    gather_rewards,
    group_highest,
    group_lowest,
    group_means,
    group_stds,
    group_sums,
    on_every_token,
)

from tests.contexts import Ranks, cut, make_rollout


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


GROUPS = torch.tensor([0, 1, 0, 2, 1, 0])
VALUES = numbers(1, -10, 2, 7, -30, 6)
COUNTED = numbers(1, 1, 1, 0, 1, 0)  # of group 0 all but the 6; of group 2 nothing


def test_each_row_gets_its_own_group_s_number() -> None:
    assert group_sums(COUNTED, GROUPS).tolist() == [2, 2, 2, 0, 2, 2]
    assert group_sums(VALUES, GROUPS).tolist() == [9, -40, 9, 7, -40, 9]
    assert group_lowest(VALUES, COUNTED, GROUPS).tolist() == [1, -30, 1, 0, -30, 1]
    assert group_highest(VALUES, COUNTED, GROUPS).tolist() == [2, -10, 2, 0, -10, 2]
    assert group_means(VALUES, COUNTED, GROUPS).tolist() == [1.5, -20, 1.5, 0, -20, 1.5]


def test_weighted_mean_by_hand() -> None:
    # (3 · 1 + 1 · 5) / 4 = 2; the third counts for nothing.
    means = group_means(numbers(1, 5, 99), numbers(3, 1, 0), torch.zeros(3, dtype=torch.long))
    assert means.tolist() == [2, 2, 2]


def test_standard_deviation_by_hand() -> None:
    # Of 1, 2: √(2 · .25 / 1). Of -10, -30: √(2 · 100 / 1). Fewer than two: 0.
    torch.testing.assert_close(
        group_stds(VALUES, COUNTED, GROUPS), numbers(0.5, 200, 0.5, 0, 200, 0.5).sqrt(), rtol=1e-12, atol=0
    )
    assert group_stds(numbers(3), numbers(1), torch.tensor([0])).tolist() == [0]


def test_the_mean_of_equal_values_is_that_value() -> None:
    for value in (0.1, 1 / 3, 1e-30, 12345.678):
        for dtype in (torch.float32, torch.float64):
            values = torch.full((7,), value, dtype=dtype)
            groups = torch.zeros(7, dtype=torch.long)
            assert torch.equal(group_means(values, torch.ones_like(values), groups), values)
            assert not group_stds(values, torch.ones_like(values), groups).any()


def test_a_small_mean_beside_a_large_value_is_not_lost() -> None:
    values = torch.tensor([1.0, *[0.0] * 4095])
    means = group_means(values, torch.ones(4096), torch.zeros(4096, dtype=torch.long))
    torch.testing.assert_close(means[0], torch.tensor(1 / 4096), rtol=1e-6, atol=0)


def test_gathered_rewards_are_those_of_all_ranks_with_groups_from_zero() -> None:
    rollout = make_rollout([1] * 5, [1.0, math.nan, 2.0, 3.0, 4.0], [900, -4, 900, -4, 12])
    ranks = Ranks(cut(rollout, [2, 0, 3]))
    for rewards_N, scored_N, groups_N in ranks.run(gather_rewards):
        assert rewards_N.tolist() == [1, 0, 2, 3, 4]
        assert scored_N.tolist() == [1, 0, 1, 1, 1]
        assert groups_N.tolist() == [2, 0, 2, 0, 1]
    assert ranks.gathers == [2, 2, 2]


def test_on_every_token_takes_shape_and_dtype_from_what_it_replaces() -> None:
    result = on_every_token(numbers(1, 2), torch.zeros(2, 3, dtype=torch.bfloat16))
    assert result.dtype == torch.bfloat16
    assert result.tolist() == [[1, 1, 1], [2, 2, 2]]
