"""What `math_accuracy` and `reasoning_accuracy` share: from a batch to verdicts, with nothing that can hang in between.

The steps, each for what the one before has left: limits, pairs of plain numbers (`plain_answers`), verdicts that are
known from earlier batches, and math-verify in worker processes that are killed when they take too long.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigurationError, RewardError
from ...guard.calls import NOT_COLUMNS
from ...guard.outcomes import Judgement, Outcome, OutcomePolicy, shown
from .._text.completions import completion_text
from .limits import excess_of_completion, excess_of_reference
from .plain_answers import has_no_answer, plain_answer, plain_reference, verdict
from .workers import Pair, Reading, Verifier

OUTCOMES = (
    Outcome.RIGHT,
    Outcome.WRONG,
    Outcome.NO_ANSWER,
    Outcome.UNPARSEABLE,
    Outcome.TIMEOUT,
    Outcome.DIED,
    Outcome.REFUSED,
    Outcome.ERROR,
)

_LONGEST_SHOWN = 500


@dataclass(frozen=True)
class _Question:
    """What workers are asked about a completion: only its reference, where the completion is `refused` unless that is
    unreadable."""

    pair: Pair
    refused: str = ""

    def settled(self, answer: Reading) -> Reading:
        if self.refused and answer.judgement.outcome is Outcome.SCORED:
            return Reading(Judgement(Outcome.REFUSED, self.refused), answer.gold)
        return answer


class MathReward:
    """The base of the rewards that ask math-verify. See `MathAccuracy` for the parameters."""

    __name__ = "math_reward"
    reference_column = "solution"

    def __init__(
        self,
        *,
        timeout: float = 2.0,
        budget: float = 4.0,
        workers: int | None = None,
        memory_mb: int | None = 512,
        max_characters: int = 200_000,
        outcomes: Mapping[str, Any] | None = None,
        cache: int = 10_000,
    ) -> None:
        for name, seconds in (("timeout", timeout), ("budget", budget)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise ConfigurationError(
                    f"{self.__name__}: {name} must be a positive number of seconds, got {seconds!r}"
                )
        for name, number, least in (("max_characters", max_characters, 1), ("cache", cache, 0)):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ConfigurationError(f"{self.__name__}: {name} must be an integer from {least}, got {number!r}")
        self.timeout, self.budget, self.max_characters = float(timeout), float(budget), max_characters
        self._policy = OutcomePolicy(self.__name__, OUTCOMES, outcomes)
        self._verifier = Verifier(
            self.__name__, timeout=timeout, budget=budget, workers=workers, memory_mb=memory_mb, cache=cache
        )

    def __call__(
        self,
        completions: Sequence[Any],
        solution: Sequence[Any] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score `B` completions.

        Args:
            completions: `B` completions, strings or lists of messages.
            solution: `B` references.
            log_metric: TRL's; gets the share of each outcome.
            log_extra: TRL's; gets each completion's outcome, and what was read, as the columns "solution",
                "gold_parsed" and "answer_parsed" of the table of completions.
            **columns: The other columns; not used.

        Returns:
            `B` scores: what the outcomes are worth (1.0, 0.0 or None by default).

        Raises:
            RewardError: There is no column `solution`, or it has not one entry per completion; or an outcome was set
                to "raise".
        """
        readings = self._read(completions, solution, columns)
        judgements = [reading.judgement for reading in readings]
        self._policy.log(judgements, log_metric, log_extra)
        if log_extra is not None and solution is not None:
            log_extra("solution", [_printable(reference) for reference in solution])
            log_extra("gold_parsed", [_printable(reading.gold) for reading in readings])
            log_extra("answer_parsed", [_printable(reading.found) for reading in readings])
        return self._policy.scores(judgements)

    def judge(
        self, completions: Sequence[Any], solution: Sequence[Any] | None = None, **columns: Any
    ) -> list[Judgement]:
        """Say what became of each of `B` completions; arguments and errors as in a call."""
        return [reading.judgement for reading in self._read(completions, solution, columns)]

    def start(self) -> None:
        """Start the worker processes' imports in the background. Optional: the first call does it otherwise."""
        self._verifier.pool.start()

    def close(self) -> None:
        """End the worker processes. The next call starts new ones."""
        self._verifier.pool.close()

    def _answer_text(self, text: str) -> str | None:
        """The part of a completion that counts; None where it has none."""
        return text

    def _read(self, completions: Sequence[Any], solution: Sequence[Any] | None, columns: Any) -> list[Reading]:
        if solution is None:
            raise RewardError(
                f"{self.__name__} needs the dataset column 'solution' with the reference answers; the columns present "
                f"are {sorted(columns.keys() - NOT_COLUMNS)}. Rename the column that holds them to 'solution'."
            )
        if len(solution) != len(completions):
            raise RewardError(
                f"{self.__name__} got {len(completions)} completions but {len(solution)} entries in the column "
                "'solution'; it needs one per completion."
            )
        rows = [
            self._decided(completion_text(c), reference) for c, reference in zip(completions, solution, strict=True)
        ]
        pairs = dict.fromkeys(row.pair for row in rows if isinstance(row, _Question))
        answers = self._verifier.readings(list(pairs))
        readings = [row if isinstance(row, Reading) else row.settled(answers[row.pair]) for row in rows]
        self._warn(readings, solution)
        return readings

    def _decided(self, text: str, reference: Any) -> Reading | _Question:
        """The verdict where no worker is needed for it, else what to ask."""
        answer = self._answer_text(text)
        if answer is None:
            return Reading(Judgement(Outcome.NO_ANSWER, "the reasoning does not end"))
        if not isinstance(reference, str):
            return Reading(Judgement(Outcome.UNPARSEABLE, f"a {type(reference).__name__}, not a string"))
        gold = plain_reference(reference)
        if gold is not None and len(answer) <= self.max_characters:
            found = plain_answer(answer)
            outcome = verdict(gold, found) if found is not None else None
            if found is not None and outcome is not None:
                return Reading(Judgement(outcome), gold.text, found.text)
            if has_no_answer(answer):
                return Reading(Judgement(Outcome.NO_ANSWER), gold.text)
        excess = None if gold is not None else excess_of_reference(reference, self.max_characters)
        if excess is not None:
            return Reading(Judgement(Outcome.UNPARSEABLE, excess))
        excess = excess_of_completion(answer, self.max_characters)
        if excess is None:
            return _Question((reference, answer))
        if gold is None:
            return _Question((reference, None), refused=excess)
        return Reading(Judgement(Outcome.REFUSED, excess), gold.text)

    def _warn(self, readings: Sequence[Reading], solution: Sequence[Any]) -> None:
        rows = [row for row, reading in enumerate(readings) if reading.judgement.outcome is Outcome.UNPARSEABLE]
        if rows:
            detail = readings[rows[0]].judgement.detail
            warnings.warn(
                f"{self.__name__} cannot read the reference {_quoted(solution[rows[0]])}{detail and f' ({detail})'} "
                f"({len(rows)} of {len(solution)} in this batch).",
                stacklevel=4,
            )


def _printable(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text[:_LONGEST_SHOWN].encode(errors="backslashreplace").decode()


def _quoted(reference: Any) -> str:
    return shown(reference) if isinstance(reference, str) else f"of type {type(reference).__name__}"
