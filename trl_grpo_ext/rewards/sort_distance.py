"""How many places of a sorted list hold the right number?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..types import Span
from ._text.sorting import Found, score_sorting


def sort_distance(completions: Sequence[Any], *, normalise: bool = False, **columns: Any) -> list[float | None]:
    """Score one point for each place where the completion has the number that the sorted list has there.

    The first reward of the sorting task in Stanford's CS336 (spring 2025, lecture 17, `sort_distance_reward`), where it
    shows what a reward leaves out: an answer that drops its first number scores near nothing however well the rest is
    sorted. `sort_inclusion` is the other one. A completion for the numbers 3 1 0 2 scores 4 if it is `0 1 2 3`, and 2
    if it is `7 1 2 9`.

    Args:
        completions: `B` completions, strings or lists of messages. The numbers of the last `<answer>...</answer>`
            count, else those behind the last `</think>`, else all.
        normalise: Whether to divide by the number of places, of the longer of the two lists: then 1.0 is the right
            answer and nothing else, as in the sorting study of this repository.
        **columns: The other columns. The numbers to sort are the integers of `numbers` (`B` lists of integers, or
            texts), or of the last message of the user in `prompts`.

    Returns:
        `B` scores; their spans are the numbers that earned a point. None, with a warning, where there is nothing to
        sort. No completion raises, and the time is linear in its length: the first 10,000 numbers are read, and an
        integer of more than 18 digits, or a decimal, equals no number.

    Raises:
        RewardError: There is neither `numbers` nor `prompts`, or not one entry per completion, or an entry is unusable.

    Departures from the lecture, whose lists are of equal length: numbers beyond the last place neither earn nor, unless
    `normalise` is set, cost anything.
    """
    return score_sorting("sort_distance", _spans, lambda size: size, completions, normalise, columns)


# An entry without numbers to sort is refused, and the conformance kit need not try one.
sort_distance.conformance = {"required": ["numbers"]}  # type: ignore[attr-defined]


def _spans(task: Sequence[int], answer: Sequence[Found]) -> list[Span]:
    in_order = sorted(task)
    return [(got.start, got.end, 1.0) for right, got in zip(in_order, answer, strict=False) if got.value == right]
