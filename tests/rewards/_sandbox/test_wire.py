"""The values that cross between two processes, and the table of containers that they share."""

# ruff: noqa: SIM905, PT018
import contextlib
import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from trl_grpo_ext.rewards._sandbox.wire import Codec, ViolationError


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


_PLAIN = [st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)]
_PLAIN += [st.text(), st.binary(max_size=5), st.fractions(), st.decimals(allow_nan=False)]
_PLAIN += [st.dates(), st.datetimes(), st.timedeltas(), st.uuids()]
_VALUES = st.recursive(
    st.one_of(_PLAIN),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3) | st.tuples(st.booleans()), inner, max_size=3)
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


def test_one_object_stays_one_and_changes_on_either_side_reach_the_other() -> None:
    inner: list[Any] = [1]
    outer = [inner, inner, {"a": inner}]
    outer.append(outer)
    again = crossed(outer)
    assert again[0] is again[1] is again[2]["a"] and again[3] is again and again[0] == [1]
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


_TAGS = "= i f c b range Fraction Decimal date datetime time timedelta uuid PosixPath T t F slice keys items x".split()
_NAMES = "l d s B od ct dd dq ul ud n n0 list float builtins ValueError".split()
_LEAVES = [st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)]
_JSON = st.recursive(
    st.one_of([*_LEAVES, st.sampled_from(_TAGS), st.sampled_from(_NAMES)]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@given(_JSON)
@example(["i", ["f" * 10**6]])
@example(["s", 1, [["i", [format(number * (2**61 - 1), "x")]] for number in range(5_000)]])
@example(["l", True, []])
@example(["n", 1, ["|O", ["t", [1]], ["b", ["00" * 8]]]])
def test_no_message_raises_anything_but_that_it_is_none(message: Any) -> None:
    for sent in (message, [message, [], []], [[1], [message], []], [message, [], [0]]):
        with contextlib.suppress(ViolationError):
            Other(0).unpack(sent)


class Side(Codec):
    forgets = True


def test_codec_forgets_what_nothing_refers_to_and_keeps_the_rest() -> None:
    side, other = Side(0), Codec(1)
    kept: list[Any] = [1]
    ways_to_hold = {"key": kept}
    changed: list[Any] = []
    again = other.unpack(side.pack([kept, ways_to_hold, changed, [2], {3}, {"a": [4]}]))
    assert again == [[1], {"key": [1]}, [], [2], {3}, {"a": [4]}]
    changed.append(5)
    del ways_to_hold
    forgotten = []
    for _ in range(4):  # what a container held goes with the next message
        message = side.pack(None)
        forgotten += message[2]
        other.unpack(message)
    assert len(forgotten) == 6  # the list of all, the mapping, [2], {3}, {"a": [4]} and [4]
    assert again[2] == [5]
    assert other.unpack(side.pack([kept, changed])) == [[1], [5]]
