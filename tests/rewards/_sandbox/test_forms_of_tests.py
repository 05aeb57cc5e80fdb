"""The forms in which tests come, and what is found in them without running them."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards._sandbox.forms_of_tests import UnreadableTestsError, read_tests, same_output


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        (b"3\n", "3", True),
        (b"3  \n\n", "3\n", True),
        (b"a\r\nb", "a\nb", True),
        (b" 3", "3", False),
        (b"1\n\n2", "1\n2", False),
        (b"3.0", "3", False),
        (b"\xff", "\ufffd", True),
        (b"", "", True),
        (b"", "0", False),
    ],
)
def test_outputs_are_compared_by_lines(printed: bytes, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@given(st.text() | st.lists(st.text(max_size=9) | st.integers() | st.dictionaries(st.text(), st.text(), max_size=2)))
def test_read_tests_raises_unreadable_alone(tests: Any) -> None:
    with contextlib.suppress(UnreadableTestsError):
        read_tests(tests)


def plan(*tests: str, entry: str | None = None) -> dict[str, Any]:
    planned = read_tests([*tests], entry)
    assert isinstance(planned, dict)
    return planned


@pytest.mark.parametrize(
    ("tests", "entry", "free"),
    [
        ("assert add(1, 2) == len([3])", None, ["add"]),
        ("from solution import add\nassert add(1, 2) == abs(3)", None, []),
        ("import math\nx = 1\nassert f(x) == math.pi and g == 2", None, ["f", "g"]),
        ("assert sum(10, 15) == 6", None, ["sum"]),
        ("assert round(sum(3, 4), 1) == 7", None, ["sum"]),
        ("assert sum(1, 2) == max(3, 3)", None, []),
        ("def check(candidate):\n    assert candidate(abs(1)) == 1", "abs", ["abs"]),
        ("def check(candidate):\n    assert candidate(helper(1)) == 1", "S().f", ["S", "helper"]),
        ("def same(a, b):\n    assert a == b\nsame(f(1), 1)", None, ["f"]),
    ],
)
def test_which_names_are_the_solution_s(tests: str, entry: str | None, free: list[str]) -> None:
    assert plan(tests, entry=entry)["free"] == free


@pytest.mark.parametrize(
    "tests",
    [
        "def run():\n    assert f(1) == 1",
        "def test_f():\n    f(1)",
        "class Checks:\n    def run(self):\n        assert f(1) == 1",
        "import math\nx = f(1)",
        "assert True",
        "assert 'a message only'",
        "METADATA = {}",
        "print(f(1))",
    ],
)
def test_tests_in_which_nothing_can_fail_are_unreadable(tests: str) -> None:
    with pytest.raises(UnreadableTestsError, match="fail"):
        read_tests(tests)
