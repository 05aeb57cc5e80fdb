"""The two rewards of the tutorial of `configs/smollm2_1.7b_tutorial.yaml`, as its code has them.

A completion counts if it has the form, from its very beginning:

    <think> ... </think> ... <answer> no digits, digits, no digits </answer>

where `...` is anything, and whatever follows `</answer>` is free. So "1,234", "18.0" and "6 and 18" have not the form,
"-18" is read as 18, and white space before `<think>` is too much. `gsm8k_accuracy` and `tag_format` are the rewards of
this package for the same task; they read many more ways to answer.
"""

import re
from collections.abc import Sequence
from typing import Any

from trl_grpo_ext.guard.messages import completion_text
from trl_grpo_ext.guard.parameters import column
from trl_grpo_ext.rewards._text.final_answer import parse_reference

_DIGITS = re.compile(r"\d+")
_MOST_DIGITS = 600
_FOR_EACH_GROUP = 0.1
_GROUPS = 5


def tutorial_accuracy(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Score 1.0 where a completion has the form and its digits are the reference as a number, else 0.0.

    Args:
        completions: `B` completions, strings or lists of messages.
        **columns: The other columns. `answer` holds `B` references, GSM8K's solutions ("... #### 1,234") or plain
            numbers.

    Returns:
        `B` scores; None if the reference holds no number. No completion raises, and the time is linear in its
        length: more than 600 digits equal nothing.

    Raises:
        RewardError: There is no column `answer`, or not one entry per completion.
    """
    answers = column("tutorial_accuracy", "answer", columns, len(completions))
    scores: list[float | None] = []
    for completion, reference in zip(completions, answers, strict=True):
        right = parse_reference(reference)
        digits = answered_digits(completion_text(completion)) or ""
        same = 0 < len(digits) <= _MOST_DIGITS and int(digits) == right
        scores.append(None if right is None else float(same))
    return scores


def tutorial_format(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Score 0.5 where a completion has the form, else 0.0.

    It is 0.1 for each of the five groups of the tutorial's expression (the four tags and the digits), all or nothing,
    because a group without a match of the whole has none. The tutorial's prose says 0.1 for each tag that is present:
    that is `tag_format`.

    Args:
        completions: `B` completions, strings or lists of messages.
        **columns: The other columns; not used.

    Returns:
        `B` scores.
    """
    found = (answered_digits(completion_text(completion)) for completion in completions)
    return [0.0 if digits is None else _FOR_EACH_GROUP * _GROUPS for digits in found]


def answered_digits(text: str) -> str | None:
    """The digits of the answer where a text has the form, else None.

    Of several places that match it is the one that a regular expression with lazy `...` finds first.
    """
    thoughts = text.find("</think>", len("<think>")) if text.startswith("<think>") else -1
    if thoughts < 0:
        return None
    runs = [match.span() for match in _DIGITS.finditer(text, thoughts)]
    before = thoughts + len("</think>")
    for number, (start, end) in enumerate(runs):
        after = runs[number + 1][0] if number + 1 < len(runs) else len(text)
        if text.find("<answer>", before, start) >= 0 and text.find("</answer>", end, after) >= 0:
            return text[start:end]
        before = end
    return None
