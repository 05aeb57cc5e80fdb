"""What rewards with outcomes share: a `judge` finds each completion's outcome, and a policy makes a score of it."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..guard.outcomes import Judgement, Outcome, OutcomePolicy


class Judged:
    """A reward whose scores are what its `policy` makes of the outcomes that `judge` finds."""

    __name__: str
    policy: OutcomePolicy
    reads = "the reference"
    """What `unparseable_reference` is about, for the warning."""

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
