"""Leave-one-out baseline: by hand, against a loop, and with groups spread over ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import make_rollout
from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Rollout


def advantages_of(rollout: Rollout) -> torch.Tensor:
    (hook,) = load_advantage_hooks(["leave_one_out"])
    incoming = torch.full((len(rollout.prompts),), 9.0, dtype=torch.float64)  # replaced, whatever it was
    return flow.apply_rollout_hooks(incoming, [hook], rollout)


def test_by_hand() -> None:
    result = advantages_of(make_rollout([1, 2, 2, 1], rewards=[1, 0, 0, 3]))
    expected = [
        [0, 0],
        [-4 / 3, -4 / 3],
        [-4 / 3, -4 / 3],
        [8 / 3, 0],
    ]  # the same on every token, nothing off the mask
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


def test_groups_do_not_see_each_other() -> None:
    result = advantages_of(make_rollout([1] * 4, rewards=[1, 3, 10, 20], groups=[0, 0, 1, 1]))
    assert result.squeeze(1).tolist() == [-2, 2, -10, 10]


def test_unscored_completions_are_in_nobodys_baseline() -> None:
    result = advantages_of(make_rollout([1] * 4, rewards=[1, math.nan, 4, math.nan]))
    assert result.squeeze(1).tolist() == [-3, 0, 3, 0]


def test_the_only_scored_completion_of_a_group_gets_nothing() -> None:
    result = advantages_of(make_rollout([1] * 3, rewards=[math.nan, 5, math.nan]))
    assert result.squeeze(1).tolist() == [0, 0, 0]


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_equals_a_loop_and_sums_to_zero(rewards: list[float], copies: int) -> None:
    every = rewards * copies
    groups = [i // len(rewards) for i in range(len(every))]
    result = advantages_of(make_rollout([1] * len(every), rewards=every, groups=groups)).squeeze(1).tolist()
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i]
        assert result[i] == pytest.approx(reward - sum(others) / len(others), abs=1e-9)
    assert sum(result) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_group_cut_by_a_rank_boundary_gets_the_same_advantages(cut: int) -> None:
    rewards, groups = [1.0, 0.0, 0.0, 3.0, 2.0, 5.0, 5.0, 0.0], [0] * 4 + [1] * 4
    whole = make_rollout([1] * 8, rewards=rewards, groups=groups)
    expected = advantages_of(whole)

    everything = {"rewards": whole.rewards_B, "groups": whole.group_ids_B}
    parts = []
    for rows in (slice(0, cut), slice(cut, 8)):
        count = len(rewards[rows])
        part = make_rollout(
            [1] * count,
            rewards=rewards[rows],
            groups=groups[rows],
            totals=whole.totals,
            local_rows=rows,
            gather=lambda t: everything["rewards" if t.is_floating_point() else "groups"],
        )
        parts.append(advantages_of(part))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=0)
