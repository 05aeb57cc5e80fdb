"""What rewards with outcomes share: a `judge` finds each completion's outcome, and a policy makes a score of it."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..guard.messages import completion_text
from ..guard.outcomes import Consequence, Judgement, Outcome, OutcomePolicy
from ..guard.parameters import Checked, amount, column, flag
from ._text.json_text import Located, is_near

ABOUT_A_REFERENCE = (Outcome.RIGHT, Outcome.WRONG, Outcome.NO_ANSWER, Outcome.UNPARSEABLE)
IN_A_WORKER = (Outcome.REFUSED, Outcome.TIMEOUT, Outcome.DIED, Outcome.ERROR)


class Judged(Checked):
    """A reward whose scores are what its `policy` makes of the outcomes that `judge` finds."""

    __name__ = "judged"
    can: ClassVar[Sequence[Outcome]]  # the outcomes that it can have
    usual: ClassVar[Mapping[Outcome, Consequence]] = {}  # its own values of outcomes, where they are others than usual
    reads: ClassVar[str] = "the reference"  # what `unparseable_reference` is about, for the warning
    outcomes: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy = OutcomePolicy(self.__name__, self.can, self.outcomes, self.usual)

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """The outcomes of `B` completions."""
        raise NotImplementedError

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """`B` scores; None, with a warning, where the reference cannot be read. A `RewardError` is about columns."""
        return self._scored(self.judge(completions, **columns), columns)

    def _scored(self, judgements: Sequence[Judgement], columns: Mapping[str, Any]) -> list[float | None]:
        """The scores of these outcomes; logs them as the batch's columns ask, and warns of unreadable references."""
        unread = [row for row, judged in enumerate(judgements) if judged.outcome is Outcome.UNPARSEABLE]
        if unread:
            warnings.warn(
                f"{self.__name__} cannot read {self.reads} at row {unread[0]} ({judgements[unread[0]].detail}; "
                f"{len(unread)} of {len(judgements)} in this batch); these completions get None unless `outcomes` says "
                "otherwise.",
                stacklevel=3,
            )
        self.policy.log(judgements, columns.get("log_metric"), columns.get("log_extra"))
        return self.policy.scores(judgements)


def too_long(size: int, most: int) -> str:
    """What to say of a completion that is refused for its length."""
    return f"{size} characters, more than max_characters, {most}"


class Comparing(Judged):
    """A reward that compares with a column's expected values: a tolerance for numbers, and normalisation for texts."""

    advice: ClassVar[str]  # what to do if there is no such column
    column: str
    absolute: float = amount(0.0)
    relative: float = amount(0.0)
    ignore_case: bool = flag(False)
    ignore_space: bool = flag(False)

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """The outcomes of `B` completions; a `RewardError` where there is no column of expected values."""
        expected = column(self.__name__, self.column, columns, len(completions), self.advice)
        return [self._judged(completion_text(said), right) for said, right in zip(completions, expected, strict=True)]

    def _judged(self, text: str, expected: Any) -> Judgement:
        raise NotImplementedError

    def same_values(self, said: Located, right: Located) -> bool:
        """Whether two JSON values are the same: of one type, and equal. Objects and arrays must be empty."""
        if said.kind != right.kind or said.members or right.members:
            return False
        if right.kind == "number":
            return is_near(said.value, right.value, self.absolute, self.relative)
        if right.kind == "string":
            return self.same_texts(said.value, right.value)
        return bool(said.value == right.value)

    def same_texts(self, *texts: str) -> bool:
        spaced = [" ".join(text.split()) if self.ignore_space else text for text in texts]
        said, right = (text.casefold() if self.ignore_case else text for text in spaced)
        return said == right
