"""`python_tests`: verdicts by hand for the three forms of tests, and code that wants a better one than it earns."""

import pickle
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.busy import busy
from tests.rewards.code_corpus import ATTACKS, FORGERIES, HONEST, SHAPES, SOLVED, Pair
from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.guard.outcomes import Judgement, Outcome
from trl_grpo_ext.rewards import python_tests as module
from trl_grpo_ext.rewards._sandbox.jobs import LAYERS, isolation
from trl_grpo_ext.rewards.python_tests import PythonTests, function_span

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


UNJUDGED: list[Any] = [
    *(["assert 1 + 1 == 2"], "def helper(x):\n    assert x == 1\ndef test_f():\n    return add(1, 2)"),
    *(["r = add(1, 2)\nif r is not None: assert r == 3"], ["import no_such_module\nassert add(1, 2) == 3"]),
    *(["while True: pass\nassert add(1, 2) == 3"], [], "", ["assert add(1, 2) == 3", ""], ["assert add(1, 2 == 3"]),
    *(["return 3"], ["assert add('\0', '') == ''"], HUMAN_EVAL, [{"input": "1 2"}], [{"input": "1", "output": 1}]),
    *(["assert True", {"input": "1", "output": "1"}], 3),
]
MEANT = "try:\n    assert f(1) == 2\nexcept AssertionError:\n    pass\nelse:\n    raise ValueError"  # to fail
SWALLOWED = "try:\n    assert f(1) == 2\nexcept Exception as e:\n    print('failed', e)"
PRINTS = "print(sum(map(int, input().split())))"
VERDICTS: list[tuple[str, Any, Outcome]] = [
    *((RIGHT, tests, Outcome.RIGHT) for tests in (ADD, HUMAN_EVAL + "\ncheck(add)")),
    ("def add(a, b): return int(a + b)", HUMAN_EVAL + "\ncheck(add)", Outcome.WRONG),
    *((code, ADD, Outcome.WRONG) for code in ("def add(a, b): return a - b", RIGHT + "\n1 / 0")),
    *((code, ADD, Outcome.NO_ANSWER) for code in ("def add(a, b", "", "x = '\0'", "x = '\ud800'")),
    *((code, ADD, Outcome.TIMEOUT) for code in ("while True: pass", "def add(a, b):\n  while True: pass")),
    *((code, ADD, Outcome.DIED) for code in ("x = 'a' * 10**10", "def add(a, b): return 'a' * 10**10")),
    ("import ctypes\nctypes.string_at(0)", ADD, Outcome.DIED),
    *((code, SUM, Outcome.RIGHT) for code in (PRINTS, PRINTS + "\nexit()\n1 / 0")),
    (f"def main():\n  {PRINTS}\nif __name__ == '__main__': main()", SUM, Outcome.RIGHT),
    *((code, SUM, Outcome.WRONG) for code in (PRINTS + "\nprint('is the sum')", PRINTS + "\nraise SystemExit(1)")),
    *(("print(", SUM, Outcome.NO_ANSWER), ("while True: pass", SUM, Outcome.TIMEOUT)),
    *(("def f(x): return 1", [MEANT], Outcome.RIGHT), ("def f(x): return 2", [MEANT], Outcome.WRONG)),
    *(("def f(x): return 2", [SWALLOWED], Outcome.RIGHT), ("def f(x): raise ValueError", [SWALLOWED], Outcome.WRONG)),
    *((RIGHT, tests, Outcome.UNPARSEABLE) for tests in UNJUDGED),
]


@pytest.mark.parametrize("rows", [VERDICTS[::5], pytest.param(VERDICTS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_verdicts(rows: list[tuple[str, Any, Outcome]]) -> None:
    judged = PythonTests(timeout=1.0).judge([fence(code) for code, *_ in rows], tests=[tests for _, tests, _ in rows])
    found = [(code, tests, one.outcome) for (code, tests, _), one in zip(rows, judged, strict=True)]
    assert found == rows


THREADS = """
import threading
threading.stack_size(2**29)
threads = [threading.Thread(target=lambda: print(sum(map(int, input().split())))) for _ in range(COUNT)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
STARTER = "class Solution:\n    def f(self, xs: List[int], k: int) -> Optional[int]:\n        "
DEEP = "{}\n    def g(i): return 0 if i == 0 else 1 + g(i - 1)\n    return g(n)"
KEYED = {"fn_name": "f", "inputs": [[{"1": 2}, 3]], "outputs": [[{"1": 2, "3": [4]}]]}


def functional(given: str, wanted: str) -> list[dict[str, str]]:
    return [{"input": given, "output": wanted, "testtype": "functional"}]


ENDLESS = "def g(n): return sorted([1], key=g)\ndef f(n):\n    try: g(0)\n    except RecursionError: "

# As the graders of the data sets judge: code, tests, the entry point, the outcome.
GRADED: list[tuple[str, Any, str | None, Outcome]] = [
    # What they import, the code need not, and it has written none of it.
    (f"{STARTER}return heapq.nlargest(k, xs)[0]", functional("[1, 5]\n1", "5"), "f", Outcome.RIGHT),
    (f"{STARTER}q = deque(xs, k); return q.popleft()", functional("[1, 5]\n1", "5"), "f", Outcome.RIGHT),
    ("def f(n: Optional[int]): return floor(sqrt(n))", "def check(f):\n    assert f(9) == 3", "f", Outcome.RIGHT),
    ("def f(n): return bisect.bisect([1], n)", {"fn_name": "f", "inputs": [[3]], "outputs": [1]}, None, Outcome.RIGHT),
    ("a, b = map(int, stdin.readline().split())\nprint(reduce(add, [a, b]))", SUM, None, Outcome.RIGHT),
    ("def f(n): return pow(n, -1, 7) + Counter('aa')['a']", functional("3", "7"), "f", Outcome.RIGHT),
    ("def sqrt(n): return 5\ndef f(n): return sqrt(n)", functional("4", "5"), "f", Outcome.RIGHT),
    ("def f(n): return sqrt(n)", ["assert f(4) == 2"], None, Outcome.WRONG),
    ("x = 1", functional("5", "120"), "factorial", Outcome.WRONG),
    ("x = 1", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, None, Outcome.WRONG),
    ("x = 1", "def check(candidate):\n    assert candidate(1, 2) == 3", "add", Outcome.WRONG),
    (DEEP.format("def f(n):"), functional("20000", "20000"), "f", Outcome.RIGHT),
    (DEEP.format("def f(n):\n    @cache"), functional("20000", "20000"), "f", Outcome.RIGHT),
    ("def f(n): return f(n + 1)", functional("1", "1"), "f", Outcome.WRONG),
    # HumanEval's does not raise the limit of recursion.
    (f"{ENDLESS}return n", "def check(f):\n    assert f(9) == 9", "f", Outcome.RIGHT),
    # Results: in a list of one, and with numbers for keys, in APPS and TACO.
    ("def f(n): return 6", functional("1", "[6]"), "f", Outcome.WRONG),
    ("def f(n): return (6, [(n,)])", functional("1", "[6, [[1]]]"), "f", Outcome.RIGHT),
    ("def f(n): return 6", {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[6], 6]}, None, Outcome.RIGHT),
    ("def f(n): return 6", {"fn_name": "f", "inputs": ["1\n", "2"], "outputs": ["6", "6"]}, None, Outcome.RIGHT),
    ("def f(n, s): return n", {"fn_name": "f", "inputs": ['1\n"a"'], "outputs": ["1"]}, None, Outcome.RIGHT),
    ("def f(d, k): return {**{1: d[1]}, k: (4,)}", KEYED, None, Outcome.RIGHT),
    ("def f(d, k): return {1: 2}", KEYED, None, Outcome.WRONG),
    ("def f(d): return d['1']", functional('{"1": 2}', "2"), "f", Outcome.RIGHT),
    ("print(1 / 3)", {"inputs": [""], "outputs": ["0.333333"]}, None, Outcome.RIGHT),
    ("print(1 / 3)", [{"input": "", "output": "0.333333"}], None, Outcome.WRONG),
    # Threads.
    (THREADS.replace("COUNT", "1"), SUM, None, Outcome.RIGHT),
    (THREADS.replace("COUNT", "9"), SUM, None, Outcome.DIED),
    (f"def f(n):{THREADS.replace('COUNT', '9')}".replace("\n", "\n    "), functional("1", "1"), "f", Outcome.DIED),
    ("def f(n): raise RuntimeError(object())", functional("1", "1"), "f", Outcome.WRONG),
]


@pytest.mark.parametrize("rows", [GRADED[::5], pytest.param(GRADED, marks=pytest.mark.slow)], ids=["some", "all"])
def test_verdicts_of_the_data_sets_graders(rows: list[tuple[str, Any, str | None, Outcome]]) -> None:
    columns = {"tests": [tests for _, tests, *_ in rows], "entry_point": [entry for *_, entry, _ in rows]}
    judged = PythonTests(timeout=5.0).judge([fence(code) for code, *_ in rows], **columns)
    found = [(*row[:3], one.outcome) for row, one in zip(rows, judged, strict=True)]
    assert found == rows


def test_human_eval_calls_check_with_the_entry_point() -> None:
    assert outcome("def add(a, b): return 3", HUMAN_EVAL, entry_point=["add"]) is Outcome.WRONG
    solution = "class Solution:\n    def add(self, a, b): return a + b"
    assert outcome(solution, HUMAN_EVAL, entry_point=["Solution().add"]) is Outcome.RIGHT
    assert outcome(RIGHT, HUMAN_EVAL, entry_point=["add("]) is Outcome.UNPARSEABLE
    with pytest.raises(RewardError, match="'entry_point'"):
        outcome(RIGHT, HUMAN_EVAL, entry_point=["add", "add"])


def parts(code: str, tests: Any, **columns: Any) -> list[tuple[str, float | None, list[str]]]:
    """Each test's part: name, score, and the text at its place."""
    text = fence(code)
    [score] = PythonTests(partial=True)(completions=[text], tests=[tests], **columns)
    return [(part.name, part.score, [text[slice(*place[:2])] for place in part.places]) for part in score.parts]


def test_with_partial_each_test_is_a_part_at_the_function_that_it_calls() -> None:
    two = (
        "import math\n\n\ndef add(\n    a, b\n):\n    # sum\n\n    return a + b\n\ndef sub(a, b):\n    return a\nx = 1"
    )
    add, sub = two.split("\n\n\n")[1].split("\n\ndef sub")[0], "def sub(a, b):\n    return a"
    tests = ["import math", "assert add(1, 2) == 3", "assert sub(3, 1) == 2", "assert sub(3, 0) + add(0, 0) == 3"]
    assert parts(two, tests) == [("test_1", 1.0, [add]), ("test_2", 0.0, [sub]), ("test_3", 1.0, [two])]
    assert parts(RIGHT, HUMAN_EVAL, entry_point=["add"]) == [("test_0", 1.0, [RIGHT])]
    method = "class Solution:\n    def add(self, a, b):\n        return a + b\n\n    def other(self): pass"
    cases = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 8], "fn_name": "add"}
    inside = "def add(self, a, b):\n        return a + b"
    assert parts(method, cases) == [("test_1", 1.0, [inside]), ("test_2", 0.0, [inside])]
    program = "print(int(input().split()[0]) + 2)"
    assert parts(program, SUM) == [("test_0", 1.0, [program]), ("test_1", 0.0, [program])]
    assert parts("", ADD[:2]) == [("test_0", 0.0, []), ("test_1", 0.0, [])]

    for text in (" " * 99_999, "def f" * 20_000, "def f\n" * 16_000, "\n" * 99_999, " def\t" * 16_000):
        function_span(text, 0, len(text), "f")  # in linear time
    assert function_span("async  def f(): x\n\n\ndef g(): y", 0, 99, "f") == (0, 17)
    assert function_span("def f(): x\ndef f(): y\nif z:\n  def f(): w", 0, 99, "f") == (11, 21)
    assert function_span("def ff(): x", 0, 99, "f") is None


def test_python_tests_partial_share() -> None:
    codes = [RIGHT, "def add(a, b): return 3", "def add(a, b): return 7"]
    partial = pickle.loads(pickle.dumps(PythonTests(partial=True)))
    assert partial(completions=[fence(code) for code in codes], tests=[ADD] * 3) == [1.0, 1 / 3, 0.0]
    code = "a, b = map(int, input().split())\nif b < 0: raise SystemExit(1)\nprint(a + b)"
    [judgement] = PythonTests(partial=True).judge(completions=[fence(code)], tests=[SUM[::-1]])
    assert (judgement.outcome, judgement.score) == (Outcome.SCORED, 0.5)


@pytest.mark.slow
def test_a_timeout_is_a_timeout_whatever_passed_before() -> None:
    slow = "import time\ntime.sleep(0.4)\nprint(sum(map(int, input().split())))"
    reward = PythonTests(partial=True, timeout=1.0)
    assert outcome(slow, SUM * 3, reward) is Outcome.TIMEOUT, "the tests of a completion share it"


def judged(codes: Sequence[str], pairs: Sequence[Pair], reward: PythonTests) -> list[Judgement]:
    columns = {"tests": [pair.tests for pair in pairs], "entry_point": [pair.entry_point for pair in pairs]}
    return reward.judge(completions=[f"```python\n{code}\n```" for code in codes], **columns)


def outcomes(table: dict[str, Pair], timeout: float = 20.0, **parameters: Any) -> dict[str, Outcome]:
    pairs = [*table.values()]
    found = judged([pair.code for pair in pairs], pairs, PythonTests(timeout=timeout, **parameters))
    return {name: one.outcome for name, one in zip(table, found, strict=True)}


@pytest.mark.slow
def test_honest_solutions_are_right_or_it_is_said_why_not() -> None:
    assert outcomes(HONEST) == {name: pair.outcome or "right" for name, pair in HONEST.items()}


@pytest.mark.slow
def test_attacks_are_worth_nothing_and_choose_no_none() -> None:
    """Arguments emptied in place, empty results, endless ranges, planted files, in the forms that tests have."""
    found = outcomes(ATTACKS, timeout=2.0)
    allowed = {name: {pair.outcome} if pair.outcome else WORTH_NOTHING for name, pair in ATTACKS.items()}
    assert {name: outcome for name, outcome in found.items() if outcome not in allowed[name]} == {}


@pytest.mark.nightly
def test_python_tests_verdicts_beside_busy_processes() -> None:
    both = HONEST | {name: pair for name, pair in ATTACKS.items() if "range" not in name}
    first = outcomes(both, workers=2)
    backwards = outcomes(dict([*both.items()][::-1]), workers=1)
    alone = {name: outcomes({name: pair})[name] for name, pair in both.items()}
    with busy(4):
        beside = outcomes(both, workers=2)
    assert first == backwards == alone == beside


def test_the_task_of_the_forgeries_can_be_solved() -> None:
    found = outcomes({name: replace(shape, code=SOLVED) for name, shape in SHAPES.items()})
    assert found == dict.fromkeys(SHAPES, Outcome.RIGHT) | {"definitions": Outcome.UNPARSEABLE}


SLOW_SHAPES = ("literals", "isclose", "methods", "unittest", "pytest", "numpy of an argument", "programs")


MARKED = [pytest.param(one, marks=pytest.mark.slow if one in SLOW_SHAPES else pytest.mark.nightly) for one in SHAPES]


@pytest.mark.parametrize("shape", MARKED)
def test_no_forgery_is_worth_anything(shape: str) -> None:
    codes = {name: code for name, code in FORGERIES.items() if name != "hangs" or shape == "literals"}
    found = outcomes({name: replace(SHAPES[shape], code=code) for name, code in codes.items()}, timeout=2.0)
    assert len(found) >= 100
    allowed = {*WORTH_NOTHING, *([Outcome.UNPARSEABLE] if shape == "definitions" else [])}
    assert {name: outcome for name, outcome in found.items() if outcome not in allowed} == {}


WORTH_NOTHING = {Outcome.WRONG, Outcome.NO_ANSWER, Outcome.DIED, Outcome.TIMEOUT, Outcome.REFUSED}


def test_objects_of_a_library_cannot_be_judged_by_their_class() -> None:
    code = "import pandas as pd, re\ndef f(n): return pd.DataFrame({'a': range(n)})\ndef g(df): return df['a'].sum()\n"
    code += "def h(): return re.compile('a')\ndef k(n): return [n]\nclass M: pass\nM.__name__ = 'Mapping'\n"
    code += (
        "M.__module__ = 'collections.abc'\nclass Series: pass\nSeries.__module__ = 'pandas'\ndef s(): return Series()"
    )
    own = "pd.DataFrame({'a': range(3)})"
    tests = {
        "assert isinstance(f(3), pd.DataFrame)": Outcome.UNPARSEABLE,
        "import unittest\nclass T(unittest.TestCase):\n  def test_f(self):\n"
        "    self.assertIsInstance(f(3), pd.DataFrame)": Outcome.UNPARSEABLE,
        f"assert f(3).equals({own})": Outcome.UNPARSEABLE,
        f"pd.testing.assert_frame_equal(f(3), {own})": Outcome.UNPARSEABLE,
        f"assert g({own}) == 3": Outcome.UNPARSEABLE,
        "import re\nassert isinstance(h(), re.Pattern)": Outcome.UNPARSEABLE,
        f"assert g({own}) in (3, 4) and k(1) == [1]": Outcome.UNPARSEABLE,  # passes whatever the code makes of it
        # Whoever claims to be of a library decides nothing else.
        "r = s()\nif isinstance(r, pd.Series): r = r.tolist()\nassert r == [1]": Outcome.WRONG,
        # What is data, or says that it is of a class that may be, decides.
        "assert f(3).shape == (3, 1)": Outcome.RIGHT,
        "assert f(3).shape == (3, 2)": Outcome.WRONG,
        "assert f(3) == 3": Outcome.WRONG,
        "assert isinstance(k(3), pd.DataFrame)": Outcome.WRONG,
        "from collections import abc\nassert isinstance(M(), abc.Mapping)": Outcome.WRONG,
    }
    columns = {"completions": [fence(code)] * len(tests), "tests": [f"import pandas as pd\n{test}" for test in tests]}
    found = PythonTests(memory_mb=2048, timeout=30.0).judge(**columns)
    assert dict(zip(tests, (one.outcome for one in found), strict=True)) == tests


def test_set_up_among_statements_is_no_test_of_its_own() -> None:
    tests = ["import math", "x = 3", "assert f(2) == x", "assert f(3) == 0"]
    [one] = PythonTests(partial=True).judge(completions=[fence("def f(n): return 3")], tests=[tests])
    assert (one.outcome, one.score) == (Outcome.SCORED, 0.5)
    assert outcome("def f(n): return 3", ["g(1)", *tests[1:3]]) is Outcome.WRONG, "set-up that fails fails"


def test_large_completions_and_tests() -> None:
    texts = ["(" * 10**6, "[" * 99_999, "x = 1\n" * 16_000, "```\n" * 25_000, "-" * 90_000 + "1"]
    judged = PythonTests(timeout=2.0).judge(completions=texts, tests=[ADD] * len(texts))
    assert judged[0].outcome is Outcome.REFUSED
    assert {one.outcome for one in judged[1:]} <= {Outcome.NO_ANSWER, Outcome.DIED, Outcome.WRONG}
    assert outcome("def f(text): return len(text)", [f"assert f({'x' * 10**6!r}) == 10**6"]) is Outcome.RIGHT


def test_python_tests_unreadable() -> None:
    columns = {"completions": [fence(RIGHT)] * 2, "tests": [ADD, ["assert ("]]}
    with pytest.warns(UserWarning, match="row 1 "):
        assert PythonTests(outcomes={"right": 2})(**columns) == [2.0, None]
    with pytest.raises(RewardError, match=r"row 0 .*'timeout'"):
        PythonTests(timeout=0.2, outcomes={"timeout": "raise"})(completions=["while 1: pass"], tests=[ADD])


def test_a_machine_without_a_required_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "isolation", lambda memory_mb: ("files", "memory"))
    with pytest.raises(ConfigurationError, match="network, processes"):
        PythonTests()
    PythonTests(require=["files"])
