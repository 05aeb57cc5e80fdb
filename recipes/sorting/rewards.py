"""Rewards of the sorting task of Stanford's CS336 (spring 2025, lecture 17): `sort_distance` and `sort_inclusion`.

Both read the numbers to sort from the column `numbers`, and the answer from the numbers inside the last
`<answer>...</answer>`, else after the last `</think>`, else in the whole completion. A score's parts are the numbers
that earned something, worth their points. Time is linear in the completion; its first 10,000 numbers are read.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.guard.messages import completion_text
from trl_grpo_ext.guard.parameters import checked_choice, checked_flag, column
from trl_grpo_ext.types import Part, Parts, Span

_MOST_NUMBERS = 10_000
_MOST_DIGITS = 18
_NUMBER = re.compile(r"(?<![0-9])-?[0-9]+(?:\.[0-9]+)*")  # a minus after a digit is not a sign


class _Found(NamedTuple):
    """A number of a completion; its value is None if it is a decimal, or has more than `_MOST_DIGITS` digits."""

    value: int | None
    start: int
    end: int


def sort_distance(completions: Sequence[Any], *, normalise: bool = False, **columns: Any) -> list[float | None]:
    """Score one point for each position where the completion has the same number as the sorted list.

    The lecture's `sort_distance_reward`. It shows what a reward can miss: an answer without its first number scores
    almost nothing, however well the rest is sorted. For the numbers 3 1 0 2, `0 1 2 3` scores 4, and `7 1 2 9` scores
    2. With `normalise` the points are divided by the length of the longer of the two lists.
    """

    def spans(task: Sequence[int], answer: Sequence[_Found]) -> list[Span]:
        pairs = zip(sorted(task), answer, strict=False)
        return [(got.start, got.end, 1.0) for right, got in pairs if got.value == right]

    return _scores("sort_distance", spans, lambda size: size, completions, normalise, columns)


def sort_inclusion(
    completions: Sequence[Any], *, normalise: bool = False, form: str = "bounded", **columns: Any
) -> list[float | None]:
    """Score one point for each number of the prompt that occurs, and one for each adjacent pair in order.

    The lecture's `sort_inclusion_ordering_reward`: denser than `sort_distance`, since it pays for sorted parts at any
    position. The right answer to `n` numbers scores `2n - 1`, by which `normalise` divides.

    In the form "bounded" a number counts at most as often as in the prompt, and pairs count only among the first `n`
    numbers, so a long ascending list earns nothing extra. The form "lecture" has neither bound: for the numbers 1 1 2
    the answer `1 2 2` scores the maximum of 5 there, but 4 in ours.
    """
    spans_of = _FORMS[checked_choice("sort_inclusion: form", form, tuple(_FORMS))]
    return _scores("sort_inclusion", spans_of, lambda size: 2 * size - 1, completions, normalise, columns)


def _bounded(task: Sequence[int], answer: Sequence[_Found]) -> list[Span]:
    left = Counter(task)
    before = None
    spans = []
    for place, got in enumerate(answer):
        points = 0.0
        if got.value is not None:
            if left[got.value] > 0:
                left[got.value] -= 1
                points += 1.0
            points += before is not None and before <= got.value and place < len(task)
        before = got.value
        spans += [(got.start, got.end, points)] if points else []
    return spans


def _as_lectured(task: Sequence[int], answer: Sequence[_Found]) -> list[Span]:
    """The first such number of the answer earns the points of all its equals."""
    wanted = Counter(task)
    before = None
    spans = []
    for got in answer:
        points = 0.0
        if got.value is not None:
            points += wanted.pop(got.value, 0) + (before is not None and before <= got.value)
        before = got.value
        spans += [(got.start, got.end, points)] if points else []
    return spans


_FORMS = {"bounded": _bounded, "lecture": _as_lectured}


def _scores(
    reward: str,
    spans_of: Callable[[Sequence[int], Sequence[_Found]], list[Span]],
    highest: Callable[[int], int],
    completions: Sequence[Any],
    normalise: bool,
    columns: dict[str, Any],
) -> list[float | None]:
    """Score a batch; `highest` gives the maximum for a number of numbers."""
    checked_flag(f"{reward}: normalise", normalise)
    scores: list[float | None] = []
    for task, completion in zip(column(reward, "numbers", columns, len(completions)), completions, strict=True):
        if not task or not all(isinstance(number, int) for number in task):
            raise ConfigurationError(f"{reward}: an entry of 'numbers' must be a list of integers, got {task!r:.80}.")
        answer = _answered(completion_text(completion))
        most = highest(max(len(task), len(answer))) if normalise else 1
        earned = spans_of(task, answer)
        parts = [Part("number", points / most, places=(start, end)) for start, end, points in earned]
        scores.append(Parts(parts, sum(points for *_, points in earned) / most))
    return scores


def _answered(text: str) -> list[_Found]:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0:
        start = max(text.rfind("</think>"), 0)
        end = len(text)
    found: list[_Found] = []
    for match in _NUMBER.finditer(text, start, end):
        if len(found) == _MOST_NUMBERS:
            break
        whole = "." not in match[0] and len(match[0].lstrip("-")) <= _MOST_DIGITS
        found.append(_Found(int(match[0]) if whole else None, *match.span()))
    return found
