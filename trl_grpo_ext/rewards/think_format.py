"""Does the completion think first, inside `<think>` tags, and then answer?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .text import completion_text

_OPEN, _CLOSE = "<think>", "</think>"


def think_format(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """Score 1.0 where the completion is `<think>...</think>` followed by an answer, 0.0 where it is not.

    The completion must begin with `<think>` (not even white space before it), must not open it a second time, and must
    close it. What follows the first `</think>` must hold more than white space and further `</think>` tags. The
    thoughts themselves may be empty.

    Args:
        completions: `B` completions, strings or lists of messages.
        **kwargs: The other columns; not used.

    Returns:
        `B` scores, 1.0 or 0.0. No completion raises, and the time is linear in its length.

    Departures from TRL's `think_format_reward`: an answer is required after the thoughts; completions may also be
    strings; of several messages the last assistant message with text counts, not the first message.
    """
    return [float(_thinks_then_answers(completion_text(completion))) for completion in completions]


def _thinks_then_answers(text: str) -> bool:
    if not text.startswith(_OPEN) or text.find(_OPEN, len(_OPEN)) >= 0:
        return False
    _, closed, answer = text.partition(_CLOSE)
    return bool(closed and answer.replace(_CLOSE, "").strip())
