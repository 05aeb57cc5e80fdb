"""Rewards by the form of a completion: `think_format` and `tag_format`. Their places are the tags."""

import re
from collections.abc import Sequence
from typing import Any

from ..guard.messages import completion_text
from ..types import Part, Parts, Place
from ._text.final_answer import extract_final_answer

_OPEN = "<think>"
_CLOSE = "</think>"
_TAG = re.compile(f"{_OPEN}|{_CLOSE}")
_TAGS = (_OPEN, _CLOSE, "<answer>", "</answer>")


def think_format(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Score 1.0 where the completion is `<think>...</think>` followed by an answer, 0.0 where it is not.

    The completion must begin with `<think>` (without white space before it), open it only once, and close it. After the
    first `</think>` there must be more than white space and further `</think>` tags. The thoughts may be empty.

    Returns:
        `B` scores, 1.0 or 0.0, with one part, `thoughts`; its places are the tags that are in the text.

    Departures from TRL's `think_format_reward`: an answer is required after the thoughts; completions may also be
    strings; of several messages the last assistant message with text counts, not the first message.
    """
    scores: list[float | None] = []
    for text in map(completion_text, completions):
        _, closed, answer = text.partition(_CLOSE)
        opened = text.startswith(_OPEN) and text.count(_OPEN) == 1
        value = float(opened and bool(closed) and bool(answer.replace(_CLOSE, "").strip()))
        scores.append(Parts({"thoughts": (value, [match.span() for match in _TAG.finditer(text)])}))
    return scores


def tag_format(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Score 0.1 for each of `<think>`, `</think>`, `<answer>`, `</answer>` in order, 0.1 for a number in the answer.

    A dense companion of `think_format` for models that don't know the format yet. A tag earns its 0.1 if it occurs
    exactly once and stands after every tag before it in the list that has earned: `<answer>18</answer>` alone scores
    0.3, and `</think><think>` 0.1. The last 0.1 is for a number (as `gsm8k_accuracy` reads it) between the answer's
    tags, if both have earned. Other text does not matter.

    Returns:
        `B` scores from 0.0 to 0.5, with a part for each tag and one for the number, 1.0 where it has earned its 0.1.
        Their places are what earned: the tags, and the inside of the answer.
    """
    scores: list[float | None] = []
    for earned in (_earning(completion_text(completion)) for completion in completions):
        parts = [Part(name, float(name in earned), 0.1, earned.get(name)) for name in (*_TAGS, "number")]
        scores.append(Parts(parts, len(earned) / 10))
    return scores


def _earning(text: str) -> dict[str, Place]:
    earned = {}
    position = 0
    for tag in _TAGS:
        found = text.find(tag, position)
        if found >= 0 and text.count(tag) == 1:
            position = found + len(tag)
            earned[tag] = Place(found, position)
    if "<answer>" in earned and "</answer>" in earned:
        start = earned["<answer>"].end
        end = earned["</answer>"].start
        inside = text[start:end]
        if extract_final_answer(inside) is not None or extract_final_answer(f"<answer>{inside}") is not None:
            earned["number"] = Place(start, end)
    return earned
