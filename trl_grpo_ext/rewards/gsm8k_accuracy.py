"""Is the final number of the completion GSM8K's answer?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ..errors import RewardError
from .final_answer import final_number, parse_reference
from .text import completion_text

_NOT_COLUMNS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
_ROUNDING = Fraction(1, 10**9)


def gsm8k_accuracy(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    r"""Score 1.0 where the completion's final number is the reference's, 0.0 where it is not or there is none.

    How the final number is found (`#### 18`, `\boxed{18}`, `<answer>`, "the answer is 18", else the last number) is
    described in `trl_grpo_ext.rewards.final_answer`. Numbers are compared by value and exactly: 18, 18.00, $18 and
    36/2 are one number, 7.41 is not 7, and 33.33 is not 33.333. The only tolerance is 1e-9 of the reference, for what
    floating point leaves behind (17.999999999999996). A percent sign and units are ignored. "60 million" equals both
    60 and 60,000,000, because GSM8K asks for either.

    Args:
        completions: `B` completions, strings or lists of messages.
        answer: `B` references: GSM8K's own solutions ("... #### 1,234") or plain numbers (string, int or float).
        **kwargs: The other columns; not used.

    Returns:
        `B` scores: 1.0, 0.0, or None where the reference holds no number, which also warns: a broken reference must
        not read as a wrong answer. No completion raises, and the time is linear in its length.

    Raises:
        RewardError: There is no column `answer`, or it has not one entry per completion.

    GSM8K is Cobbe et al., 2021 (arXiv:2110.14168). Departures from its own grader, which compares the strings behind
    the first `####`: numbers are compared by value, other ways to give an answer are read too, and of several answers
    the last counts (the first question's, where the completion runs on to a new "Question:").
    """
    if answer is None:
        columns = sorted(kwargs.keys() - _NOT_COLUMNS)
        raise RewardError(
            f"gsm8k_accuracy needs the dataset column 'answer' with the reference answers; the columns present are "
            f"{columns}. Rename the column that holds them to 'answer'."
        )
    if len(answer) != len(completions):
        raise RewardError(
            f"gsm8k_accuracy got {len(completions)} completions but {len(answer)} entries in the column 'answer'; it "
            "needs one per completion."
        )
    references = [parse_reference(entry) for entry in answer]
    unreadable = [entry for entry, reference in zip(answer, references, strict=True) if reference is None]
    if unreadable:
        warnings.warn(
            f"gsm8k_accuracy finds no number in the reference {str(unreadable[0])[-80:]!r} ({len(unreadable)} of "
            f"{len(answer)} in this batch); these completions get None. A reference is '... #### 18' or a number.",
            stacklevel=2,
        )
    return [
        None if reference is None else float(_is_right(completion_text(completion), reference))
        for completion, reference in zip(completions, references, strict=True)
    ]


def _is_right(text: str, reference: Fraction) -> bool:
    number = final_number(text)
    if number is None or number.value is None or number.face is None:
        return False
    tolerance = abs(reference) * _ROUNDING
    return any(abs(value - reference) <= tolerance for value in (number.value, number.face))
