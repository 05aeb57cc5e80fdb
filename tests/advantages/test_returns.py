"""Sums over live tokens, and the estimator made of them, `group_mean_gae`."""

import pytest
import torch

from tests.advantages.token_batches import after_rollout
from tests.contexts import make_rollout
from trl_grpo_ext.advantages.returns import discounted_returns


def test_returns_of_long_completions_neither_overflow_nor_drift() -> None:
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

    def test_lambda_by_length_by_hand(self) -> None:
        # α = .4: λ is 1 - 1/(.4 · 5) = .5 for five tokens, and 1 - 1/.8 = -.25, so 0, for two.
        first, second = after_rollout(make_rollout([5, 2], [1, 0]), [9.0] * 2, "group_mean_gae", length_alpha=0.4)
        assert first == pytest.approx([0.5 * 0.5**t for t in (4, 3, 2, 1, 0)])
        assert second == [0, -0.5, 0, 0, 0]
        # The authors' 0.05 makes 1000 tokens fade by 1 - 1/50 each.
        (long, _) = after_rollout(make_rollout([1000, 1], [1, 0]), [9.0] * 2, "group_mean_gae", length_alpha=0.05)
        assert long[-2] / long[-1] == pytest.approx(0.98)
