"""The transforms: by hand, against loops, on several ranks, and at their edges."""

import math
from dataclasses import replace

import pytest
import torch

from tests.advantages.token_batches import after_rollout, hook
from tests.contexts import make_rollout, padded
from trl_grpo_ext.credit import flow


def test_sign_scaling_of_tokens_by_hand() -> None:
    rollout = make_rollout([3, 2], width=3)
    incoming = padded([[1.0, -2.0, 0.0], [-0.5, 4.0]], width=3)
    hooks = [hook("sign_scaling", positive=0.5, negative=2.0)]
    expected = [[0.5, -4, 0], [-1, 2, 0]]
    assert flow.apply_hooks(incoming, hooks, rollout).tolist() == expected


def test_truncation_masking_by_hand() -> None:
    rollout = make_rollout([2] * 4, truncated_B=torch.tensor([True, True, False, False]))
    for keep, truncated in (("nothing", [[0, 0], [0, 0]]), ("negative", [[0, 0], [-1, -1]])):
        rows = after_rollout(rollout, [1.0, -1.0, 1.0, -1.0], "truncation_masking", keep=keep)
        assert rows == [*truncated, [1, 1], [-1, -1]]


# ---------------------------------------------------------------------------------------------- whiten


class TestWhiten:
    def test_by_hand(self) -> None:
        # Completions: mean 1, deviations 0, -1, -1, 2, squares sum to 6, σ = √2. Tokens: 3 of 4, 1 of 0: mean 3, σ = 2.
        incoming = [1.0, 0.0, 0.0, 3.0]
        rows = after_rollout(make_rollout([1] * 4, incoming), incoming, "whiten")
        assert [row[0] for row in rows] == pytest.approx([0, -(0.5**0.5), -(0.5**0.5), 2**0.5])
        rows = after_rollout(make_rollout([3, 1], [1.0, 0.0]), [4.0, 0.0], "whiten", over="tokens")
        assert rows == [pytest.approx([0.5] * 3), pytest.approx([-1.5, 0, 0])]

    @pytest.mark.parametrize("over", ["completions", "tokens"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_equal_advantages_become_exactly_nothing(self, over: str, dtype: torch.dtype) -> None:
        incoming = torch.full((7,), 1 / 3, dtype=dtype)
        rollout = make_rollout([1, 2, 3, 1, 2, 0, 5], [1.0] * 7)
        result = flow.apply_hooks(incoming, [hook("whiten", over=over)], rollout)
        assert result.dtype == dtype
        assert not result.any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_whiten_takes_rounding_for_zero(self, dtype: torch.dtype) -> None:
        rewards = [0.1, 0.7, 0.3, 0.2, 0.9, 0.4, *[0.3] * 3]
        rollout = make_rollout([1] * 9, rewards, [0] * 3 + [1] * 3 + [2] * 3)
        rollout = replace(rollout, rewards_B=rollout.rewards_B.to(dtype))
        hooks = [hook("normalised"), hook("whiten")]
        result = flow.apply_hooks(torch.zeros(9, dtype=dtype), hooks, rollout)
        assert not result[6:].any()
        assert result[:6].all()

    def test_whiten_counts_unscored_completions_with_credit(self) -> None:
        # Without any reward, as with a teacher alone, what came in is whitened all the same.
        rollout = make_rollout([1] * 3, [math.nan] * 3)
        rows = after_rollout(rollout, [1.0, 3.0, 0.0], "whiten")
        assert [row[0] for row in rows] == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0])


# ---------------------------------------------------------------------------------------------- clip and filter


def test_clipping_bounds_each_token() -> None:
    incoming = padded([[-3.0, 0.0, 1.0], [9.0, -0.5]], width=3)
    hooks = [hook("clip_advantages", low=-1.0, high=2.0)]
    result = flow.apply_hooks(incoming, hooks, make_rollout([3, 2], width=3))
    assert result.tolist() == [[-1, 0, 1], [2, -0.5, 0]]


class TestOutcomeFilter:
    REWARDS = (1.0, 0.0, 1.0, 1.0, 0.0, 0.0, math.nan, 1.0)
    GROUPS = (0, 0, 1, 1, 2, 2, 0, 3)

    @pytest.mark.parametrize(
        ("keep", "kept"),
        [
            ("successes", [1, 0, 1, 1, 0, 0, 0, 1]),
            ("failures", [0, 1, 0, 0, 1, 1, 0, 0]),
            ("mixed_groups", [1, 1, 0, 0, 0, 0, 1, 0]),
        ],
    )
    def test_by_hand(self, keep: str, kept: list[int]) -> None:
        rollout = make_rollout([1] * 8, list(self.REWARDS), list(self.GROUPS))
        assert after_rollout(rollout, [1.0] * 8, "outcome_filter", keep=keep) == [[one] for one in kept]

    def test_outcome_filter_reads_raw_rewards(self) -> None:
        rollout = make_rollout([1, 1], [0.2, 0.9], raw_rewards_B=torch.tensor([1.0, 0.0]))
        assert after_rollout(rollout, [1.0, 1.0], "outcome_filter", keep="successes") == [[1], [0]]
