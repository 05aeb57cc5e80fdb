"""`trl-grpo-ext audit`: unreadable and wrong references are found before training, and shown as text."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.terminal import assert_readable, invoke
from trl_grpo_ext import load_rewards
from trl_grpo_ext.cli.audit import Audit, _rows, audit
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.python_tests import PythonTests

GOOD = [
    {"prompt": "How many?", "answer": "She has 9 * 2 = 18 eggs.\n#### 18"},
    {"prompt": "How much?", "answer": "#### 1,234"},
    {"prompt": "How far?", "answer": "2.5"},
]


def gsm8k(rows: Sequence[dict[str, Any]], **settings: Any) -> Audit:
    (reward,) = load_rewards(["gsm8k_accuracy"])
    return audit(reward, rows, **settings)


def problems(found: Audit) -> list[tuple[int, str]]:
    return [(finding.row, finding.problem) for finding in found.findings]


def test_audit_finds_an_unreadable_reference() -> None:
    found = gsm8k(GOOD)
    assert found.findings == []
    assert (found.reward, found.column, found.rows, found.references) == ("gsm8k_accuracy", "answer", 3, 3)
    found = gsm8k([*GOOD, {"prompt": "Why?", "answer": "Because she \x1b[31mwants to."}])
    assert problems(found) == [(3, "unparseable_reference")]
    assert "\x1b" not in found.findings[0].reference
    assert found.counts() == {"unparseable_reference": 1}


@pytest.mark.slow
def test_references_for_math_verify() -> None:
    (reward,) = load_rewards([{"name": "math_accuracy", "timeout": 0.5, "workers": 1}])
    texts = ("$\\frac{1}{2}$", "0.5", "see the proof above", "$9^{9^{9^9}}$", "She has 3 of 4.\n#### 18")
    rows = [{"solution": text} for text in texts]
    found = audit(reward, rows)
    assert problems(found) == [(2, "unparseable_reference"), (3, "unparseable_reference")]
    assert "digits" in found.findings[1].detail
    as_answer = [{"answer": row["solution"]} for row in rows[:2]]
    assert audit(reward, as_answer, column="answer").column == "answer"
    with pytest.raises(ConfigurationError, match="'solution'"):
        audit(reward, as_answer)  # training would stop there
    reward.close()


def last_number(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """As careless graders do: it reads an equation as the number that stands last."""
    numbers = [[re.findall(r"\d+", text)[-1:] for text in texts] for texts in (completions, answer)]
    return [float(bool(one) and one == other) for one, other in zip(*numbers, strict=True)]


def test_audit_finds_a_reward_fooled_by_shape() -> None:
    rows = [{"answer": "3x-y+13=0"}, {"answer": "18"}, {"answer": "2 is even"}, {"answer": "x \\le 3"}]
    found = audit(last_number, rows, column="answer")
    assert problems(found) == [(row, "accepts_wrong_answer") for row in (0, 2, 3)]
    assert "3x+y+13=0" in found.findings[0].detail
    assert "2 is odd" in found.findings[1].detail


@pytest.mark.slow
def test_what_the_references_were_read_as() -> None:
    (reward,) = load_rewards([{"name": "math_accuracy", "workers": 1}])
    rows = [{"solution": text} for text in ("3x-y+13=0", "18 apples", "$k \\text{ is even}$", "18", "3 of 4", "18")]
    found = audit(reward, rows)
    assert problems(found) == [(4, "unparseable_reference")]
    assert "'of' may be words" in found.findings[0].detail
    assert [one.read_as for one in found.read] == ["3x-y+13=0", "18", "k \\text{ is even}", "18", ""]
    assert [one.left_over for one in found.read] == ["", "apples", "", "", "3 of 4"]
    of_gsm8k = gsm8k([*GOOD, {"answer": "$18 a day"}]).read
    assert [one.read_as for one in of_gsm8k] == ["18", "1234", "5/2", "18"]
    assert [one.left_over for one in of_gsm8k] == ["", "", "", "a day"]
    reward.close()


def half_right(completions: list[str], target: list[str], **columns: Any) -> list[float | None]:
    return [None if t == "?" else 0.5 + 0.5 * (c == t) for c, t in zip(completions, target, strict=True)]


def test_a_reward_without_outcomes_is_right_from_1_on() -> None:
    rows = [{"target": "a", "code": "a"}, {"target": "?", "code": "?"}, {"target": "a \n", "code": "b"}]
    assert problems(audit(half_right, rows, column="target")) == [(1, "none")]
    assert problems(audit(half_right, rows, column="target", completions="code")) == [(1, "none"), (2, "wrong")]


def test_lists_and_json_are_audited_in_the_form_of_a_completion() -> None:
    lists = [{"lines": ["a", "b"]}, {"lines": [1, 2.5]}, {"lines": ["a b  c"]}]
    objects = [{"fields": '{"a": 1}'}, {"fields": {"a": 1, "b": [None, "x"]}}]
    for name, rows in {"lines": lists, "{name: lines, form: numbered}": lists, "json_fields": objects}.items():
        (reward,) = load_rewards([name])
        assert audit(reward, rows).findings == []
        assert problems(audit(reward, [*rows, {"lines": [], "fields": "{"}])) == [(len(rows), "unparseable_reference")]


HOSTILE = "no number [red]x[/red] \x1b[31m\u202e \ud83d\ude00 " + "y" * 120


@pytest.fixture
def files(tmp_path: Path) -> Path:
    answer = HOSTILE.encode("utf-16", "surrogatepass").decode("utf-16")
    bad = [*GOOD, {"prompt": "Why?", "answer": answer}, {"prompt": "How?", "answer": "#### 1/0"}]
    for name, rows in {"good": GOOD, "bad": bad}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def test_audit_command(files: Path) -> None:
    done = invoke("audit", files / "good.jsonl", "--reward", "gsm8k_accuracy")
    assert "gsm8k_accuracy on 3 rows, 3 different references in column answer" in done.out
    assert "left over: 0 of 3 different references\nread in full: 3\n  row 0, " in done.out
    assert invoke("audit", files / "bad.jsonl", "--reward", "gsm8k_accuracy", "--limit", "3").status == 0
    assert "in full: 3\n" in invoke("audit", files / "bad.jsonl", "--reward", "gsm8k_accuracy").out  # the others not
    for words in (["think_format"], ["gsm8k_accuracy", "--reference", "solution"]):
        refused = invoke("audit", files / "good.jsonl", "--reward", *words)
        assert (refused.status, refused.out, refused.err.count("\n")) == (2, "", 1)
    (files / "time.jsonl").write_text('{"answer": "12:30"}\n{"answer": "12"}\n', encoding="utf-8")
    time = invoke("audit", files / "time.jsonl", "--reward", "gsm8k_accuracy").out
    assert "read in full: 1\n  row 1, " in time
    assert "unparseable_reference: 1 (50.00%)\n  row 0, " in time
    (files / "mixed.jsonl").write_text('{"prompt": "?"}\n{"answer": "#### 3"}\n', encoding="utf-8")
    mixed = invoke("audit", files / "mixed.jsonl", "--reward", "gsm8k_accuracy", "--json")
    assert [finding["row"] for finding in json.loads(mixed.out)["findings"]] == [0]  # which has no answer


@pytest.mark.parametrize("width", [60, None])
def test_audit_command_shows_hostile_text(files: Path, width: int | None) -> None:
    done = invoke("audit", files / "bad.jsonl", "--reward", "{name: gsm8k_accuracy}", width=width)
    assert done.status == 1
    assert "unparseable_reference" in done.plain
    if width is not None:
        assert_readable(done.out.rpartition("\r")[2], width)  # after the progress bar, which is taken away
    else:
        assert "\x1b" not in done.out
    seen = "".join(done.plain.split())
    assert all(text in seen for text in ("[red]x[/red]", "\\x1b[31m", "\\u202e"))
    assert seen.count("y") >= 120 + 80  # folded, not cut: the reference, and what the reward says of it
    assert "\u202e" not in done.out
    assert done.err.strip() == ""
    done = invoke("audit", files / "bad.jsonl", "--reward", "gsm8k_accuracy", "--json")
    assert (found := json.loads(done.out))["problems"]["unparseable_reference"] == 2
    assert [finding["row"] for finding in found["findings"]] == [3, 4]


def test_audit_refuses_odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {"empty.jsonl": "", "empty.parquet": "", "binary.jsonl": "\x00\xff", "x" * 300: None}.items():
        if content is not None:
            Path(name).write_text(content, encoding="latin-1")
        with pytest.raises(ConfigurationError):
            audit(half_right, _rows(name, None, "train", None))


def test_audit_finds_tests_that_cannot_fail() -> None:
    code = "def add(a, b):\n    return a + b"
    tests = [
        ["assert add(1, 2) == 3"],
        ["def run():\n    assert add(1, 2) == 3"],
        "def test_add():\n    add(1, 2)",
        ["if add(1, 2) > 3:\n    assert add(0, 0) == 0"],
        ["assert True"],
    ]
    rows = [{"tests": test, "code": code} for test in tests]
    found = audit(PythonTests(require=[]), rows, column="tests", completions="code")
    assert problems(found) == [(row, "unparseable_reference") for row in (1, 2, 3, 4)]
    assert "nothing in the tests can fail" in found.findings[0].detail
