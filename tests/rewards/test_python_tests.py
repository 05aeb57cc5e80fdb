"""`python_tests`: verdicts by hand for the three forms of tests, and code that wants a better one than it earns."""

from __future__ import annotations

import json
import pickle
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.guard.outcomes import Outcome
from trl_grpo_ext.rewards import python_tests as module
from trl_grpo_ext.rewards._sandbox.run import LAYERS, isolation
from trl_grpo_ext.rewards._sandbox.test_forms import Checks, read_tests
from trl_grpo_ext.rewards.python_tests import PythonTests, fenced_code

pytestmark = pytest.mark.skipif(set(isolation()) != set(LAYERS), reason="needs Landlock and seccomp")

ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]
RIGHT = "def add(a, b):\n    return a + b"
HUMAN_EVAL = """
def check(candidate):
    assert candidate(1, 2) == 3
    assert candidate(2, 2) == 4, "message"
    assert abs(candidate(0.1, 0.2) - 0.3) < 1e-6
"""
SUM = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 -5", "output": "0"}]


def fence(code: str) -> str:
    return f"Here it is:\n```python\n{textwrap.dedent(code)}\n```\nDone."


def outcome(code: str, tests: Any, reward: PythonTests | None = None, **columns: Any) -> Outcome:
    [judgement] = (reward or PythonTests()).judge(completions=[fence(code)], tests=[tests], **columns)
    return judgement.outcome


# --- verdicts --------------------------------------------------------------------------------------------------------


VERDICTS: list[tuple[str, Any, Outcome]] = [
    (RIGHT, ADD, Outcome.RIGHT),
    ("def add(a, b): return a - b", ADD, Outcome.WRONG),
    ("def add(a, b): return 3", ADD, Outcome.WRONG),
    ("def plus(a, b): return a + b", ADD, Outcome.WRONG),
    ("def add(a, b): return a + b\n1 / 0", ADD, Outcome.WRONG),
    ("def add(a, b): return", ADD, Outcome.WRONG),
    ("def add(a, b", ADD, Outcome.NO_ANSWER),
    ("", ADD, Outcome.NO_ANSWER),
    ("  \n", ADD, Outcome.NO_ANSWER),
    ("x = '\0'", ADD, Outcome.NO_ANSWER),
    ("x = '\ud800'", ADD, Outcome.NO_ANSWER),
    (RIGHT, HUMAN_EVAL + "\ncheck(add)", Outcome.RIGHT),
    ("def add(a, b): return int(a + b)", HUMAN_EVAL + "\ncheck(add)", Outcome.WRONG),
    ("def add(a, b): return 3", HUMAN_EVAL + "\ncheck(add)", Outcome.WRONG),
    (RIGHT, "for i in range(9):\n    assert add(i, 1) == i + 1", Outcome.RIGHT),
    ("print(sum(map(int, input().split())))", SUM, Outcome.RIGHT),
    ("print(3)", SUM, Outcome.WRONG),
    ("print(sum(map(int, input().split())), 'is the sum')", SUM, Outcome.WRONG),
    ("print(sum(map(int, input().split())))\nraise SystemExit(1)", SUM, Outcome.WRONG),
    ("print(sum(map(int, input().split())))\nexit()\n1 / 0", SUM, Outcome.RIGHT),
    ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)", SUM, Outcome.RIGHT),
    ("def main():\n  print(sum(map(int, input().split())))\nif __name__ == '__main__': main()", SUM, Outcome.RIGHT),
    ("print(", SUM, Outcome.NO_ANSWER),
    ("while True: pass", ADD, Outcome.TIMEOUT),
    ("def add(a, b):\n  while True: pass", ADD, Outcome.TIMEOUT),
    ("while True: pass", SUM, Outcome.TIMEOUT),
    ("x = 'a' * 10**10", ADD, Outcome.DIED),
    ("def add(a, b): return 'a' * 10**10", ADD, Outcome.DIED),
    ("import ctypes\nctypes.string_at(0)", ADD, Outcome.DIED),
    ("import ctypes\nctypes.string_at(0)", SUM, Outcome.DIED),
    ("import os\nos.kill(os.getpid(), 9)", ADD, Outcome.DIED),
    (RIGHT, [], Outcome.UNPARSEABLE),
    (RIGHT, "", Outcome.UNPARSEABLE),
    (RIGHT, ["assert add(1, 2) == 3", ""], Outcome.UNPARSEABLE),
    (RIGHT, ["assert add(1, 2 == 3"], Outcome.UNPARSEABLE),
    (RIGHT, ["return 3"], Outcome.UNPARSEABLE),
    (RIGHT, ["assert add('\0', '') == ''"], Outcome.UNPARSEABLE),
    (RIGHT, HUMAN_EVAL, Outcome.UNPARSEABLE),
    (RIGHT, [{"input": "1 2"}], Outcome.UNPARSEABLE),
    (RIGHT, [{"input": "1", "output": 1}], Outcome.UNPARSEABLE),
    (RIGHT, ["assert True", {"input": "1", "output": "1"}], Outcome.UNPARSEABLE),
    (RIGHT, None, Outcome.UNPARSEABLE),
    (RIGHT, 3, Outcome.UNPARSEABLE),
]


def test_verdicts() -> None:
    reward = PythonTests(timeout=1.5)
    judged = reward.judge(completions=[fence(code) for code, *_ in VERDICTS], tests=[tests for _, tests, _ in VERDICTS])
    found = [(code, tests, one.outcome) for (code, tests, _), one in zip(VERDICTS, judged, strict=True)]
    assert found == VERDICTS


def test_human_eval_calls_check_with_the_entry_point() -> None:
    assert outcome(RIGHT, HUMAN_EVAL, entry_point=["add"]) is Outcome.RIGHT
    assert outcome("def add(a, b): return 3", HUMAN_EVAL, entry_point=["add"]) is Outcome.WRONG
    solution = "class Solution:\n    def add(self, a, b): return a + b"
    assert outcome(solution, HUMAN_EVAL, entry_point=["Solution().add"]) is Outcome.RIGHT
    assert outcome(RIGHT, HUMAN_EVAL, entry_point=["add("]) is Outcome.UNPARSEABLE
    with pytest.raises(RewardError, match="1 completions but 2 entries in 'entry_point'"):
        outcome(RIGHT, HUMAN_EVAL, entry_point=["add", "add"])


def test_partial_gives_the_share_of_tests_and_goes_on_after_one_that_failed() -> None:
    codes = [RIGHT, "def add(a, b): return 3", "def add(a, b): return 7"]
    columns = {"prompts": ["?"] * 3, "completions": [fence(code) for code in codes], "completion_ids": [[1]] * 3}
    assert PythonTests(partial=True)(**columns, tests=[ADD] * 3) == [1.0, 1 / 3, 0.0]
    assert PythonTests()(**columns, tests=[ADD] * 3) == [1.0, 0.0, 0.0]
    code = "a, b = map(int, input().split())\nif b < 0: raise SystemExit(1)\nprint(a + b)"
    [judgement] = PythonTests(partial=True).judge(completions=[fence(code)], tests=[SUM[::-1]])
    assert (judgement.outcome, judgement.score) == (Outcome.SCORED, 0.5)


@pytest.mark.slow
def test_a_timeout_is_a_timeout_whatever_passed_before() -> None:
    code = "def add(a, b):\n    while a == 'a': pass\n    return a + b"
    assert outcome(code, ADD, PythonTests(partial=True, timeout=0.5)) is Outcome.TIMEOUT
    slow = "import time\ntime.sleep(0.4)\nprint(sum(map(int, input().split())))"
    assert outcome(slow, SUM * 3, PythonTests(timeout=1.0)) is Outcome.TIMEOUT, "the tests of a completion share it"
    assert outcome(slow, SUM, PythonTests(timeout=5.0)) is Outcome.RIGHT


@pytest.mark.slow
def test_a_batch_is_scored_in_order_and_a_hanging_completion_holds_nobody_up() -> None:
    codes = [RIGHT, "while True: pass", "def add(a, b): return 0", RIGHT, "", RIGHT]
    reward = PythonTests(timeout=1.0, workers=3)
    completions: list[Any] = [fence(code) for code in codes]
    completions[3] = [{"role": "assistant", "content": completions[3]}]
    assert reward(completions=completions, tests=[ADD] * 6) == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert reward(completions=completions[::-1], tests=[ADD] * 6) == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert reward(completions=[], tests=[]) == []


def test_a_completion_without_code_has_no_answer() -> None:
    empty = ["", None, [], [{"role": "assistant", "content": None}], "\x00", "\ud800", "no code"]
    judged = PythonTests().judge(completions=empty, tests=[ADD] * len(empty))
    assert {one.outcome for one in judged} == {Outcome.NO_ANSWER}


def test_large_and_deep_completions_end() -> None:
    texts = ["(" * 10**6, "[" * 99_999, "x = 1\n" * 16_000, "```\n" * 25_000, "-" * 90_000 + "1"]
    start = time.monotonic()
    judged = PythonTests(timeout=2.0).judge(completions=texts, tests=[ADD] * len(texts))
    assert judged[0].outcome is Outcome.REFUSED
    assert {one.outcome for one in judged[1:]} <= {Outcome.NO_ANSWER, Outcome.DIED, Outcome.WRONG}
    assert time.monotonic() - start < 30


# --- forgeries -------------------------------------------------------------------------------------------------------

YES_MAN = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
"""
FORGERIES = {
    "prints that it passed": "print('passed', '1.0', 'OK')",
    "leaves with sys.exit": "import sys\nsys.exit(0)",
    "leaves with os._exit": "import os\nos._exit(0)",
    "raises SystemExit in the function": "def add(a, b): raise SystemExit(0)",
    "leaves in the function": "import os\ndef add(a, b): os._exit(0)",
    "leaves at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return None",
    "replaces AssertionError": "import builtins\nbuiltins.AssertionError = None\ndef add(a, b): return None",
    "returns what equals everything": YES_MAN + "def add(a, b): return Yes()",
    "returns a list of those": YES_MAN + "def add(a, b): return [Yes()]",
    "lies about an int": """
class I(int):
    __eq__ = lambda self, other: True
    __hash__ = int.__hash__
def add(a, b): return I(7)
""",
    "replaces built-ins": """
import builtins
for name in ('exec', 'compile', 'isinstance', 'type', 'len'):
    setattr(builtins, name, lambda *a, **k: True)
def add(a, b): return None
""",
    "deletes the tests": "import os, glob\n[os.remove(f) for f in glob.glob('*')]\ndef add(a, b): return None",
    "writes to all descriptors": """
import os
for descriptor in range(20):
    try: os.write(descriptor, b'{"test": 0, "error": null}\\n{"end": true}\\n')
    except OSError: pass
def add(a, b): return None
""",
    "traces": "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None\ndef add(a, b): return None",
    "defines the name of the judge's function": "def __send_to_the_judge__(*a): pass\ndef add(a, b): return None",
    "silences threads": "import threading\nthreading.excepthook = lambda *a: None\ndef add(a, b): return None",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    # These know the harness: they walk up the frames, take what they find, and report passes themselves.
    "reports passes itself": """
import sys
def add(a, b):
    frame, report = sys._getframe(), None
    while frame:
        report = frame.f_locals.get('report', report)
        frame = frame.f_back
    for test in range(3):
        report(test=test, error=None)
    report(end=True)
    import os; os._exit(0)
""",
    "hands over what it guesses": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        if 'report' in frame.f_locals:
            for slot in range(3):
                frame.f_locals['report'](slot=slot, value=['i', '3'])
        frame = frame.f_back
    return None
""",
    "looks for the answers everywhere": """
import gc, sys
def add(a, b):
    texts = [o for o in gc.get_objects() if isinstance(o, (str, list, dict, tuple))]
    frame = sys._getframe()
    while frame:
        texts += list(frame.f_locals.values()) + list(frame.f_code.co_consts) + list(frame.f_globals.values())
        frame = frame.f_back
    return 3 if any('== 3' in t for t in texts if isinstance(t, str)) else None
""",
}


_LIES = ("equals everything", "list of those", "lies about", "replaces built-ins", "reports passes", "hands over")
USUAL = {name: forgery for name, forgery in FORGERIES.items() if not any(lie in name for lie in _LIES)}


@pytest.mark.parametrize(
    ("forgeries", "tests"),
    [
        (FORGERIES, ["assert add(1, 2) == 3"]),
        (FORGERIES, ADD),
        (FORGERIES, SUM),
        (USUAL, ["x = 7\nassert add(1, 2) == x"]),  # the others do forge an assert without a literal
    ],
    ids=["one literal", "three literals", "programs", "another assert"],
)
def test_a_verdict_cannot_be_forged(forgeries: dict[str, str], tests: list[Any]) -> None:
    judged = PythonTests().judge(completions=[*map(fence, forgeries.values())], tests=[tests] * len(forgeries))
    assert {name: one.outcome for name, one in zip(forgeries, judged, strict=True)} == dict.fromkeys(
        forgeries, Outcome.WRONG
    )


def test_asserts_that_may_be_meant_to_fail_are_left_alone() -> None:
    test = "try:\n    assert f(1) == 2\nexcept AssertionError:\n    pass\nelse:\n    raise ValueError"
    checks = read_tests([test])
    assert isinstance(checks, Checks)
    assert checks.expected == ()
    assert outcome("def f(x): return 1", [test]) is Outcome.RIGHT
    assert outcome("def f(x): return 2", [test]) is Outcome.WRONG


def test_asserts_inside_conditions_count_where_they_are_reached() -> None:
    test = "for i in range(3):\n    if i: assert f(i) == 1"
    assert outcome("def f(x): return 1", [test]) is Outcome.RIGHT
    assert outcome("def f(x): return x", [test]) is Outcome.WRONG
    assert outcome("def f(x): return 2", ["if False: assert f(1) == 1"]) is Outcome.RIGHT


_literals = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.integers(0, 3), inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(_literals, _literals), min_size=1, max_size=12))
def test_a_test_passes_exactly_where_python_says_that_the_values_are_equal(pairs: list[tuple[Any, Any]]) -> None:
    pairs += [(value, value) for value, _ in pairs]
    code = f"values = {[value for value, _ in pairs]!r}\ndef f(i): return values[i]".replace("inf", "1e999")
    tests = [f"assert f({row}) == {wanted!r}".replace("inf", "1e999") for row, (_, wanted) in enumerate(pairs)]
    equal = [eval(repr(value).replace("inf", "1e999")) == wanted for value, wanted in pairs]
    [judgement] = PythonTests(partial=True).judge(completions=[fence(code)], tests=[tests])
    share = {Outcome.RIGHT: 1.0, Outcome.WRONG: 0.0}.get(judgement.outcome, judgement.score)
    assert share == sum(equal) / len(equal)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("a\n```python\nx = 1\n```\nb", "x = 1"),
        ("```python\nx = 1\n```\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\n```\n```\noutput\n```", "x = 1"),
        ("```py\nx = 1\n```\n```bash\nls\n```", "x = 1"),
        ("```\nx = 1\n```\n```text\nx = 2\n```", "x = 2"),
        ("```Python title=a.py\nx = 1\n```", "x = 1"),
        ("```python\nx = 1", "x = 1"),
        ("````python\n```\nx\n```\n````", "```\nx\n```"),
        ("~~~python\nx = 1\n~~~", "x = 1"),
        ("  ```python\nx = 1\n  ```", "x = 1"),
        ("```python\n```", ""),
        ("", ""),
    ],
)
def test_the_code_of_a_completion(text: str, code: str) -> None:
    assert fenced_code(text) == code


def test_the_whole_text_can_be_the_code() -> None:
    judged = PythonTests(code="text").judge(completions=[RIGHT, fence(RIGHT)], tests=[ADD, ADD])
    assert [judgement.outcome for judgement in judged] == [Outcome.RIGHT, Outcome.NO_ANSWER]


# --- the reward ------------------------------------------------------------------------------------------------------


def test_unreadable_tests_are_none_with_a_warning_and_outcomes_change_that() -> None:
    columns = {"completions": [fence(RIGHT)] * 2, "tests": [ADD, ["assert ("]]}
    with pytest.warns(UserWarning, match=r"cannot read the tests at row 1 \(a test is no Python: .*; 1 of 2 in this"):
        assert PythonTests()(**columns) == [1.0, None]
    with pytest.warns(UserWarning, match="cannot read the tests"):
        assert PythonTests(outcomes={"unparseable_reference": -1, "right": 2})(**columns) == [2.0, -1.0]
    with pytest.raises(RewardError, match="the outcome at row 0 is 'timeout'"):
        PythonTests(timeout=0.2, outcomes={"timeout": "raise"})(completions=["while 1: pass"], tests=[ADD])


def test_outcomes_are_logged() -> None:
    metrics: dict[str, float] = {}
    extra: dict[str, Sequence[Any]] = {}
    PythonTests()(
        completions=[fence(RIGHT), ""], tests=[ADD, ADD], log_metric=metrics.__setitem__, log_extra=extra.__setitem__
    )
    assert metrics["outcomes/python_tests/right"] == metrics["outcomes/python_tests/no_answer"] == 0.5
    assert metrics["outcomes/python_tests/timeout"] == 0.0
    assert extra == {"python_tests_outcome": ["right", "no_answer"]}


def test_a_missing_column_is_an_error_that_names_it() -> None:
    with pytest.raises(RewardError, match=r"python_tests needs the column 'tests'; .*\['answer'\]. Rename the column"):
        PythonTests()(completions=["x"], answer=["1"])
    with pytest.raises(RewardError, match="2 completions but 1 entries in 'tests'"):
        PythonTests()(completions=["x", "y"], tests=[ADD])


def test_it_pickles() -> None:
    reward = pickle.loads(pickle.dumps(PythonTests(partial=True, timeout=2.5)))
    assert reward(completions=[fence("def add(a, b): return 3")], tests=[ADD]) == [1 / 3]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"partial": 1}, "partial must be true or false, got 1"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, got 0"),
        ({"timeout": True}, "timeout must be a positive number of seconds, got True"),
        ({"memory_mb": 0}, "memory_mb must be a whole number, 1 or more, got 0"),
        ({"workers": 0}, "workers must be a whole number, 1 or more, got 0"),
        ({"max_characters": 1.5}, "max_characters must be a whole number"),
        ({"code": "first"}, "code must be 'fence' or 'text', got 'first'"),
        ({"require": "files"}, "require must be a list of files, network, processes, memory, got 'files'"),
        ({"require": ["file"]}, "require must be a list of"),
        ({"require": [["files"]]}, "require must be a list of"),
        ({"outcomes": {"error": 0}}, "has no outcome 'error' to set"),
    ],
)
def test_parameters_that_cannot_work_are_refused_at_construction(parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        PythonTests(**parameters)


def test_a_machine_without_a_required_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "isolation", lambda memory_mb: ("files", "memory"))
    with pytest.raises(ConfigurationError, match=r"cannot hold network, processes back .*it can: files, memory"):
        PythonTests()
    assert PythonTests(require=["files"]).require == ("files",)
    assert PythonTests(require=[]).require == ()


def test_the_job_is_no_size_that_blocks() -> None:
    tests = [f"assert add({number}, '{'x' * 10_000}') == 1" for number in range(100)]
    assert len(json.dumps(tests)) > 10**6
    assert outcome("def add(a, b): return len(b) // 10_000", tests) is Outcome.RIGHT
