"""How many of the numbers are there, and how many neighbours are in order?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..types import Span
from ._text.sorting import Found, score_sorting


def sort_inclusion(completions: Sequence[Any], *, normalise: bool = False, **columns: Any) -> list[float | None]:
    """Score one point for each number of the prompt that is there, and one for each neighbouring pair in order.

    The second reward of the sorting task in Stanford's CS336 (spring 2025, lecture 17,
    `sort_inclusion_ordering_reward`): denser than `sort_distance`, for it pays what is sorted wherever it stands. The
    right answer to `n` numbers scores `2n - 1`; `0 2 3` for the numbers 3 1 0 2 scores 3 + 2.

    Args:
        completions: `B` completions, strings or lists of messages. The numbers of the last `<answer>...</answer>`
            count, else those behind the last `</think>`, else all.
        normalise: Whether to divide by `2n - 1`, with `n` the length of the longer of the two lists: then 1.0 is the
            right answer and nothing else.
        **columns: The other columns. The numbers to sort are the integers of `numbers` (`B` lists of integers, or
            texts), or of the last message of the user in `prompts`.

    Returns:
        `B` scores; their spans are the numbers that earned a point, or two. None, with a warning, where there is
        nothing to sort. No completion raises, and the time is linear in its length: the first 10,000 numbers are read,
        and an integer of more than 18 digits, or a decimal, equals no number and is in order with none.

    Raises:
        RewardError: There is neither `numbers` nor `prompts`, or not one entry per completion, or an entry is unusable.

    Departures from the lecture, which leaves both open to abuse: a number counts as often as the prompt has it, and
    pairs count among the first `n` numbers only, so that a long ascending list earns nothing by its length. The sorting
    study of this repository divides numbers by `n` and pairs by `n - 1`, for a sum of 2, instead.
    """
    return score_sorting("sort_inclusion", _spans, lambda size: 2 * size - 1, completions, normalise, columns)


# An entry without numbers to sort is refused, and the conformance kit need not try one.
sort_inclusion.conformance = {"required": ["numbers"]}  # type: ignore[attr-defined]


def _spans(task: Sequence[int], answer: Sequence[Found]) -> list[Span]:
    left, before, spans = Counter(task), None, []
    for place, got in enumerate(answer):
        points = 0.0
        if got.value is not None:
            if left[got.value] > 0:
                left[got.value] -= 1
                points += 1.0
            if before is not None and before <= got.value and place < len(task):
                points += 1.0
        before = got.value
        if points:
            spans.append((got.start, got.end, points))
    return spans
