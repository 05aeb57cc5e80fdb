"""Does the completion think first, inside `<think>` tags, and then answer?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..types import Span, SpanScore
from ._text.completions import completion_text

_OPEN, _CLOSE = "<think>", "</think>"
_TAG = re.compile(f"{_OPEN}|{_CLOSE}")


def think_format(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """Score 1.0 where the completion is `<think>...</think>` followed by an answer, 0.0 where it is not.

    The completion must begin with `<think>` (not even white space before it), must not open it a second time, and must
    close it. What follows the first `</think>` must hold more than white space and further `</think>` tags. The
    thoughts themselves may be empty.

    Args:
        completions: `B` completions, strings or lists of messages.
        **kwargs: The other columns; not used.

    Returns:
        `B` scores, 1.0 or 0.0. Their spans are the tags that are in the text, which share the score equally. No
        completion raises, and the time is linear in its length.

    Departures from TRL's `think_format_reward`: an answer is required after the thoughts; completions may also be
    strings; of several messages the last assistant message with text counts, not the first message.
    """
    return [_scored(completion_text(completion)) for completion in completions]


def _scored(text: str) -> SpanScore:
    value = float(_thinks_then_answers(text))
    tags = [match.span() for match in _TAG.finditer(text)]
    spans: list[Span] = [(start, end, value / len(tags)) for start, end in tags]
    return SpanScore(value, spans)


def _thinks_then_answers(text: str) -> bool:
    if not text.startswith(_OPEN) or text.find(_OPEN, len(_OPEN)) >= 0:
        return False
    _, closed, answer = text.partition(_CLOSE)
    return bool(closed and answer.replace(_CLOSE, "").strip())
