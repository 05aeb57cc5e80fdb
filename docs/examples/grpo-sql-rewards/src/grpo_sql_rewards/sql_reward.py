"""What the two rewards share: columns, outcomes and the processes that do the work."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from trl_grpo_ext import completion_text
from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.guard.outcomes import Judgement, Outcome, OutcomePolicy, shown
from trl_grpo_ext.guard.workers import Done, WorkerPool
from trl_grpo_ext.types import RewardDeclaration

from .queries import NoQueryError, NotOneQueryError, TooDeepError, find_query, parse_query

_STATUS = {"timeout": Outcome.TIMEOUT, "died": Outcome.DIED, "error": Outcome.ERROR}
_OUTCOMES = (
    *(Outcome.RIGHT, Outcome.WRONG, Outcome.NO_ANSWER, Outcome.UNPARSEABLE),
    *(Outcome.REFUSED, Outcome.TIMEOUT, Outcome.DIED, Outcome.ERROR),
)
_LONGEST_TEXT = 20  # times max_characters: how long a whole completion may be

Verdict = tuple[str, str]
"""An outcome's name, and why."""
Found = str | Verdict
"""The completion's query, or why there is none to judge. A reference that says nothing goes before either."""
Compare = Callable[[Found, str, str | None], Verdict]
"""Takes what was found in the completion, the reference and the database's script."""


class SQLReward:
    """Finds the query in a completion and has it judged in a process that may be killed.

    Args:
        compare: What judges; it is sent to the processes.
        needs_context: Whether the column `context` has to be there.
        max_characters: Longer queries are refused, and so is a completion twenty times as long as that.
        timeout: CPU seconds that one completion may take.
        memory_mb: Memory that a process may add to what it started with, in MiB.
        outcomes: What outcomes become, where that is not the default.
    """

    __name__ = "sql_reward"
    declares = RewardDeclaration(
        reference_column="answer",
        conformance={
            "columns": {
                "answer": "SELECT name FROM staff WHERE pay > 3",
                "context": "CREATE TABLE staff (name TEXT, pay INT); INSERT INTO staff VALUES ('Ana', 2), ('Ben', 5);",
            },
            "completions": [
                "SELECT name FROM staff WHERE pay > 3",
                "```sql\nSELECT name FROM staff\n```",
                "SELECT name FROM",
                "I cannot say.",
            ],
            "unreadable": ["7 apples", "DROP TABLE staff"],
        },
    )

    def __init__(
        self,
        compare: Compare,
        *,
        needs_context: bool,
        max_characters: int,
        timeout: float,
        memory_mb: int,
        outcomes: Mapping[str, Any] | None,
    ) -> None:
        name = self.__name__
        if isinstance(max_characters, bool) or not isinstance(max_characters, int) or max_characters < 1:
            raise ConfigurationError(
                f"{name}: max_characters must be a whole number, 1 or more, got {max_characters!r}."
            )
        for label, seconds in (("timeout", timeout),):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
                raise ConfigurationError(f"{name}: {label} must be a positive number of seconds, got {seconds!r}.")
        self.max_characters, self.timeout = max_characters, timeout
        self.needs_context = needs_context
        self._policy = OutcomePolicy(name, _OUTCOMES, outcomes)
        self._pool = WorkerPool(functools.partial(_job, compare, max_characters), memory_mb=memory_mb, name=name)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score `B` completions.

        Args:
            completions: `B` completions, strings or lists of messages.
            **columns: `answer`, the `B` reference queries, and `context`, the `B` scripts that make the database.

        Returns:
            `B` scores, None where the reference says nothing. No completion raises.

        Raises:
            RewardError: A column is missing or has not one entry per completion, or an outcome's policy is "raise".
        """
        judgements = self.judge(completions, **columns)
        unread = [row for row, judged in enumerate(judgements) if judged.outcome is Outcome.UNPARSEABLE]
        if unread:
            warnings.warn(
                f"{self.__name__} can say nothing about {len(unread)} of {len(judgements)} completions: "
                f"{judgements[unread[0]].detail} (row {unread[0]}). They get None unless `outcomes` says otherwise.",
                stacklevel=2,
            )
        self._policy.log(judgements, columns.get("log_metric"), columns.get("log_extra"))
        return self._policy.scores(judgements)

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """What becomes of `B` completions, by `columns` as in a call.

        Raises:
            RewardError: A column is missing or has not one entry per completion.
        """
        references = self._column("answer", columns, len(completions))
        if self.needs_context or columns.get("context") is not None:
            contexts = self._column("context", columns, len(completions))
        else:
            contexts = [None] * len(completions)
        judgements: dict[int, Judgement] = {}
        jobs: list[tuple[int, tuple[str, str, str | None]]] = []
        for row, (completion, reference, context) in enumerate(zip(completions, references, contexts, strict=True)):
            text = completion_text(completion)
            if not isinstance(reference, str) or not isinstance(context, str | None):
                wrong = reference if not isinstance(reference, str) else context
                judgements[row] = Judgement(Outcome.UNPARSEABLE, f"not text but {shown(wrong)}")
            elif self.needs_context and context is None:
                judgements[row] = Judgement(Outcome.UNPARSEABLE, "there is no database in 'context'")
            else:
                jobs.append((row, (text[: _LONGEST_TEXT * self.max_characters + 1], reference, context)))
        if jobs:
            done = self._pool.run([job for _, job in jobs], allowance=self.timeout)
            judgements.update((row, _judged(one)) for (row, _), one in zip(jobs, done, strict=True))
        return [judgements[row] for row in range(len(completions))]

    def _column(self, name: str, columns: Mapping[str, Any], count: int) -> Sequence[Any]:
        values = columns.get(name)
        if values is None:
            raise RewardError(f"{self.__name__} needs the dataset column {name!r}; there is {sorted(columns)}.")
        if isinstance(values, str) or len(values) != count:
            raise RewardError(f"{self.__name__} got {count} completions but {len(values)} entries in {name!r}.")
        found: Sequence[Any] = values
        return found


def checked_dialect(reward: str, dialect: str) -> str:
    """Return a dialect that sqlglot knows.

    Raises:
        ConfigurationError: It knows no such dialect.
    """
    if not isinstance(dialect, str) or not dialect or Dialect.get(dialect) is None:
        raise ConfigurationError(
            f"{reward}: dialect must be one that sqlglot knows, such as 'sqlite', got {dialect!r}."
        )
    return dialect


def readable(query: str, dialect: str) -> exp.Query | Verdict:
    """A completion's query, parsed, or why it cannot be judged."""
    try:
        return parse_query(query, dialect)
    except NoQueryError as error:
        return Outcome.NO_ANSWER.value, str(error)
    except NotOneQueryError as error:
        return Outcome.WRONG.value, str(error)
    except TooDeepError as error:
        return Outcome.REFUSED.value, str(error)


def _job(compare: Compare, max_characters: int, job: tuple[str, str, str | None]) -> Verdict:
    """Judge one completion. Runs in a worker."""
    logging.getLogger("sqlglot").setLevel(logging.CRITICAL)  # what it cannot read is an outcome, not a line on stderr
    completion, reference, context = job
    return compare(_found(completion, max_characters), reference, context)


def _found(completion: str, max_characters: int) -> Found:
    if len(completion) > _LONGEST_TEXT * max_characters:
        return Outcome.REFUSED.value, f"a completion of more than {_LONGEST_TEXT * max_characters} characters"
    query = find_query(completion)
    if query is None:
        return Outcome.NO_ANSWER.value, "no query"
    if len(query) > max_characters:
        return Outcome.REFUSED.value, f"a query of {len(query)} characters, more than {max_characters}"
    return query


def _judged(done: Done) -> Judgement:
    if done.status == "done":
        name, detail = done.value
        return Judgement(Outcome(name), detail)
    return Judgement(_STATUS[done.status], done.detail)
