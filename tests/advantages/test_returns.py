"""Sums over live tokens, and the estimator made of them, `group_mean_gae`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.advantages.token_batches import after_rollout, hook
from tests.contexts import make_rollout
from trl_grpo_ext.advantages.returns import discounted_returns
from trl_grpo_ext.errors import ConfigurationError


class TestReturns:
    def test_long_completions_neither_overflow_nor_drift(self) -> None:
        live = torch.ones(1, 20_000, dtype=torch.bool)
        returns = discounted_returns(torch.ones(1, 20_000), live, 0.9)
        assert returns[0, 0].item() == pytest.approx(10.0, rel=1e-6)  # 1 / (1 - 0.9)
        assert discounted_returns(torch.ones(1, 20_000), live, 1.0)[0, 0].item() == 20_000


class TestGroupMeanGAE:
    def test_by_hand(self) -> None:
        # Rewards 1 and 0, μ = .5. γ = 1: δ = 0, 0, ±.5; with λ = .5 it halves at every token backwards.
        rows = after_rollout(make_rollout([3, 2], [1, 0]), [9.0, 9.0], "group_mean_gae", gae_lambda=0.5)
        assert rows == [[0.125, 0.25, 0.5], [-0.25, -0.5, 0]]
        # γ = .5, λ = 1: δ = -.25, -.25, .5, so A = .5, -.25 + .5·.5 = 0, -.25 + .5·0.
        (row, _) = after_rollout(make_rollout([3, 2], [1, 0]), [9.0, 9.0], "group_mean_gae", gamma=0.5, gae_lambda=1)
        assert row == [-0.25, 0, 0.5]

    @pytest.mark.parametrize("reward", [0.3, 0.1, 1 / 3, 12345.678])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_equal_rewards_give_exactly_nothing(self, reward: float, dtype: torch.dtype) -> None:
        rollout = make_rollout([3, 2, 4], [reward] * 3)
        rollout = replace(rollout, rewards_B=rollout.rewards_B.to(dtype))
        assert not any(any(row) for row in after_rollout(rollout, [9.0] * 3, "group_mean_gae"))

    def test_lambda_by_length_by_hand(self) -> None:
        # α = .4: λ is 1 - 1/(.4 · 5) = .5 for five tokens, and 1 - 1/.8 = -.25, so 0, for two.
        first, second = after_rollout(make_rollout([5, 2], [1, 0]), [9.0] * 2, "group_mean_gae", length_alpha=0.4)
        assert first == pytest.approx([0.5 * 0.5**t for t in (4, 3, 2, 1, 0)])
        assert second == [0, -0.5, 0, 0, 0]
        # The authors' 0.05 makes 1000 tokens fade by 1 - 1/50 each.
        (long, _) = after_rollout(make_rollout([1000, 1], [1, 0]), [9.0] * 2, "group_mean_gae", length_alpha=0.05)
        assert long[-2] / long[-1] == pytest.approx(0.98)

    def test_a_lambda_that_would_have_no_effect_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"gae_lambda=0\.9 has no effect with length_alpha=0\.05"):
            hook("group_mean_gae", gae_lambda=0.9, length_alpha=0.05)
