"""`soft_overlong` and `length_target` by values computed by hand, and against TRL's own."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.rewards.lengths import LengthTarget, SoftOverlong


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
    ],
)
def test_nearness_to_the_target_by_hand(reward: LengthTarget, lengths: list[int], scores: list[float]) -> None:
    assert scored(reward, lengths) == pytest.approx(scores)


def test_targets_come_from_a_column() -> None:
    reward = LengthTarget(alpha=0.1)
    assert scored(reward, [5, 5, 5, 5], target_length=[5, 4.0, None, math.nan]) == pytest.approx([0, -0.1, None, None])
    assert scored(LengthTarget(column="tokens", alpha=0.1), [5], tokens=[3]) == pytest.approx([-0.2])


@pytest.mark.parametrize("entry", [-1, True, "100", 2.5, math.inf, [3], "\ud800" * 500])
def test_length_target_refuses_wrong_targets(entry: Any) -> None:
    with pytest.raises(RewardError, match=r"'target_length' .*row 1") as caught:
        scored(LengthTarget(), [1, 1], target_length=[1, entry])
    assert len(str(caught.value).encode()) < 500
