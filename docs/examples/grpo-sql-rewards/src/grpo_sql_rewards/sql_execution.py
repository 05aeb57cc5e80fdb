"""Does the completion's query give the same rows as the reference's?"""

from __future__ import annotations

import functools
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from sqlglot import exp
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.guard.outcomes import Outcome, shown

from .queries import NoQueryError, NotOneQueryError, TooDeepError, parse_query, tables_read
from .sql_reward import Found, SQLReward, Verdict, checked_dialect, readable

_INTERVAL = 1000  # steps of SQLite's machine between two looks at their number
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,  # characters of one value
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
}
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_NOT_BUILDING = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA}
# Reaches out of the database, or gives other values each time.
_NO_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "random", "randomblob"}

Row = tuple[Any, ...]


class SQLExecution(SQLReward):
    """Score 1.0 where the completion's query gives the rows of the reference's, 0.0 where it does not.

    Both run in an SQLite database in memory, made by the row's script in `context` (CREATE TABLE and INSERT). Rows are
    compared as a multiset, and in order where the reference has an ORDER BY; columns in order, their names not. 1 and
    1.0 are equal, other fractions are compared to nine digits. A query that reads no table where the reference reads
    one is wrong, whatever it returns: it states the answer instead of querying for it.

    A query that a model wrote may not change anything, attach files or load extensions (SQLite's authorizer), takes at
    most `max_steps` steps of SQLite's machine (the same on a busy computer as on an idle one), and runs in a process
    with bounded memory that is killed after `timeout` seconds.

    If the reference fails, runs out of steps or returns no rows, the score is None: on an empty table any query would
    be right.

    Source: execution accuracy, as in Spider's test suites (Zhong et al., 2020, arXiv:2010.02840). Departures: one
    database for each row, not a suite of them, so a wrong query may be right by chance; columns may not be permuted;
    under an ORDER BY rows that tie have to come in the reference's order.

    Args:
        dialect: The one in which both queries are written, as sqlglot calls it; they are translated to SQLite's.
        max_steps: Steps that each of the two queries may take.
        max_rows: A reference with more rows is refused.
        max_characters: Longer queries are refused, and so is a completion twenty times as long.
        timeout: CPU seconds that one completion may take.
        memory_mb: Memory that a process may add to what it started with, in MiB.
        outcomes: What becomes of a completion that is `right` (1.0), `wrong`, without a query that parses
            (`no_answer`), `refused`, out of time or steps (`timeout`), `died` (0.0 each), of an
            `unparseable_reference` (None) and of an `error` (raises).

    Raises:
        ConfigurationError: A parameter cannot work.
    """

    __name__ = "sql_execution"

    def __init__(
        self,
        *,
        dialect: str = "sqlite",
        max_steps: int = 5_000_000,
        max_rows: int = 10_000,
        max_characters: int = 5_000,
        timeout: float = 5.0,
        memory_mb: int = 256,
        outcomes: Mapping[str, Any] | None = None,
    ) -> None:
        for label, value in (("max_steps", max_steps), ("max_rows", max_rows)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"sql_execution: {label} must be a whole number, 1 or more, got {value!r}.")
        self.dialect = checked_dialect("sql_execution", dialect)
        super().__init__(
            functools.partial(same_rows, dialect, max_steps, max_rows),
            needs_context=True,
            max_characters=max_characters,
            timeout=timeout,
            memory_mb=memory_mb,
            outcomes=outcomes,
        )

    def __repr__(self) -> str:
        return f"SQLExecution(dialect={self.dialect!r})"


@dataclass
class _Steps:
    """How many steps a statement may still take; SQLite asks every `_INTERVAL` of them."""

    left: int

    def __call__(self) -> int:
        """Not 0: stop."""
        self.left -= _INTERVAL
        return int(self.left < 0)


class _Authorizer:
    """What SQLite asks before it prepares a statement.

    Args:
        building: Whether the database is being made, by a script of the data set; else only reading is allowed.
    """

    def __init__(self, *, building: bool = False) -> None:
        self.building = building
        self.denied: str | None = None

    def __call__(self, action: int, *names: str | None) -> int:
        """SQLite's own constants, both the question and the answer."""
        allowed = action not in _NOT_BUILDING if self.building else action in _READING
        if action == sqlite3.SQLITE_FUNCTION:
            allowed = allowed and (names[1] or "").lower() not in _NO_FUNCTIONS
        if not allowed:
            self.denied = next((name for name in names[1::-1] if name), f"action {action}")
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def same_rows(
    dialect: str, max_steps: int, max_rows: int, found: Found, reference: str, context: str | None
) -> Verdict:
    """The outcome of one query against its reference, and why. Runs in a worker."""
    useless = Outcome.UNPARSEABLE.value
    with closing(sqlite3.connect(":memory:")) as database:
        for limit, value in _LIMITS.items():
            database.setlimit(limit, value)
        try:
            parsed = parse_query(reference, dialect)
            database.execute("PRAGMA temp_store = MEMORY")  # what is sorted counts as memory and never fills a disk
            database.set_authorizer(_Authorizer(building=True))
            database.set_progress_handler(_Steps(max_steps), _INTERVAL)
            database.executescript(context or "")
            authorizer = _Authorizer()
            database.set_authorizer(authorizer)
            expected = _rows(database, _translated(reference, parsed, dialect), max_steps, max_rows)
        except (NoQueryError, NotOneQueryError, TooDeepError) as error:
            return useless, f"the reference is {shown(reference)}: {error}"
        except (sqlite3.Error, ValueError) as error:  # ValueError: characters that no text in SQLite has
            return useless, f"the reference or its database fails: {shown(str(error))}"
        if not expected:
            return useless, "the reference gives no rows, so nothing can be compared"
        if len(expected) > max_rows:
            return useless, f"the reference gives more than max_rows, {max_rows}, rows"

        if isinstance(found, tuple):
            return found
        asked = readable(found, dialect)
        if isinstance(asked, tuple):
            return asked
        if tables_read(parsed) and not tables_read(asked):
            return Outcome.WRONG.value, "reads no table"
        try:
            given = _rows(database, _translated(found, asked, dialect), max_steps, len(expected))
        except sqlite3.Error as error:
            return _outcome(error, authorizer)
    if len(given) != len(expected):
        side = "more" if len(given) > len(expected) else "fewer"
        return Outcome.WRONG.value, f"{len(expected)} rows expected, and there are {side}"
    ordered = parsed.args.get("order") is not None
    same = given == expected if ordered else Counter(given) == Counter(expected)
    return (Outcome.RIGHT.value, "") if same else (Outcome.WRONG.value, "other rows")


def _rows(database: sqlite3.Connection, query: str, max_steps: int, most: int) -> list[Row]:
    """Run a query; at most one row more than `most`."""
    database.set_progress_handler(_Steps(max_steps), _INTERVAL)
    with closing(database.execute(query)) as cursor:
        return [tuple(map(_plain, row)) for row in cursor.fetchmany(most + 1)]


def _plain(value: Any) -> Any:
    return float(f"{value:.9g}") if isinstance(value, float) and not value.is_integer() else value


def _translated(query: str, parsed: exp.Query, dialect: str) -> str:
    """As SQLite reads it. What is SQLite's already stays as it was written."""
    return query if dialect == "sqlite" else parsed.sql(dialect="sqlite")


def _outcome(error: sqlite3.Error, authorizer: _Authorizer) -> Verdict:
    if authorizer.denied is not None:
        return Outcome.REFUSED.value, f"asks for what a query may not do: {shown(authorizer.denied)}"
    code = getattr(error, "sqlite_errorcode", None)  # absent where Python itself refuses
    if code == sqlite3.SQLITE_INTERRUPT:
        return Outcome.TIMEOUT.value, "more than max_steps steps"
    if code == sqlite3.SQLITE_TOOBIG:
        return Outcome.REFUSED.value, shown(str(error))
    return Outcome.WRONG.value, shown(str(error))
