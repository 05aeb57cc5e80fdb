"""Is the final number of the completion GSM8K's answer?"""

from collections.abc import Sequence
from typing import Any

from ..guard.messages import completion_text
from ..guard.outcomes import Judgement, Outcome, shown
from ..guard.parameters import column
from ..types import RewardDeclaration
from ._judged import ABOUT_A_REFERENCE, Judged
from ._text.final_answer import final_number, parse_reference, read_reference

_ADVICE = "Rename the column that holds the reference answers to 'answer'."


class GSM8KAccuracy(Judged):
    r"""Score 1.0 where the completion's final number equals the reference, 0.0 where it does not or is missing.

    The final number is the last explicit answer (`#### 18`, `\boxed{18}`, `<answer>`, "the answer is 18"), else the
    last number. One that is only a part of an expression (`18!`, `\sqrt{18}`, "half of 18") is not the answer, nor is
    one of several (`3:18`, "17 or 18"), nor one that the text denies ("not 18"). Numbers are compared by value and
    exactly: 18, 18.00, $18 and 36/2 are the same number, and 33.33 is not 33.333. The only tolerance is 1e-9 of the
    reference, for floating-point errors. A percent sign and units are ignored. "60 million" equals both 60 and
    60,000,000, because GSM8K asks for either.

    Args:
        outcomes: Values of the outcomes `right` (1.0), `wrong` (0.0), `no_answer` (0.0) and `unparseable_reference`
            (None, with a warning: a broken reference is no wrong answer), if not these: a number, None or "raise".

    GSM8K is Cobbe et al., 2021 (arXiv:2110.14168). Departures from its own grader, which compares the strings after
    the first `####`: numbers are compared by value, other ways to give an answer are read too, and of several answers
    the last counts (the first question's, where the completion runs on to a new "Question:").
    """

    __name__ = "gsm8k_accuracy"
    can = ABOUT_A_REFERENCE
    declares = RewardDeclaration(reference_column="answer")

    def __call__(self, completions: Sequence[Any], answer: Any = None, **columns: Any) -> list[float | None]:
        """`B` scores; the time is linear in a completion's length."""
        return super().__call__(completions, answer=answer, **columns)

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """The outcomes of `B` completions; `answer` is GSM8K's own solutions ("... #### 1,234"), or plain numbers."""
        references = column("gsm8k_accuracy", "answer", columns, len(completions), _ADVICE)
        return [_judged(*pair) for pair in zip(completions, references, strict=True)]

    def read_references(self, references: Sequence[Any]) -> list[tuple[str, str]]:
        """What each reference is read as ("" where it cannot be), and what of its text that leaves over."""
        values = [parse_reference(reference) for reference in references]
        left = [read_reference(reference)[1] if isinstance(reference, str) else "" for reference in references]
        return [("" if value is None else str(value), rest) for value, rest in zip(values, left, strict=True)]


def _judged(completion: Any, answer: Any) -> Judgement:
    reference = parse_reference(answer)
    if reference is None:
        return Judgement(Outcome.UNPARSEABLE, f"the reference is not one number: {shown(str(answer)[-80:])}")
    number = final_number(completion_text(completion))
    if number is None or number.value is None or number.face is None:
        return Judgement(Outcome.NO_ANSWER)
    tolerance = abs(reference) / 10**9
    right = any(abs(value - reference) <= tolerance for value in (number.value, number.face))
    return Judgement(Outcome.RIGHT if right else Outcome.WRONG)


gsm8k_accuracy = GSM8KAccuracy()
