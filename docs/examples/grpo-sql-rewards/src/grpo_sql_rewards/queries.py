"""Finding and reading the query in what a model wrote."""

from __future__ import annotations

import re

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

_FENCE = "```"
_MARKS = ("sql", "sqlite")
_BARE = re.compile(r"^[ \t]*(?:select|with)\b", re.IGNORECASE | re.MULTILINE)


class NoQueryError(ValueError):
    """There is no SQL here that can be read."""


class NotOneQueryError(ValueError):
    """It is SQL, but not one query: several statements, or one that changes something."""


class TooDeepError(ValueError):
    """It is nested deeper than the parser can follow."""


def find_query(text: str) -> str | None:
    """The query that a completion ends up with; None where there is none.

    That is the last closed fence marked `sql` or `sqlite`; else the last closed fence; else, where there is no fence
    at all, the text from the first line that begins with SELECT or WITH. Linear in the length of the text.
    """
    fences: list[tuple[str, str]] = []
    opened: tuple[str, list[str]] | None = None
    found_any = False
    for line in text.split("\n"):
        stripped = line.strip()
        if stripped.startswith(_FENCE):
            found_any = True
            if opened is None:
                opened = (stripped.removeprefix(_FENCE).strip().lower(), [])
            elif stripped == _FENCE:
                fences.append((opened[0], "\n".join(opened[1])))
                opened = None
            continue
        if opened is not None:
            opened[1].append(line)
    marked = [query for mark, query in fences if mark in _MARKS]
    if marked or fences:
        return (marked or [query for _, query in fences])[-1].strip() or None
    bare = None if found_any else _BARE.search(text)
    return text[bare.start() :].strip() if bare else None


def parse_query(query: str, dialect: str) -> exp.Query:
    """Parse one query that only reads.

    Raises:
        NoQueryError: It does not parse.
        NotOneQueryError: It is several statements, or one that is not a query.
        TooDeepError: The parser ran out of stack.
    """
    if "\x00" in query or any("\ud800" <= character <= "\udfff" for character in query):
        raise NoQueryError("characters that no SQL has")
    try:
        statements = [statement for statement in sqlglot.parse(query, read=dialect) if statement is not None]
    except SqlglotError as error:
        raise NoQueryError(f"no SQL: {_first_line(error)}") from error
    except RecursionError as error:
        raise TooDeepError("nested deeper than the parser can follow") from error
    if not statements:
        raise NoQueryError("no statement")
    if len(statements) > 1:
        raise NotOneQueryError(f"{len(statements)} statements, and only one is read")
    (statement,) = statements
    if not isinstance(statement, exp.Query):
        raise NotOneQueryError(f"a {statement.key} statement, and only a query is read")
    return statement


def tables_read(query: exp.Query) -> set[str]:
    """Names of the tables that a query reads, in lower case; those that it defines itself are not among them."""
    own = {cte.alias_or_name.lower() for cte in query.find_all(exp.CTE)}
    return {table.name.lower() for table in query.find_all(exp.Table)} - own


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
