"""`sort_distance` and `sort_inclusion` by points counted by hand, against the lecture's code, and on hostile texts."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sorting.rewards import sort_distance, sort_inclusion

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.types import Parts

BOTH = pytest.mark.parametrize("reward", [sort_distance, sort_inclusion], ids=lambda reward: reward.__name__)


def scored(reward: Any, numbers: list[int], completion: Any, **parameters: Any) -> Any:
    [score] = reward(prompts=["?"], completions=[completion], completion_ids=[[1]], numbers=[numbers], **parameters)
    assert isinstance(score, Parts)
    return score


def written(numbers: Any) -> str:
    return " ".join(map(str, numbers))


def test_points_by_hand() -> None:
    for completion, places, inclusions in (
        ("7 1 2 9", 2, 2 + 2),
        ("1 2 3", 0, 3 + 2),  # the first one is missing, so no place is right
        ("0 1 2 3 4 5", 4, 4 + 3),  # what lies beyond the fourth place earns nothing
        ("1 1 1 1", 1, 1 + 3),
        ("<think>9 9 9 9</think>0 1 2", 3, 3 + 2),
        ("5 <answer>0 1</answer> 2 3", 2, 2 + 1),
        ("0 0.5 1", 1, 2 + 0),  # a decimal is in order with nothing
        ("-0 1-2 3" + "3" * 30, 3, 3 + 2),
        ([{"role": "assistant", "content": "0 1 2"}], 3, 3 + 2),
    ):
        assert scored(sort_distance, [3, 1, 0, 2], completion) == places
        assert scored(sort_inclusion, [3, 1, 0, 2], completion) == inclusions
    assert scored(sort_inclusion, [3, 3, 5], "3 3 3") == 2 + 2  # a number counts as often as the prompt has it


def test_parts_are_the_numbers_that_earned_one_point_or_two() -> None:
    def spans(reward: Any, *given: Any, **parameters: Any) -> list[tuple[Any, ...]]:
        parts = scored(reward, *given, **parameters).parts
        return [(*place[:2], part.score) for part in parts for place in part.places or ()]

    assert spans(sort_distance, [30, 10, -5], "-5 then 11 and 30") == [(0, 2, 1.0), (15, 17, 1.0)]
    assert spans(sort_inclusion, [3, 1, 2], "1 3") == [(0, 1, 1.0), (2, 3, 2.0)]
    assert spans(sort_distance, [3, 1, 0, 2], "0 1", normalise=True) == [(0, 1, 0.25), (2, 3, 0.25)]


def test_all_729_pairs_of_three_numbers_both_ways() -> None:
    lists = [list(numbers) for numbers in itertools.product(range(3), repeat=3)]
    pairs = [(prompt, response) for prompt in lists for response in lists]
    prompts, responses = [prompt for prompt, _ in pairs], [written(response) for _, response in pairs]
    places = [sum(x == y for x, y in zip(response, sorted(prompt), strict=True)) for prompt, response in pairs]
    assert sort_distance(responses, numbers=prompts) == places

    def lecture(prompt: list[int], response: list[int]) -> int:
        ordered = sum(x <= y for x, y in itertools.pairwise(response))
        return sum(x in response for x in prompt) + ordered

    lectures = [lecture(*pair) for pair in pairs]
    for score, expected in zip(sort_inclusion(responses, numbers=prompts, form="lecture"), lectures, strict=True):
        assert isinstance(score, Parts)
        assert score == expected == sum(part.score or 0.0 for part in score.parts)
    ours = sort_inclusion(responses, numbers=prompts)
    differ = [pair for pair, one, other in zip(pairs, ours, lectures, strict=True) if one != other]
    assert len(differ) == 270
    # What the difference is for: the lecture's most is also paid for answers that are not the sorted prompt.
    assert ([1, 0, 1], [0, 0, 1]) in [pair for pair, points in zip(pairs, lectures, strict=True) if points == 5]
    assert [pair for pair, points in zip(pairs, ours, strict=True) if points == 5] == [(p, sorted(p)) for p in lists]


@BOTH
@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=9), response=st.lists(st.integers(0, 9), max_size=15))
def test_only_the_right_answer_is_worth_the_most(reward: Any, prompt: list[int], response: list[int]) -> None:
    score = scored(reward, prompt, written(response), normalise=True)
    assert 0 <= score <= 1 + 1e-12
    assert (score > 1 - 1e-9) == (response == sorted(prompt))


@BOTH
def test_sorting_rewards_on_hostile_completions(reward: Any) -> None:
    for completion in (None, [], 7, "\x00\ud800", [{"role": "assistant", "content": None}], "٣ ١"):
        assert scored(reward, [3, 1], completion) == 0
    for unit in ("1 ", "9", "1.", "-", "--1", "<answer>", "</think>"):
        assert 0 <= scored(reward, [3, 1], unit * (200_000 // len(unit))) <= 3
    with pytest.raises(RewardError, match="'numbers'"):
        reward(completions=["1"], answer=["1"])
    for numbers, parameters in (([], {}), ([1], {"normalise": 1})):
        with pytest.raises(ConfigurationError):
            scored(reward, numbers, "1", **parameters)
    with pytest.raises(ConfigurationError):
        scored(sort_inclusion, [1], "1", form="loose")
