"""`sort_distance` by points counted by hand, against the lecture's line of code, and on hostile texts."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.rewards.sort_distance import sort_distance
from trl_grpo_ext.types import SpanScore


def scored(prompt: Any, completion: Any, **parameters: Any) -> Any:
    [score] = sort_distance(prompts=[prompt], completions=[completion], completion_ids=[[1]], **parameters)
    assert isinstance(score, SpanScore)
    return score


@pytest.mark.parametrize(
    ("completion", "points"),
    [
        ("0 1 2 3", 4),
        ("0, 1, 2, 3", 4),
        ("7 1 2 9", 2),
        ("1 2 3", 0),  # the first one is missing, so no place is right
        ("3 1 0 2", 1),
        ("0 1 2 3 4 5", 4),
        ("", 0),
        ("<think>9 9 9 9</think>0 1 2", 3),
        ("5 <answer>0 1</answer> 2 3", 2),
        ("0.5 1 2 3", 3),
        ("-0 1-2 3", 4),
        ("0 1 2 3" + "3" * 30, 3),
    ],
)
def test_a_place_with_the_right_number_is_a_point(completion: str, points: int) -> None:
    assert scored("Sort 3 1 0 2.", completion) == points


def test_spans_are_the_numbers_that_earned() -> None:
    score = scored("30 10 -5", "-5 then 11 and 30")
    assert score == 2
    assert score.spans == ((0, 2, 1.0), (15, 17, 1.0))


def test_normalised_is_a_share_of_the_longer_list() -> None:
    assert scored("3 1 0 2", "0 1 2 3", normalise=True) == 1.0
    assert scored("3 1 0 2", "0 1 9 9", normalise=True) == 0.5
    assert scored("3 1 0 2", "0 1 2 3 4 5 6 7", normalise=True) == 0.5
    assert scored("3 1 0 2", "0 1", normalise=True).spans == ((0, 1, 0.25), (2, 3, 0.25))


@given(numbers=st.lists(st.tuples(st.integers(-99, 99), st.integers(-99, 99)), min_size=1, max_size=12))
def test_for_lists_of_equal_length_it_is_the_lectures(numbers: list[tuple[int, int]]) -> None:
    prompt, response = [a for a, _ in numbers], [b for _, b in numbers]
    lecture = sum(1 for x, y in zip(response, sorted(prompt), strict=True) if x == y)
    assert scored(" ".join(map(str, prompt)), " ".join(map(str, response))) == lecture


def test_numbers_come_from_the_column_or_the_last_message_of_the_user() -> None:
    messages = [
        {"role": "user", "content": "9 9"},
        {"role": "assistant", "content": "8"},
        {"role": "user", "content": [{"type": "text", "text": "2 1"}]},
    ]
    answer = [{"role": "assistant", "content": "1 2"}]
    assert scored(messages, answer) == 2
    assert scored(messages, "4 5", numbers=[[5, 4]]) == 2
    assert scored(messages, "4 5", numbers=["5, 4"]) == 2
    assert sort_distance(prompts=["2 1", "2 1"], completions=["1 2", "3 4"]) == [2, 0]


def test_nothing_to_sort_is_none_and_warns() -> None:
    with pytest.warns(UserWarning, match="finds no number to sort at row 1"):
        assert sort_distance(prompts=["1", "none"], completions=["1", "1"]) == [1, None]


@pytest.mark.parametrize("completion", [None, [], 7, "\x00\ud800", [{"role": "assistant", "content": None}], "٣ ١"])
def test_hostile_completions_score_nothing(completion: Any) -> None:
    assert scored("3 1", completion) == 0


@pytest.mark.parametrize("unit", ["1 ", "9", "1.", "-", "--1", "<answer>", "</think>", "1.2."])
def test_a_megabyte_takes_linear_time(unit: str) -> None:
    assert 0 <= scored("3 1", unit * (1_000_000 // len(unit))) <= 2


@pytest.mark.parametrize("entry", [[1.5], [True], ["1"], 5, None, [10**18], [1] * 10_001, ["\ud800"]])
def test_numbers_that_are_none_are_an_error_with_their_row(entry: Any) -> None:
    with pytest.raises(RewardError, match="'numbers' at row 1 must be"):
        sort_distance(prompts=["p"] * 2, completions=["1", "1"], numbers=[[1], entry])


def test_numbers_must_come_from_somewhere() -> None:
    with pytest.raises(RewardError, match=r"needs the column 'numbers'; the columns present are \['answer'\]"):
        sort_distance(completions=["1"], answer=["1"])
    with pytest.raises(RewardError, match="2 completions but 1 entries in 'numbers'"):
        sort_distance(completions=["1", "1"], numbers=[[1]])
    with pytest.raises(ConfigurationError, match="normalise must be true or false, got 1"):
        sort_distance(prompts=["1"], completions=["1"], normalise=1)  # type: ignore[arg-type]


def test_it_pickles_with_its_parameter() -> None:
    reward = pickle.loads(pickle.dumps(functools.partial(sort_distance, normalise=True)))
    assert reward(prompts=["2 1"], completions=["1 3"]) == [0.5]
