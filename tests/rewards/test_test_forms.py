"""The forms in which tests come, and what an untrusted process says a value is, compared with what it should be."""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards._sandbox.child import encoded_value
from trl_grpo_ext.rewards._sandbox.test_forms import Checks, UnreadableTestsError, equal, read_tests, same_output

HUMAN_EVAL = """
def check(candidate):
    assert candidate(1, 2) == 3
    assert candidate(2, 2) == 4, "message"
    assert abs(candidate(0.1, 0.2) - 0.3) < 1e-6
"""


def test_the_literals_never_reach_the_process() -> None:
    checks = read_tests(['assert f(1) == "the secret answer", "a secret message"', "assert [77177] == f(2)"])
    assert isinstance(checks, Checks)
    assert checks.expected == ("the secret answer", [77177])
    assert not any("secret" in source or "77177" in source for source in checks.sources)
    human_eval = read_tests(HUMAN_EVAL, "add")
    assert isinstance(human_eval, Checks)
    assert (human_eval.expected, human_eval.certain) == ((3, 4), (frozenset({0, 1}),))


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
def test_reading_tests_raises_nothing_but_that_they_are_unreadable(tests: Any) -> None:
    with contextlib.suppress(UnreadableTestsError):
        read_tests(tests)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3) | st.tuples(st.booleans()), inner, max_size=3)
        | st.frozensets(st.integers(0, 3) | st.text(max_size=1) | st.tuples(st.integers(0, 1)), max_size=3)
        | st.sets(st.frozensets(st.integers(0, 2), max_size=2), max_size=2)
    ),
    max_leaves=8,
)


@given(_VALUES, _VALUES)
def test_encoded_values_are_equal_as_python_s_are(value: Any, other: Any) -> None:
    assert equal(json.loads(json.dumps(encoded_value(value))), value)
    assert equal(json.loads(json.dumps(encoded_value(value))), other) == (value == other)


class YesMan:
    """Equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class LyingInt(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __format__(self, spec: str) -> str:
        return "3"

    __hash__ = int.__hash__


@pytest.mark.parametrize("expected", [0, 3, None, True, "", [], (), {}, {1}, 1.5, b"x", 2j, [3], {"a": 3}])
def test_an_object_that_equals_everything_equals_nothing(expected: Any) -> None:
    for liar in (YesMan(), [YesMan()], {"a": YesMan()}, {YesMan()}, LyingInt(7), [LyingInt(7)], {"a": LyingInt(7)}):
        assert not equal(encoded_value(liar), expected)


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1, True, True),
        (1.0, 1, True),
        (0.1 + 0.2, 0.3, False),
        (10**400, 1e308, False),
        (-0.0, 0.0, True),
        (math.nan, 0.0, False),
        (math.inf, 1e999, True),
        (1 + 0j, 1, True),
        ([1], (1,), False),
        ({1, 2}, frozenset({2, 1}), True),
        ({"a": 1}.keys(), {"a"}, True),
        ({1: "a"}, {True: "a"}, True),
        (bytearray(b"x"), b"x", True),
        (range(2), [0, 1], False),
        ("\ud800\0", "\ud800\0", True),
    ],
)
def test_values_by_hand(value: Any, expected: Any, same: bool) -> None:
    assert equal(json.loads(json.dumps(encoded_value(value))), expected) is same


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(list("cifzsbtedl?")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@given(_JSON, _VALUES)
def test_no_message_makes_the_comparison_raise(encoded: Any, expected: Any) -> None:
    assert equal(encoded, expected) in (True, False)


@pytest.mark.parametrize(
    "encoded",
    [
        ["i", "f" * 10**6],
        ["e", [["i", format(number * (2**61 - 1), "x")] for number in range(50_000)]],
        ["t", [["e", [["i", format(number * (2**61 - 1), "x")] for number in range(50_000)]]]],
        ["f", "1" * 10**6],
        ["b", "0" * (10**6 + 1)],
        ["e", [["i", "1"], ["i", "1"]]],
        ["d", [[["i", "1"], ["i", "1"]], [["i", "1"], ["i", "1"]]]],
    ],
    ids=["integer", "colliding hashes", "nested hashes", "float", "bytes", "an element twice", "a key twice"],
)
def test_hostile_values_are_unequal_and_cheap(encoded: Any) -> None:
    start = time.monotonic()
    for expected in ({1, 2}, {1: 1, 2: 1}, {((1,),)}, {(frozenset({1}),)}, 1, 1.0, b"", [1, 2]):
        assert not equal(encoded, expected)
    assert time.monotonic() - start < 10


def test_a_value_that_is_nested_too_deeply_or_holds_itself_is_refused_where_it_is_made() -> None:
    circular: list[Any] = []
    circular.append(circular)
    with pytest.raises(RecursionError):
        encoded_value(circular)
