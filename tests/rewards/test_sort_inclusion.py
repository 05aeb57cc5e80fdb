"""`sort_inclusion` by points counted by hand, against the lecture's code where both mean the same, on hostile texts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.rewards.sort_inclusion import sort_inclusion
from trl_grpo_ext.types import SpanScore


def scored(prompt: Any, completion: Any, **parameters: Any) -> Any:
    [score] = sort_inclusion(prompts=[prompt], completions=[completion], completion_ids=[[1]], **parameters)
    assert isinstance(score, SpanScore)
    return score


@pytest.mark.parametrize(
    ("completion", "points"),
    [
        ("0 1 2 3", 4 + 3),
        ("0 2 3", 3 + 2),
        ("3 2 1 0", 4 + 0),
        ("3 1 0 2", 4 + 1),
        ("7 8 9", 0 + 2),
        ("1 1 1 1", 1 + 3),
        ("0 1 2 3 4 5 6 7 8 9", 4 + 3),  # what lies beyond the fourth place earns nothing
        ("0 0.5 1", 2 + 0),  # a decimal is in order with nothing
        ("", 0),
    ],
)
def test_numbers_that_are_there_and_pairs_in_order_are_points(completion: str, points: int) -> None:
    assert scored("3 1 0 2", completion) == points


def test_a_number_counts_as_often_as_the_prompt_has_it() -> None:
    assert scored("3 3 5", "3 3 3") == 2 + 2
    assert scored("3 3 5", "3 5") == 2 + 1


def test_spans_are_the_numbers_that_earned_one_point_or_two() -> None:
    score = scored("3 1 2", "1 9 3")
    assert score == 2 + 1
    assert score.spans == ((0, 1, 1.0), (2, 3, 1.0), (4, 5, 1.0))
    assert scored("3 1 2", "1 3").spans == ((0, 1, 1.0), (2, 3, 2.0))


def test_normalised_is_1_for_the_right_answer_alone() -> None:
    assert scored("3 1 0 2", "0 1 2 3", normalise=True) == pytest.approx(1.0)
    assert scored("3 1 0 2", "0 2 3", normalise=True) == pytest.approx(5 / 7)
    assert scored("3 1 0 2", "0 1 2 3 4", normalise=True) == pytest.approx(7 / 9)
    assert scored("3", "3", normalise=True) == 1.0


@given(data=st.data(), prompt=st.lists(st.integers(-99, 99), min_size=1, max_size=12, unique=True))
def test_for_permutations_and_distinct_answers_it_is_the_lectures(data: st.DataObject, prompt: list[int]) -> None:
    size = len(prompt)
    response = data.draw(st.lists(st.integers(-99, 99), min_size=size, max_size=size, unique=True))
    response = data.draw(st.sampled_from([response, data.draw(st.permutations(prompt))]))
    included = sum(1 for x in prompt if x in response)
    ordered = sum(1 for x, y in itertools.pairwise(response) if x <= y)
    assert scored(" ".join(map(str, prompt)), " ".join(map(str, response))) == included + ordered


@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=9), response=st.lists(st.integers(0, 9), max_size=15))
def test_only_the_right_answer_is_worth_the_most(prompt: list[int], response: list[int]) -> None:
    score = scored(" ".join(map(str, prompt)), " ".join(map(str, response)), normalise=True)
    assert 0 <= score <= 1 + 1e-12
    assert (score > 1 - 1e-9) == (response == sorted(prompt))


def test_nothing_to_sort_is_none_and_warns() -> None:
    with pytest.warns(UserWarning, match="sort_inclusion finds no number to sort at row 0"):
        assert sort_inclusion(prompts=["p"], completions=["1"]) == [None]


@pytest.mark.parametrize("completion", [None, [], 7, "\x00\ud800", [{"role": "assistant", "content": None}]])
def test_hostile_completions_score_nothing(completion: Any) -> None:
    assert scored("3 1", completion) == 0


@pytest.mark.parametrize("unit", ["1 ", "9", "1.", "-", "<answer></answer>"])
def test_a_megabyte_takes_linear_time(unit: str) -> None:
    assert 0 <= scored("3 1", unit * (1_000_000 // len(unit))) <= 3


def test_numbers_must_come_from_somewhere() -> None:
    with pytest.raises(RewardError, match=r"sort_inclusion needs the column 'numbers'"):
        sort_inclusion(completions=["1"])
    with pytest.raises(RewardError, match="'numbers' at row 0 must be a list of integers"):
        sort_inclusion(completions=["1"], numbers=[[0.5]])
