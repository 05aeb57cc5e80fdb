"""Is the completion's query the reference's, apart from how it is written?"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer import optimize
from trl_grpo_ext.guard.outcomes import Outcome, shown

from .queries import NoQueryError, NotOneQueryError, TooDeepError, parse_query
from .sql_reward import Found, SQLReward, Verdict, checked_dialect, readable

Schema = dict[str, object]


class SQLMatch(SQLReward):
    """Score 1.0 where sqlglot's optimiser makes the same query of the completion's as of the reference's.

    So names of aliases, the order of conditions, constants that can be folded, subqueries that can be merged and the
    names of the output columns do not count; the order of output columns, joins and the rest does. No database is
    needed. Two queries that mean the same may be too different for the optimiser and score 0.0. If there are rows
    to run them on, `sql_execution` is the better judge.

    With the tables' definitions in the column `context` (CREATE TABLE; anything else in it is passed over), columns are
    resolved, and a query that asks for one that is not there is wrong. Without it they are compared by name.

    Source: no paper describes this reward. It corresponds to Spider's exact set match (Yu et al., 2018,
    arXiv:1809.08887), but compares optimised syntax trees instead of sets of clauses.

    Args:
        dialect: The one in which both queries are written, as sqlglot calls it.
        max_characters: Longer queries are refused, and so is a completion twenty times as long.
        timeout: CPU seconds that one completion may take.
        memory_mb: Memory that a process may add to what it started with, in MiB.
        outcomes: What becomes of a completion that is `right` (1.0), `wrong`, without a query that parses
            (`no_answer`), `refused`, out of time (`timeout`), `died` (0.0 each), of an `unparseable_reference` (None)
            and of an `error` (raises).

    Raises:
        ConfigurationError: A parameter cannot work.
    """

    __name__ = "sql_match"

    def __init__(
        self,
        *,
        dialect: str = "sqlite",
        max_characters: int = 5_000,
        timeout: float = 5.0,
        memory_mb: int = 256,
        outcomes: Mapping[str, Any] | None = None,
    ) -> None:
        self.dialect = checked_dialect("sql_match", dialect)
        super().__init__(
            functools.partial(same_query, dialect),
            needs_context=False,
            max_characters=max_characters,
            timeout=timeout,
            memory_mb=memory_mb,
            outcomes=outcomes,
        )

    def __repr__(self) -> str:
        return f"SQLMatch(dialect={self.dialect!r})"


def same_query(dialect: str, found: Found, reference: str, context: str | None) -> Verdict:
    """The outcome of one query against its reference, and why. Runs in a worker."""
    try:
        schema = _schema(context, dialect)
        expected = _optimised(parse_query(reference, dialect), schema, dialect)
    except (NoQueryError, NotOneQueryError, TooDeepError, SqlglotError, RecursionError) as error:
        return Outcome.UNPARSEABLE.value, f"the reference {shown(reference)} cannot be read: {shown(str(error))}"
    asked = found if isinstance(found, tuple) else readable(found, dialect)
    if isinstance(asked, tuple):
        return asked
    try:
        given = _optimised(asked, schema, dialect)
    except SqlglotError as error:
        return Outcome.WRONG.value, shown(str(error))
    except RecursionError:
        return Outcome.REFUSED.value, "nested deeper than the optimiser can follow"
    return (Outcome.RIGHT.value, "") if given == expected else (Outcome.WRONG.value, "another query")


def _optimised(query: exp.Query, schema: Schema | None, dialect: str) -> exp.Expr:
    best = optimize(
        query,
        schema=schema,
        dialect=dialect,
        canonicalize_table_aliases=True,
        validate_qualify_columns=schema is not None,
    )
    return _without_output_names(best)


def _without_output_names(query: exp.Expr) -> exp.Expr:
    """Call the columns of the result by their number, there and where the same SELECT refers to them."""
    if not isinstance(query, exp.Select):
        return query
    numbers: dict[str, str] = {}
    for number, column in enumerate(query.expressions):
        if isinstance(column, exp.Alias):
            numbers[column.alias] = f"_{number}"
            column.set("alias", exp.to_identifier(f"_{number}", quoted=True))
    for clause in ("order", "having", "group", "qualify"):
        part = query.args.get(clause)
        for name in part.find_all(exp.Column) if part is not None else ():
            if not name.table and name.name in numbers:
                name.set("this", exp.to_identifier(numbers[name.name], quoted=True))
    return query


def _schema(context: str | None, dialect: str) -> Schema | None:
    """The tables that a script makes, with their columns; None where it makes none."""
    schema: Schema = {}
    for statement in sqlglot.parse(context, read=dialect) if context else ():
        if not isinstance(statement, exp.Create) or not isinstance(statement.this, exp.Schema):
            continue
        columns = [column for column in statement.this.expressions if isinstance(column, exp.ColumnDef)]
        schema[statement.this.this.name] = {
            column.name: column.kind.sql(dialect) if column.kind else "UNKNOWN" for column in columns
        }
    return schema or None
