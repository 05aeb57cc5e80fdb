"""Statistics over groups: by hand, of equal values, and without the rows that have no value."""

import math

import pytest
import torch

from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext.credit.groups import (
    gather_rewards,
    group_count,
    group_extremes,
    group_is_equal,
    group_mean,
    group_std,
    group_sum,
)

NAN = math.nan


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


GROUPS = torch.tensor([0, 1, 0, 2, 1, 0])
VALUES = numbers(1, -10, 2, NAN, -30, NAN)  # of group 2 nothing


def same(found: torch.Tensor, expected: list[float]) -> bool:
    return torch.equal(found.nan_to_num(nan=-999), numbers(*expected).nan_to_num(nan=-999))


def test_each_row_gets_its_own_groups_number() -> None:
    assert same(group_count(VALUES, GROUPS), [2, 2, 2, 0, 2, 2])
    assert same(group_sum(VALUES, GROUPS), [3, -40, 3, 0, -40, 3])
    lowest, highest = group_extremes(VALUES, GROUPS)
    assert same(lowest, [1, -30, 1, NAN, -30, 1])
    assert same(highest, [2, -10, 2, NAN, -10, 2])
    assert same(group_mean(VALUES, GROUPS), [1.5, -20, 1.5, NAN, -20, 1.5])
    # Of 1, 2: √(2 · .25 / 1). Of -10, -30: √(2 · 100 / 1). Fewer than two: 0.
    torch.testing.assert_close(group_std(VALUES, GROUPS), numbers(0.5, 200, 0.5, 0, 200, 0.5).sqrt())
    assert same(group_std(numbers(3), torch.tensor([0])), [0])


def test_weighted_mean_by_hand() -> None:
    one_group = torch.zeros(4, dtype=torch.long)
    # (3 · 1 + 1 · 5) / 4 = 2; the third counts for nothing, and the fourth has no value.
    assert same(group_mean(numbers(1, 5, 99, NAN), one_group, numbers(3, 1, 0, 7)), [2] * 4)
    assert same(group_mean(numbers(1, 5), one_group[:2], numbers(0, 0)), [NAN] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-30, 12345.678])
def test_the_mean_of_equal_values_is_that_value(value: float, dtype: torch.dtype) -> None:
    values, groups = torch.full((7,), value, dtype=dtype), torch.zeros(7, dtype=torch.long)
    assert torch.equal(group_mean(values, groups), values)
    assert not group_std(values, groups).any()
    # Also beside another value that has no weight.
    weights = torch.ones_like(values)
    values[3], weights[3] = -3.3, 0
    assert group_mean(values, groups, weights)[0] == values[0]


def test_equal_is_the_same_number() -> None:
    rewards = numbers(0.1, 0.1 + 1e-9, 100, 100, 0, -0.0, 5, NAN, NAN, NAN)
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    assert group_is_equal(rewards, groups).tolist() == [False] * 2 + [True] * 8


def test_gather_rewards_of_all_ranks() -> None:
    rollout = make_rollout([1] * 5, [1.0, NAN, 2.0, 3.0, 4.0], [900, -4, 900, -4, 12])
    ranks = Ranks(cut(rollout, [2, 0, 3]))
    for rewards_N, groups_N in ranks.run(gather_rewards):
        assert same(rewards_N, [1, NAN, 2, 3, 4])
        assert groups_N.tolist() == [2, 0, 2, 0, 1]
    assert ranks.gathers == [2, 2, 2]
