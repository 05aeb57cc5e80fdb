"""How scoring a completion can end: a reward finds the `Outcome`, and a policy, which the user may change, its worth.

That is a number, None (the reward does not apply to this completion), or "raise" (the run stops and names it).
"""

import os
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ..errors import ConfigurationError, RewardError
from ..types import Parts
from .parameters import checked_number

__all__ = ["Consequence", "Judgement", "Outcome", "OutcomePolicy", "shown"]

OUTCOME_SUFFIX = "_outcome"  # appended to a reward's name, the column of its outcomes in TRL's table
RAISE: Literal["raise"] = "raise"
Consequence = float | None | Literal["raise"]  # what an outcome becomes
_LONGEST_SHOWN = 200
_LONGEST_SAID = 2000


class Outcome(StrEnum):
    """What became of one completion."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # the completion holds no answer that can be read
    UNPARSEABLE = "unparseable_reference"  # the reference cannot be read: nothing can be said about the completion
    SCORED = "scored"  # the reward gave a value that is neither right nor wrong
    NONE = "none"  # the reward itself said None
    TIMEOUT = "timeout"
    DIED = "died"  # the process at work on it died, twice, or ran out of memory
    REFUSED = "refused"  # too large or too deep to be looked at
    ERROR = "error"  # the reward raised, or the server that it asks failed
    UNREADABLE = "unreadable"  # a judge's reply is no verdict


DEFAULTS: Mapping[Outcome, Consequence] = {
    Outcome.RIGHT: 1.0,
    Outcome.WRONG: 0.0,
    Outcome.NO_ANSWER: 0.0,
    Outcome.UNPARSEABLE: None,
    Outcome.TIMEOUT: 0.0,
    Outcome.DIED: 0.0,
    Outcome.REFUSED: 0.0,
    Outcome.ERROR: RAISE,
}
"""A completion's own fault is 0, a reference's is None, and a bug raises."""


@dataclass(frozen=True)
class Judgement:
    """One completion's outcome."""

    outcome: Outcome
    detail: str = ""  # the reason, in a few words; it may quote the model
    # The reward's own value if the outcome is `SCORED`; no policy replaces it. `Parts` may come with other outcomes
    # too: a verdict's keep their scores, and where nothing could be read each has the outcome's value.
    score: float | None = None


class OutcomePolicy:
    """What each outcome of one reward becomes.

    Args:
        reward: The reward's name, for messages and metrics.
        outcomes: The outcomes that this reward can have.
        changed: By an outcome's name, its value instead of that in `DEFAULTS`: a finite number, None or "raise".
        defaults: This reward's own defaults, if they differ from `DEFAULTS`.

    Raises:
        ConfigurationError: `changed` names an outcome that this reward cannot have, or has an invalid value.
    """

    def __init__(
        self,
        reward: str,
        outcomes: Sequence[Outcome],
        changed: Mapping[str, Any] | None = None,
        defaults: Mapping[Outcome, Consequence] | None = None,
    ) -> None:
        self.reward = reward
        self.outcomes = tuple(outcomes)
        known = {**DEFAULTS, **(defaults or {})}
        self._becomes: dict[Outcome, Consequence] = {o: known[o] for o in self.outcomes if o in known}
        if not isinstance(changed, Mapping | None):
            raise ConfigurationError(f"{reward}: outcomes must be a mapping such as {{timeout: null}}, got {changed!r}")
        for name, value in (changed or {}).items():
            if name not in self._becomes:
                has = ", ".join(self._becomes)
                raise ConfigurationError(f"{reward} has no outcome {name!r} to set; it has: {has}.")
            if value is not None and value != RAISE:
                value = checked_number(f"{reward}: the outcome {name!r}", value, "a finite number, null or raise")
            self._becomes[Outcome(name)] = value
        self.changed = {outcome.value: it for outcome, it in self._becomes.items() if it != known[outcome]}

    def scores(
        self, judgements: Sequence[Judgement], causes: Mapping[int, BaseException] = MappingProxyType({})
    ) -> list[float | None]:
        """Turn a batch's outcomes into scores; one that is "raise" is a `RewardError` from its row's cause, if any."""
        scores: list[float | None] = []
        for row, judgement in enumerate(judgements):
            if judgement.outcome in (Outcome.SCORED, Outcome.NONE):
                scores.append(judgement.score)
                continue
            becomes = self._becomes[judgement.outcome]
            if isinstance(becomes, str):
                said = repr(judgement.outcome.value) + (f" ({judgement.detail})" if judgement.detail else "")
                go_on = f"Set outcomes: {{{judgement.outcome.value}: null}} (or a number) to go on."
                raise RewardError(f"{self.reward}: the outcome at row {row} is {said}. {go_on}") from causes.get(row)
            if isinstance(judgement.score, Parts) and becomes is not None:
                parts = judgement.score.parts
                if judgement.outcome not in (Outcome.RIGHT, Outcome.WRONG):
                    parts = tuple(part._replace(score=None if part.score is None else becomes) for part in parts)
                becomes = Parts(parts, becomes)
            scores.append(becomes)
        return scores

    def log(
        self,
        judgements: Sequence[Judgement],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
    ) -> None:
        """Log shares `outcomes/<reward>/<outcome>`, zeros included, and the column `<reward>_outcome`, if TRL can."""
        counts = Counter(judgement.outcome for judgement in judgements)
        if log_metric is not None and judgements:
            for outcome in self.outcomes:
                log_metric(f"outcomes/{self.reward}/{outcome.value}", counts[outcome] / len(judgements))
        if log_extra is not None:
            log_extra(f"{self.reward}{OUTCOME_SUFFIX}", [judgement.outcome.value for judgement in judgements])


def shown(text: object) -> str:
    """Quote text from a model or a dataset: on one line, escaped and shortened."""
    quoted = ascii(text[: _LONGEST_SHOWN + 1] if isinstance(text, str) else text)
    if len(quoted) <= _LONGEST_SHOWN:
        return quoted
    return f"{quoted[:_LONGEST_SHOWN]}..." + (f" ({len(text)} characters)" if isinstance(text, str) else "")


def exception_text(error: BaseException) -> str:
    """An exception's message: verbatim if printable, else as `shown`."""
    try:
        text = str(error)
    except Exception:  # an exception's own text may raise
        return "(its message cannot be read)"
    return text if len(text) <= _LONGEST_SAID and text.replace("\n", "").isprintable() else shown(text)


_OURS = Path(__file__).parents[1]
_ROOMS = tuple(str(_OURS / room) for room in ("testing", "guard", "credit", "types.py"))
_STANDARD = str(Path(traceback.__file__).parent)
_INSTALLED = ("site-packages", "dist-packages")


def _passes_on(file: str) -> bool:
    """Whether lines of this file stand only around a plugin's: ours, the standard library's, torch's."""
    if any(part in file for part in _INSTALLED):
        return f"{os.sep}torch{os.sep}" in file
    return file.startswith((*_ROOMS, _STANDARD))


def source_line(error: BaseException) -> str:
    """The deepest line of a plugin's own code, in brackets; empty if there is none."""
    own = [one for one in traceback.extract_tb(error.__traceback__) if not _passes_on(one.filename)]
    theirs = [one for one in own if not any(part in one.filename for part in _INSTALLED)]
    if not own:
        return ""
    # An installed plugin's is the deepest beside the first, since libraries are installed too.
    beside = [one for one in own if Path(one.filename).parent == Path(own[0].filename).parent]
    frame = (theirs or beside)[-1]
    line = frame.line or ""
    code = f": {line}" if 0 < len(line) < 160 and line.isprintable() else ""
    return f" ({Path(frame.filename).name}, line {frame.lineno}{code})"
