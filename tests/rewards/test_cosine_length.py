"""`CosineLength` by values computed by hand, and against TRL's own over TRL's own correctness."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError, PluginOutputError, RewardError
from trl_grpo_ext.rewards.cosine_length import CosineLength


def given_scores(scores: Sequence[Any], **columns: Any) -> Sequence[Any]:
    """The correctness is what the column says."""
    return scores


async def given_scores_later(scores: Sequence[Any], **columns: Any) -> Sequence[Any]:
    return scores


def too_few(**columns: Any) -> list[float]:
    return [1.0]


def scored(reward: CosineLength, lengths: list[int], scores: list[Any]) -> list[float | None]:
    ids = [[7] * length for length in lengths]
    texts = ["x"] * len(lengths)
    return reward(prompts=texts, completions=texts, completion_ids=ids, scores=scores, trainer_state=None)


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
    assert scored(reward, [length, length], [1.0, 0.0]) == pytest.approx([right, wrong], abs=1e-12)


def test_the_bounds_may_be_chosen() -> None:
    reward = CosineLength(
        100, given_scores, min_value_wrong=-10, max_value_wrong=0, min_value_correct=2, max_value_correct=4
    )
    ends = scored(reward, [0, 100, 0, 100], [1, 1, 0, 0])
    assert ends == pytest.approx([4.0, 2.0, -10.0, 0.0], abs=1e-12)


def test_right_is_the_threshold_or_more_and_none_stays_none() -> None:
    reward = CosineLength(100, given_scores, threshold=0.7)
    assert scored(reward, [0] * 5, [0.7, 0.69, None, math.nan, 3]) == [1.0, -1.0, None, None, 1.0]


def test_the_papers_penalty_for_the_limit_is_there_when_asked_for() -> None:
    reward = CosineLength(100, given_scores, exceeded_value=-10.0)
    assert scored(reward, [100, 101, 50], [1, 0, 1]) == pytest.approx([-10.0, -10.0, 0.75])


def test_an_async_reward_is_waited_for() -> None:
    assert scored(CosineLength(100, given_scores_later), [0, 50], [1.0, 0.0]) == pytest.approx([1.0, -0.75])


@settings(max_examples=20, deadline=None)
@given(
    limit=st.integers(1, 50),
    rows=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4),
    bounds=st.tuples(*[st.floats(-5, 5) for _ in range(4)]),
)
def test_over_trls_accuracy_it_is_trls_reward(
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


def test_what_the_other_reward_returns_is_checked() -> None:
    with pytest.raises(PluginOutputError, match="'too_few' returned 1 values for 2 completions"):
        scored(CosineLength(100, too_few), [1, 2], [])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_length": 0}, "max_length must be a whole number, 1 or more, got 0"),
        ({"max_length": True}, "max_length must be .* got True"),
        ({"max_length": 10.0}, "max_length must be .* got 10.0"),
        ({"max_length": 10, "reward": "gsm8k_accuracy"}, "reward must be a reward function, got 'gsm8k_accuracy'"),
        ({"max_length": 10, "threshold": math.nan}, "threshold must be a finite number, got nan"),
        ({"max_length": 10, "max_value_correct": "1"}, "max_value_correct must be a finite number, got '1'"),
        ({"max_length": 10, "exceeded_value": math.inf}, "exceeded_value must be a finite number, got inf"),
    ],
)
def test_parameters_that_cannot_work_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CosineLength(**{"reward": given_scores, **parameters})


def test_a_call_without_tokens_or_with_too_few_is_an_error() -> None:
    reward = CosineLength(100, given_scores)
    with pytest.raises(RewardError, match=r"cosine_length needs 'completion_ids'.*\['completions', 'scores'\]"):
        reward(completions=["x"], scores=[1.0])
    with pytest.raises(RewardError, match="2 completions but 1 entries"):
        reward(completions=["x", "y"], completion_ids=[[1]], scores=[1.0, 1.0])


def test_it_has_a_name_says_that_it_takes_a_reward_and_pickles() -> None:
    reward = pickle.loads(pickle.dumps(CosineLength(100, given_scores)))
    assert scored(reward, [50], [1.0]) == pytest.approx([0.75])
    assert reward.__name__ == "cosine_length"
    assert reward.takes_rewards == ("reward",)
    assert repr(reward) == "CosineLength(max_length=100, reward=given_scores)"
    assert scored(reward, [], []) == []
