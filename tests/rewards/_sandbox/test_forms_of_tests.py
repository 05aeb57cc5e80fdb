"""The forms in which tests come, and what is found in them without running them."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards._sandbox.forms_of_tests import UnreadableTestsError, read_tests, same_output

# Printed ~ expected, by whether LiveCodeBench's form takes it, and APPS's.
OUTPUTS: dict[tuple[bool, bool], str] = {
    (True, True): r"3  \n\n~3\n | a\r\nb~a\nb | ~ |  3~3 | \n5~5 |   1\n 2~1\n2 | 3.0~3 | 0.5~0.50 | 5  6~5 6 | NaN~NaN"
    r" | 1e2 7~100 7.0",
    (False, True): r"1\n\n2~1\n2 | 0.3333333333~0.333333 | -0.0~0.000000001 | *  *~* * | a   b~a b"
    r" | YES  3~YES 3 | a b~a  b",
    (False, False): r"~0 | 1\n2~1 2 | 6 5~5 6 | **~* * | x 1.0~x 1 | yes~YES | 1 2~1 | 3 a~3.0 a | 500000.5~500000"
    r" | 1 0.33334~1 0.333333 | 1000000001~1000000000 | nan~1.5 | sNaN~1.5 | inf~1.5 | 1e999999999~1.5",
}


@pytest.mark.parametrize("taken", OUTPUTS)
def test_outputs_are_compared_as_the_data_sets_do(taken: tuple[bool, bool]) -> None:
    for pair in OUTPUTS[taken].split(" | "):
        printed, expected = pair.replace(r"\n", "\n").replace(r"\r", "\r").split("~")
        assert tuple(same_output(printed.encode(), expected, near) for near in (False, True)) == taken, pair
    assert same_output(b"\xff", "\ufffd", near=False)
    assert not same_output(b"9" * 4000, "9" * 3999 + "8", near=True)


@given(st.text() | st.lists(st.text(max_size=9) | st.integers() | st.dictionaries(st.text(), st.text(), max_size=2)))
def test_read_tests_raises_unreadable_alone(tests: Any) -> None:
    with contextlib.suppress(UnreadableTestsError):
        read_tests(tests)


def plan(*tests: str, entry: str | None = None) -> dict[str, Any]:
    planned = read_tests([*tests], entry)
    assert isinstance(planned, dict)
    return planned


FREE: list[tuple[str, str | None, list[str]]] = [
    ("assert add(1, 2) == len([3])", None, ["add"]),
    ("from solution import add\nassert add(1, 2) == abs(3)", None, []),
    ("import math\nx = 1\nassert f(x) == math.pi and g == 2", None, ["f", "g"]),
    *(("assert round(sum(3, 4), 1) == 7", None, ["sum"]), ("assert sum(1, 2) == max(3, 3)", None, [])),
    ("def check(candidate):\n    assert candidate(abs(1)) == 1", "abs", ["abs"]),
    ("def check(candidate):\n    assert candidate(helper(1)) == 1", "S().f", ["S", "helper"]),
    ("def same(a, b):\n    assert a == b\nsame(f(1), 1)", None, ["f"]),
]
NOTHING = [
    *("def run():\n    assert f(1) == 1", "def test_f():\n    f(1)", "import math\nx = f(1)", "assert True"),
    *("class Checks:\n    def run(self):\n        assert f(1) == 1", "assert 'a message only'", "print(f(1))"),
]


@pytest.mark.parametrize(("tests", "entry", "free"), FREE)
def test_which_names_are_the_solution_s(tests: str, entry: str | None, free: list[str]) -> None:
    assert plan(tests, entry=entry)["free"] == free


@pytest.mark.parametrize("tests", NOTHING)
def test_tests_in_which_nothing_can_fail_are_unreadable(tests: str) -> None:
    with pytest.raises(UnreadableTestsError):
        read_tests(tests)
