"""What the rewritten tests call, by the name `__judge__` (see `test_forms`): which asserts ran, and what they compared.

What a test expects must not depend on what the solution does to its arguments. First the tests run with copies of their
own (`own_copies`): a change that the solution makes never reaches them. Where they fail so, and it has changed
something, they run once more with the changes, as functions that work in place need it; there a comparison counts only
if one of its sides is the same with and without the changes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .remote import Remote, RemoteType
from .wire import Codec, Conversation

MAX_TEXT = 200
NOTHING = "it compares nothing: an array is empty"
_MAX_SEEN = 20_000


class _Printer(Codec):
    """Writes a value down, to see whether it is the same in the other run."""

    def opaque(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType | types.ModuleType) and not isinstance(value, RemoteType):
            return [value.__name__]
        if isinstance(value, Remote | RemoteType) or not hasattr(value, "__dict__"):
            raise ValueError("it cannot be written down")
        return [type(value).__name__, self.encode(vars(value))]


def _printed(value: Any) -> str | None:
    try:
        text = json.dumps(_Printer(0).pack(value))
        return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()
    except (RecursionError, ValueError):
        return None


def is_nothing(value: Any) -> bool:
    """Whether it is an array of nothing, such as `[[]]`, which compared with a number says nothing."""
    numpy: Any = sys.modules["numpy"]
    value = getattr(value, "expected", value) if type(value).__name__.startswith("Approx") else value
    try:
        return type(value) in (list, tuple, numpy.ndarray) and bool(numpy.size(value) == 0)
    except ValueError:  # rows of different lengths
        return False


def _has_nan(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return value.dtype.kind in "fc" and bool(numpy.isnan(value).any())
    return type(value) is float and value != value


def _says_nothing(*sides: tuple[str, Any]) -> str:
    """Why two sides say nothing: one of two arrays is empty, or the solution's is nan, neither more nor less."""
    values = [value for _, value in sides]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and numpy.ndarray in map(type, values) and len(set(map(is_nothing, values))) > 1:
        return NOTHING
    given, own = ([value for kind, value in sides if (kind[0] == "S") is theirs] for theirs in (True, False))
    if sides[0][0].endswith("<") and own and any(map(_has_nan, given)) and not any(map(_has_nan, own)):
        return "it compares nan with a number"
    return ""


class Checks(Conversation):
    """The bookkeeping of the test that runs."""

    def __init__(self, requests: int, replies: int, own_copies: bool, seen: Mapping[str, list[str]]) -> None:
        super().__init__(0, replies, requests)
        self.own_copies = own_copies
        self.seen: dict[str, list[str]] = dict(seen)
        self._counts: dict[str, int] = {}
        self._open: list[tuple[dict[str, list[tuple[str, Any]]], list[str], int]] = []
        self.inside = 0  # calls of the solution's that the tests' process answers
        self.fresh()

    def fresh(self) -> None:
        """Begin with a test."""
        self.ran, self.empty = 0, 0  # asserts, and loops and comparisons of nothing
        self.failure = self.reason = self.doubt = ""
        self.sites: dict[str, bool] = {}
        self._first: dict[str, tuple[str, Any]] = {}
        self._open.clear()

    def verdict(self) -> tuple[str, str]:
        """What a test says that ran to its end."""
        if not all(self.sites.values()):
            self.doubt = self.doubt or "an assert sits in a loop whose length the solution decides, and it ran not once"
        if self.failure:
            return "fail", self.failure
        if self.reason:
            return "unjudged", self.reason
        if not self.ran and (self.empty or self.doubt):
            return "fail", "what the code returned kept all asserts from running"
        if self.doubt or not self.ran:
            return "unjudged", self.doubt or "no assert ran"
        return "pass", ""

    def given(self, value: Any) -> bool:
        """Whether a value is the solution's, whatever name the tests have for it."""
        return isinstance(value, Remote | RemoteType) or self._numbers.get(id(value), 0) % 2 == 1

    # Assertions.

    def begin(self) -> int:
        """Begin with an assertion: the sides of its comparisons, what is wrong with them, the empty loops so far."""
        self._open.append(({}, [], self.empty))
        return len(self._open) - 1

    def op(self, site: str, position: int, kind: str, value: Any) -> Any:
        """A side: the solution's ("s"), the tests' own ("o") or a constant ("c").

        It is a capital where an array may be empty, and has a "<" where a nan says nothing.
        """
        if kind[0].isupper():
            if position == 0:
                self._first[site] = kind, value
            self.failure = self.failure or _says_nothing(self._first.get(site, (kind, value)), (kind, value))
        if self._open:
            comparisons, faults, _ = self._open[-1]
            if position == 0:
                faults.append(self._fault(site, comparisons.pop(site, [])))
            comparisons.setdefault(site, []).append((kind, value))
        return value

    def _holds(self, token: int) -> bool:
        """End an assertion: whether it says something."""
        [(comparisons, faults, empty), *_] = self._open[token:] or [({}, [], self.empty)]
        faults += [self._fault(site, sides) for site, sides in comparisons.items()]
        del self._open[token:]
        fault = next(filter(None, faults), "")
        self.failure = self.failure or fault
        self.ran += self.empty == empty
        return not fault

    def _fault(self, site: str, sides: list[tuple[str, Any]]) -> str:
        if len(sides) < 2:
            return ""
        count = self._counts[site] = self._counts.get(site, 0) + 1
        if not self.changed or any(kind[0] in "cC" for kind, _ in sides):
            return ""
        own = [_printed(value) for kind, value in sides if kind[0] in "oO" and not self.given(value)]
        known, key = [text for text in own if text is not None], f"{site}:{count}"
        if self.own_copies:
            if len(self.seen) < _MAX_SEEN:
                self.seen[key] = known
        elif not set(known) & set(self.seen.get(key, ())):
            return "what it expects depends on an argument that the code has changed"
        return ""

    def check(self, token: int, value: Any, swallowed: bool = False) -> bool:
        """Whether an assert holds; `swallowed` says whether its exception would be caught and forgotten."""
        held = bool(value)
        truth = self._holds(token) and held
        if not truth and (swallowed or self.inside):
            self.failure = self.failure or "an assert failed, and its exception was caught"
        return truth or self._goes_on("an assert failed")

    def value(self, token: int, value: Any) -> Any:
        """An expression of a doctest, or the condition of an `if` that raises."""
        self._holds(token)
        return value

    def _goes_on(self, failure: str) -> bool:
        """With copies of their own, tests go on after a failure: the other run needs to know what they expect."""
        goes_on = self.own_copies and self.changed
        self.failure = self.failure or (failure if goes_on else "")
        return goes_on

    def checking(self, function: Any) -> Callable[..., Any]:
        """A call such as `self.assertEqual(...)`."""
        token = self.begin()

        def call(*arguments: Any, **keywords: Any) -> Any:
            result = None
            try:
                result = function(*arguments, **keywords)
            except AssertionError as error:
                if self.inside:
                    self.failure = "an assert failed, and its exception was caught"
                if not self._goes_on(str(error)[:MAX_TEXT]):
                    raise
            self._holds(token)
            return result

        return call

    # What keeps asserts from running.

    def passed(self) -> None:
        """An exception that was expected has come."""
        self.ran += 1

    def failed(self) -> None:
        """Where an assert did not hold, or could not be reached, and its exception is swallowed."""
        if not self.reason:
            self.failure = self.failure or "an exception was caught that keeps an assert from running"

    def skipped(self) -> None:
        """An assert was passed by, because of what the solution returned."""
        self.doubt = self.doubt or "an assert is under a condition that the solution decides"

    def several(self, site: str, values: Any) -> Iterator[Any]:
        """Iterate over what the solution decides the length of."""
        self.sites.setdefault(site, False)
        for value in values:
            self.sites[site] = True
            yield value
        self.empty += not self.sites[site]

    def looped(self, site: str, value: Any) -> bool:
        """The condition of a `while` that the solution decides."""
        again = bool(value)
        self.empty += not (again or self.sites.get(site, False))
        self.sites[site] = self.sites.get(site, False) or again
        return again

    def mapped(self, given: list[int], function: Any, *values: Any) -> Iterator[Any]:
        """`map`, which a StopIteration of the function does not end."""
        for parts in self.zipped(given, *values):
            yield function(*parts)

    def zipped(self, given: list[int], *values: Any, **keywords: Any) -> Iterator[Any]:
        """`zip`: what the solution has given may be too short for the tests' own."""
        sized = [len(v) if type(v) in (list, tuple, str, dict, set) else None for v in values]
        own = [size for n, size in enumerate(sized) if given and n not in given and size is not None]
        count = 0
        for parts in zip(*values, **keywords):  # noqa: B905  # it is the tests' own
            count += 1
            yield parts
        if own and count < min(own):
            self.failure = self.failure or "what it returned is too short to be compared with what is expected"
