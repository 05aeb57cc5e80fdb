"""`sort_distance` and `sort_inclusion` by points counted by hand, against the lecture's code, and on hostile texts."""

from __future__ import annotations

import functools
import itertools
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.rewards.sorting import sort_distance, sort_inclusion
from trl_grpo_ext.types import SpanScore

BOTH = pytest.mark.parametrize("reward", [sort_distance, sort_inclusion], ids=lambda reward: reward.__name__)


def scored(reward: Any, prompt: Any, completion: Any, **parameters: Any) -> Any:
    [score] = reward(prompts=[prompt], completions=[completion], completion_ids=[[1]], **parameters)
    assert isinstance(score, SpanScore)
    return score


def written(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


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
    assert scored(sort_distance, "Sort 3 1 0 2.", completion) == points


@pytest.mark.parametrize(
    ("prompt", "completion", "points"),
    [
        ("3 1 0 2", "0 1 2 3", 4 + 3),
        ("3 1 0 2", "0 2 3", 3 + 2),
        ("3 1 0 2", "3 2 1 0", 4 + 0),
        ("3 1 0 2", "3 1 0 2", 4 + 1),
        ("3 1 0 2", "7 8 9", 0 + 2),
        ("3 1 0 2", "1 1 1 1", 1 + 3),
        ("3 1 0 2", "0 1 2 3 4 5 6 7 8 9", 4 + 3),  # what lies beyond the fourth place earns nothing
        ("3 1 0 2", "0 0.5 1", 2 + 0),  # a decimal is in order with nothing
        ("3 1 0 2", "", 0),
        ("3 3 5", "3 3 3", 2 + 2),  # a number counts as often as the prompt has it
        ("3 3 5", "3 5", 2 + 1),
    ],
)
def test_numbers_that_are_there_and_pairs_in_order_are_points(prompt: str, completion: str, points: int) -> None:
    assert scored(sort_inclusion, prompt, completion) == points


def test_spans_are_the_numbers_that_earned_one_point_or_two() -> None:
    for reward, prompt, completion, spans in (
        (sort_distance, "30 10 -5", "-5 then 11 and 30", ((0, 2, 1.0), (15, 17, 1.0))),
        (sort_inclusion, "3 1 2", "1 9 3", ((0, 1, 1.0), (2, 3, 1.0), (4, 5, 1.0))),
        (sort_inclusion, "3 1 2", "1 3", ((0, 1, 1.0), (2, 3, 2.0))),
    ):
        score = scored(reward, prompt, completion)
        assert (score, score.spans) == (sum(points for *_, points in spans), spans)


def test_normalised_is_a_share_of_the_longer_list() -> None:
    shares = {"0 1 2 3": (1, 1), "0 1 9 9": (0.5, 5 / 7), "0 2 3": (0.25, 5 / 7), "0 1 2 3 4": (4 / 5, 7 / 9)}
    for completion, (distance, inclusion) in shares.items():
        assert scored(sort_distance, "3 1 0 2", completion, normalise=True) == pytest.approx(distance)
        assert scored(sort_inclusion, "3 1 0 2", completion, normalise=True) == pytest.approx(inclusion)
    assert scored(sort_distance, "3 1 0 2", "0 1", normalise=True).spans == ((0, 1, 0.25), (2, 3, 0.25))
    assert scored(sort_inclusion, "3", "3", normalise=True) == 1.0


@given(numbers=st.lists(st.tuples(st.integers(-99, 99), st.integers(-99, 99)), min_size=1, max_size=12))
def test_for_lists_of_equal_length_the_distance_is_the_lectures(numbers: list[tuple[int, int]]) -> None:
    prompt, response = [a for a, _ in numbers], [b for _, b in numbers]
    lecture = sum(1 for x, y in zip(response, sorted(prompt), strict=True) if x == y)
    assert scored(sort_distance, written(prompt), written(response)) == lecture


@given(data=st.data(), prompt=st.lists(st.integers(-99, 99), min_size=1, max_size=12, unique=True))
def test_for_permutations_and_distinct_answers_the_inclusion_is_the_lectures(
    data: st.DataObject, prompt: list[int]
) -> None:
    size = len(prompt)
    response = data.draw(st.lists(st.integers(-99, 99), min_size=size, max_size=size, unique=True))
    response = data.draw(st.sampled_from([response, data.draw(st.permutations(prompt))]))
    included = sum(1 for x in prompt if x in response)
    ordered = sum(1 for x, y in itertools.pairwise(response) if x <= y)
    assert scored(sort_inclusion, written(prompt), written(response)) == included + ordered


def lecture_inclusion(prompt: list[int], response: list[int]) -> int:
    """A point for each number of the prompt that occurs in the response, and one for each ordered pair of it."""
    included = sum(any(x == y for y in response) for x in prompt)
    return included + sum(response[i] <= response[i + 1] for i in range(len(response) - 1))


def test_all_729_pairs_of_three_numbers_both_ways() -> None:
    lists = [list(numbers) for numbers in itertools.product(range(3), repeat=3)]
    pairs = [(prompt, response) for prompt in lists for response in lists]
    prompts, responses = ([written(pair[side]) for pair in pairs] for side in (0, 1))
    assert len(pairs) == 729
    places = [sum(x == y for x, y in zip(response, sorted(prompt), strict=True)) for prompt, response in pairs]
    assert sort_distance(responses, prompts=prompts) == places

    lecture = [lecture_inclusion(*pair) for pair in pairs]
    for score, expected in zip(sort_inclusion(responses, prompts=prompts, form="lecture"), lecture, strict=True):
        assert isinstance(score, SpanScore)
        assert score == expected == sum(points for *_, points in score.spans)
    ours = sort_inclusion(responses, prompts=prompts)
    differ = [pair for pair, one, other in zip(pairs, ours, lecture, strict=True) if one != other]
    assert len(differ) == 270
    assert all(len(set(prompt)) < 3 for prompt, _ in differ)  # with a repeated number in the prompt
    # What the difference is for: the lecture's most is also paid for answers that are not the sorted prompt.
    most = [pair for pair, points in zip(pairs, lecture, strict=True) if points == 5]
    assert ([1, 0, 1], [0, 0, 1]) in most
    assert [pair for pair, points in zip(pairs, ours, strict=True) if points == 5] == [(p, sorted(p)) for p in lists]


def test_the_form_is_one_of_two() -> None:
    with pytest.raises(ConfigurationError, match="sort_inclusion: form"):
        sort_inclusion(["1"], prompts=["1"], form="loose")


@BOTH
@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=9), response=st.lists(st.integers(0, 9), max_size=15))
def test_only_the_right_answer_is_worth_the_most(reward: Any, prompt: list[int], response: list[int]) -> None:
    score = scored(reward, written(prompt), written(response), normalise=True)
    assert 0 <= score <= 1 + 1e-12
    assert (score > 1 - 1e-9) == (response == sorted(prompt))


def test_numbers_come_from_the_column_or_the_last_message_of_the_user() -> None:
    messages = [
        {"role": "user", "content": "9 9"},
        {"role": "assistant", "content": "8"},
        {"role": "user", "content": [{"type": "text", "text": "2 1"}]},
    ]
    answer = [{"role": "assistant", "content": "1 2"}]
    assert scored(sort_distance, messages, answer) == 2
    assert scored(sort_distance, messages, "4 5", numbers=[[5, 4]]) == 2
    assert scored(sort_distance, messages, "4 5", numbers=["5, 4"]) == 2
    assert sort_distance(prompts=["2 1", "2 1"], completions=["1 2", "3 4"]) == [2, 0]


@BOTH
def test_nothing_to_sort_is_none_and_warns(reward: Any) -> None:
    with pytest.warns(UserWarning, match=f"{reward.__name__} finds no number to sort at row 1"):
        assert reward(prompts=["1", "none"], completions=["1", "1"]) == [1, None]


@BOTH
@pytest.mark.parametrize("completion", [None, [], 7, "\x00\ud800", [{"role": "assistant", "content": None}], "٣ ١"])
def test_hostile_completions_score_nothing(reward: Any, completion: Any) -> None:
    assert scored(reward, "3 1", completion) == 0


@BOTH
@pytest.mark.parametrize("unit", ["1 ", "9", "1.", "-", "--1", "<answer>", "<answer></answer>", "</think>", "1.2."])
def test_a_megabyte_takes_linear_time(reward: Any, unit: str) -> None:
    assert 0 <= scored(reward, "3 1", unit * (1_000_000 // len(unit))) <= 3


@BOTH
def test_numbers_that_are_missing_or_none_are_an_error(reward: Any) -> None:
    for entry in ([1.5], [True], ["1"], 5, None, [10**18], [1] * 10_001, ["\ud800"]):
        with pytest.raises(RewardError, match="'numbers' at row 1 must be"):
            reward(prompts=["p"] * 2, completions=["1", "1"], numbers=[[1], entry])
    with pytest.raises(RewardError, match=r"needs the column 'numbers'; the columns present are \['answer'\]"):
        reward(completions=["1"], answer=["1"])
    with pytest.raises(RewardError, match="2 completions but 1 entries in 'numbers'"):
        reward(completions=["1", "1"], numbers=[[1]])
    with pytest.raises(ConfigurationError, match=f"{reward.__name__}: normalise must be true or false, got 1"):
        reward(prompts=["1"], completions=["1"], normalise=1)


@BOTH
def test_it_pickles_with_its_parameter(reward: Any) -> None:
    copy = pickle.loads(pickle.dumps(functools.partial(reward, normalise=True)))
    assert copy(prompts=["2 1"], completions=["1 2"]) == [1.0]
