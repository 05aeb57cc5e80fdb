"""Rewards of the sorting task of Stanford's CS336 (spring 2025, lecture 17): `sort_distance` and `sort_inclusion`.

They read the numbers of the task and of the answer in the same way.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import ConfigurationError, RewardError
from ..guard.outcomes import shown
from ..guard.parameters import checked_choice, column
from ..types import Span, SpanScore
from ._text.completions import completion_text

_MOST_NUMBERS = 10_000
_MOST_DIGITS = 18

_NUMBER = re.compile(r"(?<![0-9])-?[0-9]+(?:\.[0-9]+)*")


def sort_distance(completions: Sequence[Any], *, normalise: bool = False, **columns: Any) -> list[float | None]:
    """Score one point for each position where the completion has the same number as the sorted list.

    The first reward of the sorting task in Stanford's CS336 (spring 2025, lecture 17, `sort_distance_reward`), where it
    shows what a reward can miss: an answer without its first number scores almost nothing, however well the rest is
    sorted. `sort_inclusion` is the second one. For the numbers 3 1 0 2, the completion `0 1 2 3` scores 4, and
    `7 1 2 9` scores 2.

    Args:
        completions: `B` completions, strings or lists of messages. The numbers of the last `<answer>...</answer>`
            count, else those after the last `</think>`, else all.
        normalise: Whether to divide by the length of the longer of the two lists: then only the right answer scores
            1.0, as in the sorting study of this repository.
        **columns: The other columns. The numbers to sort are the integers of `numbers` (`B` lists of integers, or
            texts), or of the last message of the user in `prompts`.

    Returns:
        `B` scores; their spans are the numbers that earned a point. None, with a warning, where there is nothing to
        sort. No completion raises, and the time is linear in its length: the first 10,000 numbers are read, and an
        integer of more than 18 digits, or a decimal, equals no number.

    Raises:
        RewardError: There is neither `numbers` nor `prompts`, or not one entry per completion, or an entry is unusable.

    Departures from the lecture, whose lists have equal length: surplus numbers earn nothing and, unless `normalise` is
    set, cost nothing.
    """
    return _scores("sort_distance", _places, lambda size: size, completions, normalise, columns)


def _places(task: Sequence[int], answer: Sequence[_Found]) -> list[Span]:
    in_order = sorted(task)
    return [(got.start, got.end, 1.0) for right, got in zip(in_order, answer, strict=False) if got.value == right]


def sort_inclusion(
    completions: Sequence[Any], *, normalise: bool = False, form: str = "bounded", **columns: Any
) -> list[float | None]:
    """Score one point for each number of the prompt that occurs, and one for each adjacent pair in order.

    The second reward of the sorting task in Stanford's CS336 (spring 2025, lecture 17,
    `sort_inclusion_ordering_reward`): denser than `sort_distance`, since it pays for sorted parts at any position. The
    right answer to `n` numbers scores `2n - 1`; for the numbers 3 1 0 2, `0 2 3` scores 3 + 2.

    Args:
        completions: `B` completions, strings or lists of messages. The numbers of the last `<answer>...</answer>`
            count, else those after the last `</think>`, else all.
        normalise: Whether to divide by `2n - 1`, with `n` the length of the longer of the two lists: then the right
            answer scores 1.0 and, in form "bounded", no other does.
        form: "bounded", as below, or "lecture", the lecture's points: one for each number of the prompt that occurs in
            the answer at all, and one for each adjacent pair in order. They differ if numbers repeat: for the numbers
            1 1 2 the answer `1 2 2` scores the maximum of 5 in the lecture's form, but 4 in ours.
        **columns: The other columns. The numbers to sort are the integers of `numbers` (`B` lists of integers, or
            texts), or of the last message of the user in `prompts`.

    Returns:
        `B` scores; their spans are the numbers that earned a point, or two. None, with a warning, where there is
        nothing to sort. No completion raises, and the time is linear in its length: the first 10,000 numbers are read,
        and an integer of more than 18 digits, or a decimal, equals no number and is in order with none.

    Raises:
        ConfigurationError: `form` is neither.
        RewardError: There is neither `numbers` nor `prompts`, or not one entry per completion, or an entry is unusable.

    Departures from the lecture, in form "bounded": a number counts at most as often as in the prompt, and pairs count
    only among the first `n` numbers, so a long ascending list earns nothing extra. The lecture leaves both open to
    abuse. The sorting study of this repository divides numbers by `n` and pairs by `n - 1` instead, for a sum of 2.
    """
    spans_of = _FORMS[checked_choice("sort_inclusion: form", form, tuple(_FORMS))]
    return _scores("sort_inclusion", spans_of, lambda size: 2 * size - 1, completions, normalise, columns)


def _inclusions(task: Sequence[int], answer: Sequence[_Found]) -> list[Span]:
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


def _lecture_inclusions(task: Sequence[int], answer: Sequence[_Found]) -> list[Span]:
    """Points per number of the prompt; the first such number of the answer earns those of all its equals."""
    wanted, before, spans = Counter(task), None, []
    for got in answer:
        points = 0.0
        if got.value is not None:
            points += wanted.pop(got.value, 0)
            points += before is not None and before <= got.value
        before = got.value
        if points:
            spans.append((got.start, got.end, points))
    return spans


_FORMS = {"bounded": _inclusions, "lecture": _lecture_inclusions}

# An entry without numbers to sort is refused, and the conformance kit need not try one.
sort_distance.conformance = {"required": ["numbers"]}  # type: ignore[attr-defined]
sort_inclusion.conformance = {"required": ["numbers"]}  # type: ignore[attr-defined]


class _Found(NamedTuple):
    """A number of a completion. Its value is None if it is not an integer, or has more than `_MOST_DIGITS` digits."""

    value: int | None
    start: int
    end: int


def _numbers_in(text: str, start: int = 0, end: int | None = None) -> list[_Found]:
    """The first `_MOST_NUMBERS` numbers of a text; a minus after a digit is not a sign. Linear in the text."""
    found: list[_Found] = []
    for match in _NUMBER.finditer(text, start, len(text) if end is None else end):
        if len(found) == _MOST_NUMBERS:
            break
        digits = match.group()
        whole = "." not in digits and len(digits.lstrip("-")) <= _MOST_DIGITS
        found.append(_Found(int(digits) if whole else None, *match.span()))
    return found


def _answered_numbers(text: str) -> list[_Found]:
    """The numbers of the answer: inside the last `<answer>...</answer>`, else after the last `</think>`, else all."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start >= 0:
        return _numbers_in(text, start, end)
    return _numbers_in(text, max(text.rfind("</think>"), 0))


def _scores(
    reward: str,
    spans_of: Callable[[Sequence[int], Sequence[_Found]], list[Span]],
    highest: Callable[[int], int],
    completions: Sequence[Any],
    normalise: bool,
    columns: Mapping[str, Any],
) -> list[float | None]:
    """Score a batch.

    Args:
        reward: The reward's name, for messages.
        spans_of: Returns what earned points, from the numbers to sort and those of the answer.
        highest: Returns the maximum score for a number of numbers.
        completions: `B` completions.
        normalise: Whether to divide by `highest` of the longer of the two lists.
        columns: The other columns: `numbers`, else `prompts`.
    """
    if not isinstance(normalise, bool):
        raise ConfigurationError(f"{reward}: normalise must be true or false, got {normalise!r}.")
    advice = "The numbers to sort are read from 'numbers', or from the prompts."
    if columns.get("numbers") is not None:
        entries = column(reward, "numbers", columns, len(completions))
        tasks = [_listed(reward, row, entry) for row, entry in enumerate(entries)]
    else:
        if columns.get("prompts") is None:
            column(reward, "numbers", columns, len(completions), advice)
        prompts = column(reward, "prompts", columns, len(completions))
        tasks = [_whole(_numbers_in(_prompt_text(prompt))) for prompt in prompts]
    if not all(tasks):
        first = tasks.index([])
        warnings.warn(f"{reward} finds no number to sort at row {first}; such completions get None.", stacklevel=3)
    scores: list[float | None] = []
    for task, completion in zip(tasks, completions, strict=True):
        if not task:
            scores.append(None)
            continue
        answer = _answered_numbers(completion_text(completion))
        most = highest(max(len(task), len(answer))) if normalise else 1
        earned = spans_of(task, answer)
        spans = [(start, end, points / most) for start, end, points in earned]
        scores.append(SpanScore(sum(points for *_, points in earned) / most, spans))
    return scores


def _listed(reward: str, row: int, entry: Any) -> list[int]:
    if isinstance(entry, str):
        return _whole(_numbers_in(entry))
    if hasattr(entry, "tolist"):
        entry = entry.tolist()
    if not isinstance(entry, list | tuple) or not all(isinstance(x, int) and not isinstance(x, bool) for x in entry):
        raise RewardError(
            f"{reward}: 'numbers' at row {row} must be a list of integers, or a text with them, got {shown(entry)}."
        )
    if len(entry) > _MOST_NUMBERS or any(abs(x) >= 10**_MOST_DIGITS for x in entry):
        raise RewardError(
            f"{reward}: 'numbers' at row {row} must be at most {_MOST_NUMBERS} integers of at most {_MOST_DIGITS} "
            f"digits, got {len(entry)} of them, {shown(entry[:3])}..."
        )
    return list(entry)


def _whole(found: Sequence[_Found]) -> list[int]:
    return [number.value for number in found if number.value is not None]


def _prompt_text(prompt: Any) -> str:
    """The last message of the user, or the prompt itself."""
    if isinstance(prompt, str):
        return prompt
    messages = [m for m in prompt if isinstance(m, Mapping)] if isinstance(prompt, list | tuple) else []
    for message in reversed(messages):
        if message.get("role") == "user":
            return completion_text([{**message, "role": "assistant"}])
    return ""
