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


def test_the_overlong_penalty_grows_over_the_cache() -> None:
    for cache, penalties in {
        20: {0: 0, 79: 0, 80: 0, 81: -0.05, 90: -0.5, 99: -0.95, 100: -1, 101: -1, 500: -1},
        0: {99: 0, 100: 0, 101: -1},  # a step at the limit
    }.items():
        reward = SoftOverlong(max_completion_length=100, cache=cache)
        assert scored(reward, [*penalties], trainer_state=None) == [*penalties.values()]


@given(limit=st.integers(1, 300), data=st.data())
def test_soft_overlong_is_trls_punishment(limit: int, data: st.DataObject) -> None:
    other_rewards = pytest.importorskip("trl.rewards.other_rewards", reason="TRL's own reward is the oracle here")
    cache = data.draw(st.integers(0, limit))
    ids = [[0] * length for length in data.draw(st.lists(st.integers(0, 400), max_size=5))]
    theirs = other_rewards.get_soft_overlong_punishment(max_completion_len=limit, soft_punish_cache=cache)
    assert SoftOverlong(max_completion_length=limit, cache=cache)(completion_ids=ids) == theirs(completion_ids=ids)


def test_nearness_to_the_target_by_hand() -> None:
    for reward, scores in (
        (LengthTarget(100, alpha=0.01), {100: 0.0, 99: -0.01, 150: -0.5, 0: -1.0}),
        (LengthTarget(1000), {1100: -0.03}),  # the defaults are the paper's
        (LengthTarget(1000, mode="max"), {1000: 0.5, 1100: 0.47}),
        (LengthTarget(100, mode="max", alpha=0.01), {90: 0.6, 50: 1, 49: 1, 0: 1, 120: 0.3, 150: 0, 151: 0}),
    ):
        assert scored(reward, [*scores]) == pytest.approx([*scores.values()])
    by_row = scored(LengthTarget(alpha=0.1), [5, 5, 5, 5], target_length=[5, 4.0, None, math.nan])
    assert by_row == pytest.approx([0, -0.1, None, None])
    assert scored(LengthTarget(column="tokens", alpha=0.1), [5], tokens=[3]) == pytest.approx([-0.2])


@pytest.mark.parametrize("entry", [-1, True, "100", 2.5, math.inf, [3], "\ud800" * 500])
def test_length_target_refuses_wrong_targets(entry: Any) -> None:
    with pytest.raises(RewardError, match=r"'target_length' .*row 1") as caught:
        scored(LengthTarget(), [1, 1], target_length=[1, entry])
    assert len(str(caught.value).encode()) < 500
