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


def punished(text: str, ngram: int) -> str:
    """The letters that get the penalty, dots for the others."""
    ids = torch.tensor([[ord(letter) for letter in text]])
    rollout = make_rollout([len(text)], completion_ids_B_T=ids)
    (row,) = after_rollout(rollout, [1.0], "repetition_penalty", ngram=ngram, penalty=0.25)
    assert set(row) <= {1.0, 0.75}
    return "".join(letter if value == 0.75 else "." for letter, value in zip(text, row, strict=True))


class TestRepetition:
    @pytest.mark.parametrize(
        ("text", "ngram", "expected"),
        [
            ("abcxabcy", 3, "....abc."),  # the first occurrence is not punished
            ("abcxabcy", 2, "....abc."),  # ab and bc
            ("abcabcabc", 3, "...abcabc"),  # bca, cab too
            ("aaaa", 3, ".aaa"),  # occurrences may overlap
            ("abab", 1, "..ab"),
            ("abxab", 2, "...ab"),  # at the very end
            ("ab", 3, ".."),  # shorter than an n-gram
        ],
    )
    def test_by_hand(self, text: str, ngram: int, expected: str) -> None:
        assert punished(text, ngram) == expected

    def test_large_vocabularies_and_long_batches_do_not_collide(self) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 260_000, (16, 4000), generator=generator)
        ids[3, 3000:3040] = ids[3, 100:140]
        result = flow.apply_hooks(
            torch.ones(16), [hook("repetition_penalty")], make_rollout([4000] * 16, completion_ids_B_T=ids)
        )
        changed = (result != 1).nonzero().tolist()
        assert changed == [[3, place] for place in range(3000, 3040)]


def test_truncation_masking_by_hand() -> None:
    rollout = make_rollout([2] * 4, truncated_B=torch.tensor([True, True, False, False]))
    for keep, truncated in (("nothing", [[0, 0], [0, 0]]), ("negative", [[0, 0], [-1, -1]])):
        rows = after_rollout(rollout, [1.0, -1.0, 1.0, -1.0], "truncation_masking", keep=keep)
        assert rows == [*truncated, [1, 1], [-1, -1]]


# ---------------------------------------------------------------------------------------------- whiten


def test_sequence_rejection_by_hand() -> None:
    # Mean log-ratios over live tokens: 0.1, -0.2 and (0.3 - 0.3)/2; the tool's token and the padding are in no mean.
    old = padded([[-1.0, -1.0, -1.0]] * 3)
    apart = padded([[0.1, 9.0, 0.1], [-0.2, math.nan, math.nan], [0.3, 9.0, -0.3]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
    rollout = make_rollout([3, 1, 3], old_logps_B_T=old, sampling_logps_B_T=old - apart, mask_B_T=mask)

    def kept(low: float, high: float) -> list[bool]:
        rows = after_rollout(rollout, [1.0, -1.0, 2.0], "sequence_rejection", low=low, high=high)
        return [any(row) for row in rows]

    assert kept(math.exp(-0.21), math.exp(0.11)) == [True, True, True]
    assert kept(math.exp(-0.19), math.exp(0.11)) == [True, False, True]
    assert kept(0.0, math.exp(0.09)) == [False, True, True]
    assert kept(0.999, 1.001) == [False, False, True]


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
