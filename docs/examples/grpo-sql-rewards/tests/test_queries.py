"""Which part of a completion is the query."""

from __future__ import annotations

import pytest

from grpo_sql_rewards.queries import NoQueryError, NotOneQueryError, TooDeepError, find_query, parse_query, tables_read


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("SELECT 1", "SELECT 1"),
        ("I would ask:\n  with t as (select 1) select * from t", "with t as (select 1) select * from t"),
        ("```sql\nSELECT 1\n```", "SELECT 1"),
        ("```sql\nSELECT 1\n```\nor better\n```SQL\nSELECT 2;\n```\nthanks", "SELECT 2;"),
        ("```sql\nSELECT 1\n```\nwhich prints\n```\n1\n```", "SELECT 1"),
        ("```\nSELECT 1\n```", "SELECT 1"),
        ("```sql\nSELECT 1", None),
        ("```sql\n\n```", None),
        ("Selecting is hard.", None),
        ("", None),
    ],
)
def test_the_query_of_a_completion(text: str, query: str | None) -> None:
    assert find_query(text) == query


def test_one_query_is_read_and_nothing_else() -> None:
    assert parse_query("SELECT 1 UNION SELECT 2;", "sqlite").sql() == "SELECT 1 UNION SELECT 2"
    for text in ("SELECT 1; SELECT 2", "DROP TABLE t", "WITH t AS (SELECT 1) DELETE FROM t", "PRAGMA table_info(t)"):
        with pytest.raises(NotOneQueryError):
            parse_query(text, "sqlite")
    for text in ("SELECT (1", "FROM WHERE", "", "SELECT 'a\x00'", "SELECT '\ud800'"):
        with pytest.raises(NoQueryError):
            parse_query(text, "sqlite")
    with pytest.raises(TooDeepError):
        parse_query("SELECT " + "(" * 5000 + "1" + ")" * 5000, "sqlite")


def test_tables_that_a_query_reads() -> None:
    query = (
        "WITH t AS (SELECT * FROM Staff) SELECT 1 FROM t JOIN (SELECT x FROM pay) p WHERE EXISTS (SELECT 1 FROM Log)"
    )
    assert tables_read(parse_query(query, "sqlite")) == {"staff", "pay", "log"}
    assert tables_read(parse_query("SELECT 1", "sqlite")) == set()
