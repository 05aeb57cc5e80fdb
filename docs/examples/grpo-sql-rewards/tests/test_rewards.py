"""Both rewards: what is right, what goes wrong, and in which way."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.testing import assert_conforms

from grpo_sql_rewards import SQLExecution, SQLMatch

STAFF = """
CREATE TABLE staff (name TEXT, dept TEXT, pay INT);
INSERT INTO staff VALUES ('Ana', 'lab', 2), ('Ben', 'lab', 5), ('Eva', 'ops', 7);
"""
ABOVE_3 = "SELECT name FROM staff WHERE pay > 3"  # Ben, Eva
RUN, MATCH = SQLExecution(max_steps=1_000_000), SQLMatch()


def outcomes(reward: SQLExecution | SQLMatch, *queries: str, answer: str = ABOVE_3, context: str = STAFF) -> list[str]:
    judged = reward.judge(list(queries), answer=[answer] * len(queries), context=[context] * len(queries))
    return [one.outcome.value for one in judged]


@pytest.mark.parametrize("name", ["sql_execution", "sql_match"])
def test_it_conforms(name: str) -> None:
    assert_conforms("reward", name)


def test_scores_by_hand() -> None:
    completions = [ABOVE_3, "SELECT name FROM staff", "no idea", ABOVE_3]
    columns = {"answer": [ABOVE_3, ABOVE_3, ABOVE_3, "7 apples"], "context": [STAFF] * 4}
    with pytest.warns(UserWarning, match="can say nothing about 1 of 4 completions"):
        assert SQLExecution()(completions, **columns) == [1.0, 0.0, 0.0, None]
    with pytest.warns(UserWarning, match="7 apples"):
        assert SQLMatch(outcomes={"wrong": -1})(completions, **columns) == [1.0, -1.0, 0.0, None]


@pytest.mark.parametrize(
    ("query", "run", "compared"),
    [
        ("SELECT s.name AS who FROM staff AS s WHERE 3 < s.pay", "right", "right"),
        ("SELECT name FROM (SELECT * FROM staff) WHERE pay > 1 + 2", "right", "right"),
        ("SELECT name FROM staff WHERE pay >= 5", "right", "wrong"),  # the same rows, by this database only
        ("SELECT name FROM staff WHERE pay > 4 ORDER BY name DESC", "right", "wrong"),
        ("SELECT name FROM staff WHERE pay > 5", "wrong", "wrong"),
        ("SELECT name FROM staff", "wrong", "wrong"),
        ("SELECT name, pay FROM staff WHERE pay > 3", "wrong", "wrong"),
        ("SELECT age FROM staff", "wrong", "wrong"),
        ("SELECT name FROM staff, staff", "wrong", "wrong"),
        ("SELECT 'Ben' UNION SELECT 'Eva'", "wrong", "wrong"),  # the rows, written down
        ("DELETE FROM staff", "no_answer", "no_answer"),  # prose, as far as anybody can tell
        ("```sql\nDELETE FROM staff\n```", "wrong", "wrong"),
        ("SELECT name FROM staff; DROP TABLE staff", "wrong", "wrong"),
        ("SELECT name FROM WHERE", "no_answer", "no_answer"),
    ],
)
def test_right_and_wrong(query: str, run: str, compared: str) -> None:
    assert outcomes(RUN, query) == [run]
    assert outcomes(MATCH, query) == [compared]


def test_order_counts_where_the_reference_orders() -> None:
    up, down = "SELECT name FROM staff ORDER BY pay", "SELECT name FROM staff ORDER BY pay DESC"
    assert outcomes(RUN, up, down, "SELECT name FROM staff", answer=down) == ["wrong", "right", "wrong"]
    assert outcomes(RUN, up, down, answer="SELECT name FROM staff") == ["right", "right"]


def test_rows_are_a_multiset_and_numbers_are_compared_by_value() -> None:
    assert outcomes(RUN, "SELECT DISTINCT dept FROM staff", answer="SELECT dept FROM staff") == ["wrong"]
    thirds = "SELECT sum(pay) / 3.0 FROM staff"
    assert outcomes(RUN, "SELECT sum(pay / 3.0) FROM staff", answer=thirds) == ["right"]
    assert outcomes(RUN, "SELECT sum(pay) / 3.0 + 1e-6 FROM staff", answer=thirds) == ["wrong"]
    assert outcomes(RUN, "SELECT count(*) * 1.0 FROM staff", answer="SELECT count(*) FROM staff") == ["right"]


def test_output_names_and_references_to_them_do_not_count_for_a_match() -> None:
    answer = "SELECT dept, count(*) AS n FROM staff GROUP BY dept ORDER BY n"
    other = "SELECT s.dept AS d, COUNT(*) AS heads FROM staff AS s GROUP BY s.dept ORDER BY heads"
    assert outcomes(MATCH, other, other + " DESC", answer=answer) == ["right", "wrong"]
    assert SQLMatch()(["SELECT a x FROM t"], answer=["SELECT a FROM t"]) == [1.0]  # without a context, too


@pytest.mark.parametrize(
    ("answer", "context"),
    [
        ("SELECT name FROM staff WHERE pay > 100", STAFF),  # no rows: anything would be right
        ("SELECT name FROM staff", "CREATE TABLE staff (name TEXT)"),
        ("SELECT name FROM nowhere", STAFF),
        ("SELECT name FROM staff", "CREATE TABLE"),
        ("SELECT 1", "ATTACH 'elsewhere.db' AS e"),
        ("SELECT 1", "PRAGMA writable_schema = 1"),
        ("SELECT name FROM staff", STAFF + "\x00"),
        ("WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t", STAFF),
    ],
)
def test_a_reference_that_says_nothing_is_no_wrong_answer(answer: str, context: str) -> None:
    assert outcomes(RUN, "SELECT name FROM staff", answer=answer, context=context) == ["unparseable_reference"]


@pytest.mark.parametrize("reference", [None, 7, ["SELECT 1"], float("nan"), "", "SELEC", "SELECT 1; SELECT 2"])
@pytest.mark.parametrize("reward", [RUN, MATCH])
def test_an_unreadable_reference_gives_none(reward: SQLExecution | SQLMatch, reference: object) -> None:
    completions = [ABOVE_3, "no query", "", "SELECT (", "SELECT name FROM staff" + " " * 200_000]
    with pytest.warns(UserWarning, match="can say nothing about 5 of 5"):
        assert reward(completions, answer=[reference] * 5, context=[STAFF] * 5) == [None] * 5


def test_a_database_that_is_missing_gives_none_or_is_an_error() -> None:
    with pytest.warns(UserWarning, match="no database"):
        assert SQLExecution()([ABOVE_3], answer=[ABOVE_3], context=[None]) == [None]
    with pytest.raises(RewardError, match="needs the dataset column 'context'"):
        SQLExecution()([ABOVE_3], answer=[ABOVE_3])
    with pytest.raises(RewardError, match="needs the dataset column 'answer'"):
        SQLMatch()([ABOVE_3])
    with pytest.raises(RewardError, match="got 1 completions but 2 entries"):
        SQLMatch()([ABOVE_3], answer=[ABOVE_3] * 2)


@pytest.mark.parametrize(
    ("query", "outcome"),
    [
        ("WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT n FROM t, staff", "timeout"),
        ("SELECT count(*) FROM staff" + ", staff" * 20, "timeout"),
        ("SELECT load_extension('evil.so') FROM staff", "refused"),
        ("SELECT LOAD_EXTENSION('evil.so') FROM staff", "refused"),
        ("SELECT random() FROM staff", "refused"),
        ("SELECT p.name FROM staff, pragma_database_list AS p", "refused"),
        ("SELECT group_concat(zeroblob(900000)) FROM staff a, staff b", "refused"),
        ("SELECT " + "(" * 2000 + "1" + ")" * 2000, "refused"),
        ("SELECT '" + "a" * 6000 + "' FROM staff", "refused"),
        ("SELECT '\ud800' FROM staff", "no_answer"),
        ("SELECT '\x00' FROM staff", "no_answer"),
        ("SELECT \u202ename\u202c FROM staff", "wrong"),
        ("SELECT name FROM staff" + " " * 200_000, "refused"),
    ],
)
def test_hostile_queries_have_an_outcome(query: str, outcome: str) -> None:
    assert outcomes(RUN, query) == [outcome]


def test_a_query_that_eats_memory_or_time_is_stopped_and_the_others_are_judged() -> None:
    rows = "WITH RECURSIVE t(n) AS (SELECT zeroblob(900000) UNION ALL SELECT zeroblob(900000) FROM t LIMIT 2000) "
    hungry = rows + "SELECT name, (SELECT n FROM t ORDER BY 1 LIMIT 1) FROM staff"
    slow = "SELECT printf('%.*c', 900000, name) LIKE '" + "%a" * 20 + "b' FROM staff"
    reward = SQLExecution(timeout=0.5, memory_mb=128)
    started = time.monotonic()
    first, second, third = outcomes(reward, hungry, slow, ABOVE_3)
    assert first in ("died", "timeout")
    assert second in ("timeout", "died", "wrong")
    assert third == "right"
    assert time.monotonic() - started < 20


def test_nothing_is_written_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    queries = ["SELECT writefile('out', 'x') FROM staff", "ATTACH 'out' AS o", "VACUUM INTO 'out'"]
    fenced = [f"```sql\n{query}\n```" for query in queries]
    assert "right" not in outcomes(RUN, *fenced)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reward", [RUN, MATCH])
def test_it_pickles_and_works_from_several_threads(reward: SQLExecution | SQLMatch) -> None:
    copy = pickle.loads(pickle.dumps(reward))
    completions = [ABOVE_3, "SELECT name FROM staff", [{"role": "assistant", "content": ABOVE_3}]]
    columns = {"answer": [ABOVE_3] * 3, "context": [STAFF] * 3}
    with ThreadPoolExecutor(3) as pool:
        scores = [one.result() for one in [pool.submit(copy, completions, **columns) for _ in range(6)]]
    assert scores == [[1.0, 0.0, 1.0]] * 6


def test_another_dialect_is_translated() -> None:
    answer = "SELECT name FROM staff WHERE dept ILIKE 'LAB'"
    assert outcomes(SQLExecution(dialect="postgres"), answer, answer=answer) == ["right"]
    assert outcomes(RUN, answer, answer=answer) == ["unparseable_reference"]  # SQLite has no ILIKE


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"dialect": "klingon"}, "one that sqlglot knows"),
        ({"timeout": 0}, "a positive number of seconds, got 0"),
        ({"max_characters": 1.5}, "a whole number, 1 or more, got 1.5"),
        ({"outcomes": {"none": 0}}, "has no outcome 'none'"),
    ],
)
def test_parameters_that_cannot_work(parameters: dict[str, object], says: str) -> None:
    for made in (SQLExecution, SQLMatch):
        with pytest.raises(ConfigurationError, match=says):
            made(**parameters)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="max_steps must be a whole number, 1 or more, got True"):
        SQLExecution(max_steps=True)
