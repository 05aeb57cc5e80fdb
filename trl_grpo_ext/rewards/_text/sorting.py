"""What the two rewards of the sorting task share: the numbers of the task and those of the answer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import ConfigurationError, RewardError
from ...guard.outcomes import shown
from ...guard.parameters import column
from ...types import Span, SpanScore
from .completions import completion_text

MOST_NUMBERS = 10_000
MOST_DIGITS = 18

_NUMBER = re.compile(r"(?<![0-9])-?[0-9]+(?:\.[0-9]+)*")


class Found(NamedTuple):
    """A number of a completion. Its value is None where it is no integer, or has more than `MOST_DIGITS` digits."""

    value: int | None
    start: int
    end: int


def numbers_in(text: str, start: int = 0, end: int | None = None) -> list[Found]:
    """The first `MOST_NUMBERS` numbers of a text; a minus sign behind a digit is none. Linear in the text."""
    found: list[Found] = []
    for match in _NUMBER.finditer(text, start, len(text) if end is None else end):
        if len(found) == MOST_NUMBERS:
            break
        digits = match.group()
        whole = "." not in digits and len(digits.lstrip("-")) <= MOST_DIGITS
        found.append(Found(int(digits) if whole else None, *match.span()))
    return found


def answered_numbers(text: str) -> list[Found]:
    """The numbers of the answer: inside the last `<answer>...</answer>`, else behind the last `</think>`, else all."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start >= 0:
        return numbers_in(text, start, end)
    return numbers_in(text, max(text.rfind("</think>"), 0))


def score_sorting(
    reward: str,
    spans_of: Callable[[Sequence[int], Sequence[Found]], list[Span]],
    highest: Callable[[int], int],
    completions: Sequence[Any],
    normalise: bool,
    columns: Mapping[str, Any],
) -> list[float | None]:
    """Score a batch.

    Args:
        reward: The reward's name, for messages.
        spans_of: From the numbers to sort and those of the answer, what earned a point, or two.
        highest: The most points for so many numbers.
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
        tasks = [_whole(numbers_in(_prompt_text(prompt))) for prompt in prompts]
    if not all(tasks):
        first = tasks.index([])
        warnings.warn(f"{reward} finds no number to sort at row {first}; such completions get None.", stacklevel=3)
    scores: list[float | None] = []
    for task, completion in zip(tasks, completions, strict=True):
        if not task:
            scores.append(None)
            continue
        answer = answered_numbers(completion_text(completion))
        most = highest(max(len(task), len(answer))) if normalise else 1
        earned = spans_of(task, answer)
        spans = [(start, end, points / most) for start, end, points in earned]
        scores.append(SpanScore(sum(points for *_, points in earned) / most, spans))
    return scores


def _listed(reward: str, row: int, entry: Any) -> list[int]:
    if isinstance(entry, str):
        return _whole(numbers_in(entry))
    if hasattr(entry, "tolist"):
        entry = entry.tolist()
    if not isinstance(entry, list | tuple) or not all(isinstance(x, int) and not isinstance(x, bool) for x in entry):
        raise RewardError(
            f"{reward}: 'numbers' at row {row} must be a list of integers, or a text with them, got {shown(entry)}."
        )
    if len(entry) > MOST_NUMBERS or any(abs(x) >= 10**MOST_DIGITS for x in entry):
        raise RewardError(
            f"{reward}: 'numbers' at row {row} must be at most {MOST_NUMBERS} integers of at most {MOST_DIGITS} "
            f"digits, got {len(entry)} of them, {shown(entry[:3])}..."
        )
    return list(entry)


def _whole(found: Sequence[Found]) -> list[int]:
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
