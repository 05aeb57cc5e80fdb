"""`SoftOverlong` by values computed by hand, against TRL's own, and with parameters that cannot work."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.rewards.soft_overlong import SoftOverlong


def penalty(reward: SoftOverlong, length: int) -> float | None:
    [value] = reward(prompts=["?"], completions=["x"], completion_ids=[[7] * length], trainer_state=None)
    return value


@pytest.mark.parametrize(
    ("length", "value"),
    [
        (0, 0.0),
        (79, 0.0),
        (80, 0.0),
        (81, -0.05),
        (85, -0.25),
        (90, -0.5),
        (99, -0.95),
        (100, -1.0),
        (101, -1.0),
        (500, -1.0),
    ],
)
def test_the_penalty_grows_over_the_cache(length: int, value: float) -> None:
    assert penalty(SoftOverlong(max_completion_length=100, cache=20), length) == value


@pytest.mark.parametrize(("length", "value"), [(99, 0.0), (100, 0.0), (101, -1.0)])
def test_without_a_cache_it_is_a_step_at_the_limit(length: int, value: float) -> None:
    assert penalty(SoftOverlong(max_completion_length=100, cache=0), length) == value


@pytest.mark.parametrize(("length", "value"), [(0, 0.0), (1, -0.01), (50, -0.5), (100, -1.0)])
def test_the_cache_may_be_the_whole_length(length: int, value: float) -> None:
    assert penalty(SoftOverlong(max_completion_length=100, cache=100), length) == value


@given(limit=st.integers(1, 300), data=st.data())
def test_it_is_trls_punishment(limit: int, data: st.DataObject) -> None:
    other_rewards = pytest.importorskip("trl.rewards.other_rewards", reason="TRL's own reward is the oracle here")
    cache = data.draw(st.integers(0, limit))
    ids = [[0] * length for length in data.draw(st.lists(st.integers(0, 400), max_size=5))]
    theirs = other_rewards.get_soft_overlong_punishment(max_completion_len=limit, soft_punish_cache=cache)
    assert SoftOverlong(max_completion_length=limit, cache=cache)(completion_ids=ids) == theirs(completion_ids=ids)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_completion_length": 0, "cache": 0}, "at least 1, got 0"),
        ({"max_completion_length": -5, "cache": 0}, "at least 1, got -5"),
        ({"max_completion_length": 100, "cache": -1}, "from 0 to max_completion_length .100., got -1"),
        ({"max_completion_length": 100, "cache": 101}, "from 0 to max_completion_length .100., got 101"),
        ({"max_completion_length": 100.0, "cache": 20}, "max_completion_length must be an integer .* got 100.0"),
        ({"max_completion_length": "100", "cache": 20}, "max_completion_length must be an integer .* got '100'"),
        ({"max_completion_length": 100, "cache": None}, "cache must be an integer .* got None"),
        ({"max_completion_length": 100, "cache": True}, "cache must be an integer .* got True"),
    ],
)
def test_parameters_that_cannot_work_are_refused_at_construction(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SoftOverlong(**parameters)


def test_a_call_without_tokens_or_with_too_few_is_an_error() -> None:
    reward = SoftOverlong(max_completion_length=100, cache=20)
    with pytest.raises(RewardError, match=r"needs 'completion_ids'.*\['completions', 'prompts'\]"):
        reward(prompts=["?"], completions=["x"])
    with pytest.raises(RewardError, match="2 completions but 1 entries"):
        reward(prompts=["?"] * 2, completions=["x"] * 2, completion_ids=[[1]])


def test_it_has_a_name_and_pickles() -> None:
    reward = pickle.loads(pickle.dumps(SoftOverlong(max_completion_length=100, cache=20)))
    assert penalty(reward, 90) == -0.5
    assert reward.__name__ == "soft_overlong"
    assert SoftOverlong.__name__ == "SoftOverlong"
    assert repr(reward) == "SoftOverlong(max_completion_length=100, cache=20)"
    assert reward(completions=[], completion_ids=[]) == []
