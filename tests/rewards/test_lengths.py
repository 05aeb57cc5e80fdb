"""`soft_overlong`, `length_target` and `cosine_length` by values computed by hand, and against TRL's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.errors import PluginOutputError, RewardError
from trl_grpo_ext.rewards.lengths import CosineLength, LengthTarget, SoftOverlong


def given_scores(scores: Sequence[Any], **columns: Any) -> Sequence[Any]:
    """The correctness is what the column says."""
    return scores


async def given_scores_later(scores: Sequence[Any], **columns: Any) -> Sequence[Any]:
    return scores


def scored(reward: Any, lengths: list[int], **columns: Any) -> list[float | None]:
    ids, texts = [[7] * length for length in lengths], ["x"] * len(lengths)
    scores: list[float | None] = reward(prompts=texts, completions=texts, completion_ids=ids, **columns)
    return scores


@pytest.mark.parametrize(
    ("cache", "penalties"),
    [
        (20, {0: 0, 79: 0, 80: 0, 81: -0.05, 85: -0.25, 90: -0.5, 99: -0.95, 100: -1, 101: -1, 500: -1}),
        (0, {99: 0, 100: 0, 101: -1}),  # a step at the limit
        (100, {0: 0, 1: -0.01, 50: -0.5, 100: -1}),  # over the whole length
    ],
)
def test_the_overlong_penalty_grows_over_the_cache(cache: int, penalties: dict[int, float]) -> None:
    reward = SoftOverlong(max_completion_length=100, cache=cache)
    assert scored(reward, list(penalties), trainer_state=None) == list(penalties.values())


@given(limit=st.integers(1, 300), data=st.data())
def test_soft_overlong_is_trls_punishment(limit: int, data: st.DataObject) -> None:
    other_rewards = pytest.importorskip("trl.rewards.other_rewards", reason="TRL's own reward is the oracle here")
    cache = data.draw(st.integers(0, limit))
    ids = [[0] * length for length in data.draw(st.lists(st.integers(0, 400), max_size=5))]
    theirs = other_rewards.get_soft_overlong_punishment(max_completion_len=limit, soft_punish_cache=cache)
    assert SoftOverlong(max_completion_length=limit, cache=cache)(completion_ids=ids) == theirs(completion_ids=ids)


@pytest.mark.parametrize(
    ("reward", "lengths", "scores"),
    [
        (LengthTarget(100, alpha=0.01), [100, 99, 150, 0], [0.0, -0.01, -0.5, -1.0]),
        (LengthTarget(1000), [1100], [-0.03]),  # the defaults are the paper's
        (LengthTarget(1000, mode="max"), [1000, 1100], [0.5, 0.47]),
        (
            LengthTarget(100, mode="max", alpha=0.01, delta=0.5),
            [100, 90, 50, 49, 0, 120, 150, 151],
            [0.5, 0.6, 1, 1, 1, 0.3, 0, 0],
        ),
        (LengthTarget(100, alpha=0.01, tolerance=5), [95, 105, 106, 90], [0, 0, -0.01, -0.05]),
    ],
)
def test_nearness_to_the_target_by_hand(reward: LengthTarget, lengths: list[int], scores: list[float]) -> None:
    assert scored(reward, lengths) == pytest.approx(scores)


def test_targets_come_from_a_column() -> None:
    reward = LengthTarget(alpha=0.1)
    assert scored(reward, [5, 5, 5, 5], target_length=[5, 4.0, None, math.nan]) == pytest.approx([0, -0.1, None, None])
    assert scored(LengthTarget(column="tokens", alpha=0.1), [5], tokens=[3]) == pytest.approx([-0.2])


@pytest.mark.parametrize("entry", [-1, True, "100", 2.5, math.inf, [3], "\ud800" * 500])
def test_a_target_that_is_no_number_of_tokens_is_an_error_with_its_row(entry: Any) -> None:
    with pytest.raises(RewardError, match="'target_length' at row 1 must be a whole number of tokens") as caught:
        scored(LengthTarget(), [1, 1], target_length=[1, entry])
    assert len(str(caught.value).encode()) < 500


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [
        (0, 1.0, -1.0),
        (25, 0.5 + 0.25 * (1 + math.sqrt(0.5)), -0.5 - 0.25 * (1 + math.sqrt(0.5))),
        (50, 0.75, -0.75),
        (100, 0.5, -0.5),
        (150, 0.5, -0.5),  # the cosine does not rise again
    ],
)
def test_short_right_answers_earn_most_and_short_wrong_ones_lose_most(length: int, right: float, wrong: float) -> None:
    reward = CosineLength(max_length=100, reward=given_scores)
    assert scored(reward, [length, length], scores=[1.0, 0.0]) == pytest.approx([right, wrong], abs=1e-12)


def test_bounds_threshold_and_the_papers_penalty_for_the_limit_may_be_chosen() -> None:
    bounds = CosineLength(
        100, given_scores, min_value_wrong=-10, max_value_wrong=0, min_value_correct=2, max_value_correct=4
    )
    assert scored(bounds, [0, 100, 0, 100], scores=[1, 1, 0, 0]) == pytest.approx([4.0, 2.0, -10.0, 0.0], abs=1e-12)
    strict = CosineLength(100, given_scores, threshold=0.7)
    assert scored(strict, [0] * 5, scores=[0.7, 0.69, None, math.nan, 3]) == [1.0, -1.0, None, None, 1.0]
    limited = CosineLength(100, given_scores, exceeded_value=-10.0)
    assert scored(limited, [100, 101, 50], scores=[1, 0, 1]) == pytest.approx([-10.0, -10.0, 0.75])


def test_the_correctness_may_be_async_and_is_checked() -> None:
    assert scored(CosineLength(100, given_scores_later), [0, 50], scores=[1.0, 0.0]) == pytest.approx([1.0, -0.75])
    with pytest.raises(PluginOutputError, match="'given_scores' returned 1 values for 2 completions"):
        scored(CosineLength(100, given_scores), [1, 2], scores=[1.0])


@settings(max_examples=20)
@given(
    limit=st.integers(1, 50),
    rows=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4),
    bounds=st.tuples(*[st.floats(-5, 5) for _ in range(4)]),
)
def test_over_trls_accuracy_cosine_length_is_trls_reward(
    limit: int, rows: list[tuple[int, int, int]], bounds: tuple[float, float, float, float]
) -> None:
    accuracy = pytest.importorskip("trl.rewards.accuracy_rewards", reason="TRL's own reward is the oracle here")
    names = ("min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct")
    values = dict(zip(names, bounds, strict=True))
    columns: dict[str, Any] = {
        "completions": [[{"role": "assistant", "content": rf"\boxed{{{said}}}"}] for _, said, _ in rows],
        "solution": [rf"\boxed{{{right}}}" for *_, right in rows],
        "completion_ids": [[1] * length for length, *_ in rows],
    }
    theirs = accuracy.get_cosine_scaled_reward(max_len=limit, **values)(**columns)
    ours = CosineLength(limit, accuracy.accuracy_reward, **values)(**columns)
    assert ours == pytest.approx(theirs, abs=1e-12)
