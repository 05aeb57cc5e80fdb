"""The forms in which tests come, what is found in them without running them, and the values that cross."""

# Tables of words are easier to read as words; what belongs together is asserted together.
# ruff: noqa: SIM905, PT018
import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trl_grpo_ext.rewards._sandbox.forms_of_tests import UnreadableTestsError, read_tests, same_output
from trl_grpo_ext.rewards._sandbox.wire import Codec, ViolationError


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
        "def helper(x):\n    assert x == 1\ndef test_f():\n    return f(1)",
        "METADATA = {}",
        "print(f(1))",
    ],
)
def test_tests_in_which_nothing_can_fail_are_unreadable(tests: str) -> None:
    with pytest.raises(UnreadableTestsError, match="fail"):
        read_tests(tests)


class Other(Codec):
    """A side that makes nothing of what is no data."""

    def opaque(self, value: Any) -> Any:
        return ["?", type(value).__name__]

    def from_opaque(self, tag: Any, parts: Any) -> Any:
        if tag != "?":
            raise ViolationError
        return None


def crossed(value: Any) -> Any:
    return Other(0).unpack(json.loads(json.dumps(Other(1).pack(value))))


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary(max_size=5)
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.datetimes()
    | st.timedeltas()
    | st.uuids(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3) | st.tuples(st.booleans()), inner, max_size=3)
        | st.frozensets(st.integers(0, 3) | st.text(max_size=1) | st.tuples(st.integers(0, 1)), max_size=3)
        | st.sets(st.frozensets(st.integers(0, 2), max_size=2), max_size=2)
        | st.lists(inner, max_size=3).map(lambda items: [items, items])
    ),
    max_leaves=8,
)


def written(value: Any) -> Any:
    """The value with the types of its parts; two equal sets may list their members in different orders."""
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, map(written, value)))
    if isinstance(value, dict):
        return dict, [(written(key), written(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [written(item) for item in value]
    return repr(value)


@given(_VALUES)
def test_values_cross_as_what_they_are(value: Any) -> None:
    assert written(crossed(value)) == written(value)


def test_one_object_stays_one_and_may_hold_itself() -> None:
    inner: list[Any] = [1]
    outer = [inner, inner, {"a": inner}]
    outer.append(outer)
    there = crossed(outer)
    assert there[0] is there[1] is there[2]["a"] and there[3] is there and there[0] == [1]


def test_changes_on_either_side_reach_the_other() -> None:
    here, there = Other(0), Other(1)

    def send(one: Codec, other: Codec, value: Any) -> Any:
        return other.unpack(json.loads(json.dumps(one.pack(value))))

    mine = {"a": [1, 2], "b": {3}}
    theirs = send(here, there, mine)
    theirs["a"].append(3)
    theirs["c"] = theirs["a"]
    del theirs["b"]
    assert send(there, here, None) is None
    assert mine == {"a": [1, 2, 3], "c": [1, 2, 3]} and mine["a"] is mine["c"]
    mine["a"].clear()
    assert send(here, there, mine["a"]) is theirs["a"] and theirs == {"a": [], "c": []}
    assert here.changed and not there.changed


def test_codec_copies_keep_sides_apart() -> None:
    here, there = Other(0), Other(1)
    here.own_copies = True
    mine = [[1, 2], [3]]
    theirs = there.unpack(here.pack(mine))
    theirs[0].clear()
    theirs.append(theirs)
    given = here.unpack(there.pack([theirs, theirs[1]]))
    assert mine == [[1, 2], [3]] and here.changed
    assert given[0] is not mine and given[0][0] == [] and given[0][2] is given[0]
    assert given[1] is mine[1], "what was not changed is what it was"
    again = there.unpack(here.pack([mine, given[0]]))
    assert again[0] == [[1, 2], [3]] and again[1] is theirs


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(
        "= i f c b range Fraction Decimal date datetime time timedelta uuid PosixPath T t F slice keys items x".split()
    )
    | st.sampled_from("l d s B od ct dd dq ul ud n n0 list float builtins ValueError".split()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@given(_JSON)
@example(["i", "f" * 10**6])
@example(["s", 1, [["i", format(number * (2**61 - 1), "x")] for number in range(5_000)]])
@example(["d", 1, [1, 1, 1]])
@example(["l", True, []])
@example(["n", 1, ["|O", ["t", [1]], ["b", "00" * 8]]])
def test_no_message_raises_anything_but_that_it_is_none(message: Any) -> None:
    for sent in (message, [message, [], []], [[1], [message], []], [message, [], [0]]):
        with contextlib.suppress(ViolationError):
            Other(0).unpack(sent)
