"""Returns over live tokens, and `group_mean_gae`, which is a sum of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.advantages.token_batches import (
    after_rollout,
    live_places,
    rollouts,
)
from tests.contexts import make_rollout
from trl_grpo_ext.advantages.returns import discounted_returns, live_tokens_behind
from trl_grpo_ext.types import Rollout


class TestReturns:
    @given(rollouts(), st.floats(0, 1))
    @settings(max_examples=60, deadline=None)
    def test_equal_a_loop_from_behind(self, rollout: Rollout, gamma: float) -> None:
        values_B_T = rollout.old_logps_B_T
        assert values_B_T is not None
        result = discounted_returns(values_B_T, rollout.mask_B_T > 0, gamma)
        behind = live_tokens_behind(rollout.mask_B_T > 0)
        for row in range(len(result)):
            total, expected = 0.0, [0.0] * result.size(1)
            for count, place in enumerate(reversed(live_places(rollout, row))):
                total = float(values_B_T[row, place]) + gamma * total
                expected[place] = total
                assert int(behind[row, place]) == count
            assert result[row].tolist() == pytest.approx(expected, abs=1e-12)

    def test_what_stands_off_the_live_tokens_is_not_read(self) -> None:
        values = torch.tensor([[math.nan, 1.0, math.inf, 2.0, -math.inf]])
        live = torch.tensor([[False, True, False, True, False]])
        assert discounted_returns(values, live, 0.5).tolist() == [[0, 2, 0, 2, 0]]

    def test_long_completions_neither_overflow_nor_drift(self) -> None:
        live = torch.ones(1, 20_000, dtype=torch.bool)
        returns = discounted_returns(torch.ones(1, 20_000), live, 0.9)
        assert returns[0, 0].item() == pytest.approx(10.0, rel=1e-6)  # 1 / (1 - 0.9)
        assert discounted_returns(torch.ones(1, 20_000), live, 1.0)[0, 0].item() == 20_000

    def test_half_precision_is_summed_in_single(self) -> None:
        returns = discounted_returns(torch.ones(1, 1000, dtype=torch.bfloat16), torch.ones(1, 1000) > 0, 1.0)
        assert returns.dtype == torch.float32
        assert returns[0, 0].item() == 1000


def expected_gae(rollout: Rollout, gamma: float, lam: float) -> list[list[float]]:
    rewards, groups = rollout.rewards_B.tolist(), rollout.group_ids_B.tolist()
    table = [[0.0] * rollout.mask_B_T.size(1) for _ in rewards]
    for row, reward in enumerate(rewards):
        scored = [r for r, g in zip(rewards, groups, strict=True) if g == groups[row] and not math.isnan(r)]
        if math.isnan(reward):
            continue
        value = sum(scored) / len(scored)
        advantage, value_after, earned = 0.0, 0.0, reward
        for place in reversed(live_places(rollout, row)):
            delta = earned + gamma * value_after - value
            advantage = delta + gamma * lam * advantage
            table[row][place] = advantage
            value_after, earned = value, 0.0
    return table


class TestGroupMeanGAE:
    def test_by_hand(self) -> None:
        # Rewards 1 and 0, μ = .5. γ = 1: δ = 0, 0, ±.5; with λ = .5 it halves at every token backwards.
        rows = after_rollout(make_rollout([3, 2], [1, 0]), [9.0, 9.0], "group_mean_gae", gae_lambda=0.5)
        assert rows == [[0.125, 0.25, 0.5], [-0.25, -0.5, 0]]
        # γ = .5, λ = 1: δ = -.25, -.25, .5, so A = .5, -.25 + .5·.5 = 0, -.25 + .5·0.
        (row, _) = after_rollout(make_rollout([3, 2], [1, 0]), [9.0, 9.0], "group_mean_gae", gamma=0.5, gae_lambda=1)
        assert row == [-0.25, 0, 0.5]

    def test_by_default_credit_fades_with_the_distance_to_the_end(self) -> None:
        (row, _) = after_rollout(make_rollout([3, 3], [1, 0]), [0.0, 0.0], "group_mean_gae")
        assert row == pytest.approx([0.5 * 0.95**2, 0.5 * 0.95, 0.5])

    @given(rollouts(), st.sampled_from([0.2, 0.9, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
    @settings(max_examples=60, deadline=None)
    def test_equals_the_recursion(self, rollout: Rollout, gamma: float, lam: float) -> None:
        rows = after_rollout(rollout, [9.0] * len(rollout.prompts), "group_mean_gae", gamma=gamma, gae_lambda=lam)
        for row, expected in zip(rows, expected_gae(rollout, gamma, lam), strict=True):
            assert row == pytest.approx(expected, abs=1e-9)
