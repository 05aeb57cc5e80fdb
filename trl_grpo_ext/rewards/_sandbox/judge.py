"""The process that runs the tests of a solution, which another one holds: `keeper` forks both.

The data set's tests are trusted; the solution's values are not. Plain values arrive as data, so `==`, `len`, `sorted`,
`isinstance` and asserts are Python's own here. Anything else that the solution returns is a `Remote`: its attributes,
calls, items and iteration are requests to the other process, whose answers are data again. An object of the solution's
own class must not decide whether a test passes, so its `==`, order, truth, membership and arithmetic with the tests'
values are never requested: where a test made that object itself it cannot be judged (`UnjudgedError`), and where the
solution handed it over instead of a value, it is wrong (`WrongError`).

What a test expects must not depend on what the solution does to its arguments. First the tests run with copies of their
own (`own_copies`): a change that the solution makes never reaches them. Where they fail so, and it has changed
something, they run once more with the changes, as functions that work in place need it; there a comparison counts only
if one of its sides is the same with and without the changes.
"""

# Tables of words are easier to read as words; beside the tests' own process, pathlib gives nothing here.
# ruff: noqa: SIM905, PTH100, PTH109, PTH117, PTH118, PTH123, SIM115
from __future__ import annotations

import asyncio
import builtins
import contextlib
import copy
import dataclasses
import doctest
import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import io
import json
import logging
import os
import pickle
import random
import re
import sys
import types
import unittest
import unittest.mock
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from . import wire
from .hostile import OPERATORS, find_by_name, owner_of
from .wire import SOLUTION_MODULES, ClosedError, Codec, ViolationError, receive, send

_MAX_TEXT = 200
_MAX_SEEN = 20_000
_NOTHING = "it compares nothing: an array is empty"
_JUDGING = frozenset(f"__{name}__" for name in "eq ne lt le gt ge bool contains hash".split())
_TO_NUMBERS = frozenset(
    f"__{name}__" for name in "abs int float complex index round trunc floor ceil".split()
) | frozenset("all any item max mean min norm std sum total_seconds".split())
_UNARY = frozenset(
    f"__{name}__"
    for name in (
        "call len iter next reversed getitem setitem delitem enter exit await aiter anext str repr format int float "
        "complex index round trunc floor ceil abs neg pos invert"
    ).split()
)
_GIVES: dict[str, type] = {f"__{name}__": str for name in ("str", "repr", "format")}
_GIVES |= {"__len__": int, "__int__": int, "__index__": int, "__float__": float, "__complex__": complex}
_PREDICATES = frozenset(
    name
    for kind in (str, bytes, set, float)
    for name in dir(kind)
    if name.startswith("is") or name in ("startswith", "endswith")
)
"""Methods of built-in types that answer yes or no about their argument."""
_NAMES = frozenset(
    f"__{name}__"
    for name in (
        "name qualname doc module dict wrapped annotations defaults kwdefaults self func members slots cause context "
        "notes version all author init code post_init new class_getitem"
    ).split()
)
_IMMUTABLE = (str, bytes, int, float, complex, tuple, frozenset)
_CODE_TYPES: tuple[type, ...] = (
    *(types.GeneratorType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.CoroutineType),
    *(types.AsyncGeneratorType, list, dict, set, bytearray),
)
_SEEN_AS = {kind.__name__: kind for kind in _CODE_TYPES}
_MOCKS_OWN = ("assert", "configure_mock", "attach_mock", "mock_add_spec", "reset_mock", "method_calls", "call")
"""How the attributes of a mock begin that are for the tests."""


class UnjudgedError(BaseException):
    """The test needs something that only the solution could say."""


class WrongError(BaseException):
    """The solution gave something with which no test can pass."""


class GoneError(BaseException):
    """The other process has ended, or sent something that is not a message."""


# --- objects of the solution -----------------------------------------------------------------------------------------


class RemoteType(type):
    """A class of the solution."""

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        made = SIDE.request("call", cls, arguments, tuple(keywords.items()))
        return _mark(made, "_made") if type.__getattribute__(cls, "_remote_wanted") else made

    def __getattr__(cls, name: str) -> Any:
        return _attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        SIDE.request("set", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        SIDE.request("delete", cls, name)

    def __contains__(cls, value: Any) -> bool:
        return any(member is value for member in cls)

    def __bool__(cls) -> bool:
        return True

    def _meta(cls, name: str, *arguments: Any) -> Any:
        if name not in type.__getattribute__(cls, "_remote_meta"):
            raise TypeError(f"the class {cls.__name__} has no {name}")
        return _given(name, SIDE.request("operate", cls, name, arguments))

    __iter__ = functools.partialmethod(_meta, "__iter__")
    __len__ = functools.partialmethod(_meta, "__len__")
    __getitem__ = functools.partialmethod(_meta, "__getitem__")


class Remote:
    """An object of the solution."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("__traceback__", "__context__", "__cause__", "__suppress_context__", "__notes__"):
            object.__setattr__(self, name, value)
        else:
            SIDE.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        SIDE.request("delete", self, name)

    def __copy__(self) -> Any:
        return SIDE.request("call", copy.copy, (self,), ())

    def __deepcopy__(self, memo: Any) -> Any:
        return self if memo is SIDE.copies else SIDE.request("call", copy.deepcopy, (self,), ())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SIDE.refused("it pickles an object of the solution", self)

    def __dir__(self) -> Any:
        return []

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was not finished, or all ends
            SIDE.released.append(_number(self))


class _Handle(Remote):
    __slots__ = ("__weakref__", "_informed", "_made", "_number")


def _mark(value: Any, mark: str) -> Any:
    """Remember that the tests made an object themselves, or that it was computed from a value of theirs."""
    if isinstance(value, _Handle):
        object.__setattr__(value, mark, True)
    return value


def _is_marked(value: Any, mark: str) -> bool:
    try:
        return isinstance(value, _Handle) and bool(object.__getattribute__(value, mark))
    except AttributeError:
        return False


def _ask_informed(value: Any, name: str) -> None:
    """Whether it may still give data: `abs(f(2) - 2.5) < 1e-6` is for numbers, `(vector * 2).x` is fine."""
    if _is_marked(value, "_informed") and (name in _TO_NUMBERS or not _is_marked(value, "_made")):
        raise SIDE.refused(f"it takes {name} of what the solution's own arithmetic made of a value of the tests", value)


def _named_by_tests(name: str, value: Any) -> Any:
    """A name of the solution: the tests want a class if they write it as one, and may then compare its objects."""
    if isinstance(value, RemoteType) and name[:1].isupper():
        type.__setattr__(value, "_remote_wanted", True)
    return value


def _number(value: Any) -> int:
    number: int = object.__getattribute__(value, "_number")
    return number


def _attribute(value: Any, name: str) -> Any:
    if name.startswith("__") and name.endswith("__") and name not in _NAMES:
        raise AttributeError(f"{name} of an object of the solution")
    _ask_informed(value, name)
    if name in _PREDICATES and not isinstance(value, type):
        raise SIDE.refused(f"it asks an object of the solution's own class for `{name}`", value)
    return SIDE.request("get", value, name)


def _given(name: str, result: Any) -> Any:
    """The result of an operator, of the type that Python takes."""
    if name in _GIVES and type(result) is not _GIVES[name]:
        raise TypeError(f"{name} of the solution returned {type(result).__name__}")
    return result


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if name in _UNARY:
            _ask_informed(self, name)
        if name == "__call__":
            return SIDE.request("call", self, arguments, tuple(keywords.items()))
        if name == "__exit__":
            arguments = (*arguments[:2], None)
        result = SIDE.request("operate", self, name, arguments)
        parts = (self, *arguments)
        if name in _UNARY:
            return _given(name, _mark(result, "_informed") if _is_marked(self, "_informed") else result)
        if any(_is_marked(part, "_made") for part in parts):
            _mark(result, "_made")
        mixed = not all(isinstance(part, Remote) for part in parts) or any(_is_marked(p, "_informed") for p in parts)
        if mixed and result is not NotImplemented:
            if not isinstance(result, _Handle):
                raise SIDE.refused(
                    f"it takes the result of the solution's own {name} with a value of the tests", *parts
                )
            _mark(result, "_informed")
        return result

    def judge(self: Any, *arguments: Any) -> Any:
        if type.__getattribute__(type(self), "_remote_changing") and name != "__hash__":
            held = [_held(value) for value in (self, *arguments)]
            return bool(held[0]) if name == "__bool__" else getattr(held[0], name)(*held[1:])
        raise SIDE.refused(f"it needs the {name} of the solution's own class {type(self).__name__}", self, *arguments)

    return judge if name in _JUDGING else operate


def _held(value: Any) -> Any:
    """What an object of a class that extends `list`, `dict`, ... holds, as the built-in type."""
    if isinstance(value, Remote) and type.__getattribute__(type(value), "_remote_changing"):
        return SIDE.request("content", value)
    return value


async def _waited(value: Any) -> Any:
    """A coroutine of the solution: it runs in a loop over there, from its beginning to its end."""
    return SIDE.request("wait", value)


async def _anext(self: Any) -> Any:
    return SIDE.request("wait_next", self)


class _Await:
    """What `await` iterates over: nothing, with a result."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __iter__(self) -> _Await:
        return self

    def __next__(self) -> Any:
        raise StopIteration(SIDE.request("wait", self._value))


class _SolutionModule(types.ModuleType):
    """`import solution`."""

    __all__: tuple[str, ...] = ()  # the tests' free names are found in the solution anyway

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return _named_by_tests(name, SIDE.request("name", name))
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            SIDE.request("bind", name, value)

    def __delattr__(self, name: str) -> None:
        try:
            SIDE.request("unbind", name)
        except KeyError:
            raise AttributeError(name) from None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the solution by its usual names, and other modules in the libraries alone, whatever `sys.path` is."""

    def __init__(self) -> None:
        self.libraries = [path for path in sys.path if os.path.isabs(path)]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in SOLUTION_MODULES:
            return importlib.machinery.ModuleSpec(name, self)
        return importlib.machinery.PathFinder.find_spec(name, self.libraries if path is None else path, target)

    def create_module(self, spec: Any) -> Any:
        return _SolutionModule(spec.name) if spec.name in SOLUTION_MODULES else None

    def exec_module(self, module: Any) -> None:
        pass


class Namespace(dict[str, Any]):
    """The tests' names. Names that are neither defined in the tests nor built in are the solution's."""

    def __init__(self, free: Iterable[str], modules: Mapping[str, str]) -> None:
        super().__init__(__builtins__=builtins, __name__="tests")
        self.free, self.modules = frozenset(free), modules

    def __missing__(self, name: str) -> Any:
        if name in self.modules:
            return importlib.import_module(self.modules[name])
        if name not in self.free:
            raise KeyError(name)
        try:
            return _named_by_tests(name, SIDE.request("name", name))
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None


# --- what a test says, and what is known of it -----------------------------------------------------------------------


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


def _is_nothing(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    value = getattr(value, "expected", value) if type(value).__name__.startswith("Approx") else value
    return len(value) == 0 if type(value) in (list, tuple) else numpy is not None and bool(numpy.size(value) == 0)


class _Checks(Codec):
    """What the rewritten tests call, by the name `__judge__` (see `test_forms`)."""

    def __init__(self, own_copies: bool, seen: Mapping[str, list[str]]) -> None:
        super().__init__(0)
        self.own_copies = own_copies
        self.seen: dict[str, list[str]] = dict(seen)
        self._counts: dict[str, int] = {}
        self._open: list[tuple[dict[str, list[tuple[str, Any]]], list[str], int]] = []
        self.inside = 0
        self.fresh()

    def fresh(self) -> None:
        """Begin with a test."""
        self.ran, self.failure, self.reason, self.sites, self.empty = 0, "", "", dict[str, bool](), 0
        self._open.clear()

    def begin(self) -> int:
        """Begin with an assertion: the sides of its comparisons, what is wrong with them, the empty loops so far."""
        self._open.append(({}, [], self.empty))
        return len(self._open) - 1

    def op(self, site: str, position: int, kind: str, value: Any) -> Any:
        """A side of a comparison: the solution's ("s"), the tests' own ("o"), a constant ("c"); capital if not `in`."""
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
        numpy = sys.modules.get("numpy")
        values = [value for kind, value in sides if kind.isupper()]
        arrays = numpy is not None and any(type(value) is numpy.ndarray for value in values)
        if arrays and len({_is_nothing(value) for value in values}) > 1:
            return _NOTHING
        if not self.changed or any(kind in "cC" for kind, _ in sides):
            return ""
        own = [_printed(value) for kind, value in sides if kind in "oO" and not self.is_given(value)]
        known, key = [text for text in own if text is not None], f"{site}:{count}"
        if self.own_copies:
            if len(self.seen) < _MAX_SEEN:
                self.seen[key] = known
        elif not set(known) & set(self.seen.get(key, ())):
            return "what it expects depends on an argument that the code has changed"
        return ""

    def is_given(self, value: Any) -> bool:
        """Whether a value is the solution's, whatever name the tests have for it."""
        return isinstance(value, Remote | RemoteType) or self._numbers.get(id(value), 0) % 2 == 1

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
            if isinstance(function, Remote):
                raise SIDE.refused("it calls an assertion that the tests do not define")
            try:
                result = function(*arguments, **keywords)
            except AssertionError as error:
                if self.inside:
                    self.failure = "an assert failed, and its exception was caught"
                if not self._goes_on(str(error)[:_MAX_TEXT]):
                    raise
                result = None
            self._holds(token)
            return result

        return call

    def passed(self) -> None:
        """An exception that was expected has come."""
        self.ran += 1

    def failed(self) -> None:
        """Where an assert did not hold, or could not be reached, and its exception is swallowed."""
        if not self.reason:
            self.failure = self.failure or "an exception was caught that keeps an assert from running"

    def skipped(self) -> None:
        """An assert was passed by, because of what the solution returned."""
        self.reason = self.reason or "an assert is under a condition that the solution decides"

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

    def zipped(self, given: list[int], *values: Any, **keywords: Any) -> Iterator[Any]:
        """`zip`, where asserts follow: those that the solution has given may be too short for the tests' own."""
        own = [len(v) for n, v in enumerate(values) if n not in given and type(v) in (list, tuple, str, dict, set)]
        count = 0
        for parts in zip(*values, **keywords):  # noqa: B905  # it is the tests' own
            count += 1
            yield parts
        if own and count < min(own):
            self.failure = self.failure or "what it returned is too short to be compared with what is expected"

    def verdict(self) -> tuple[str, str]:
        """What a test says that ran to its end."""
        if self.failure:
            return "fail", self.failure
        if not self.ran and self.empty:
            return "fail", "what the code returned kept all asserts from running"
        if self.reason:
            return "unjudged", self.reason
        if not self.ran:
            return "unjudged", "no assert ran"
        if not all(self.sites.values()):
            return "unjudged", "an assert sits in a loop whose length the solution decides, and it ran not once"
        return "pass", ""


# --- the conversation ------------------------------------------------------------------------------------------------


class Side(_Checks):
    """The tests' side of the conversation, and what is known so far of the test that runs."""

    def __init__(self, requests: int, replies: int, shared: Any, own_copies: bool, seen: Mapping[str, Any]) -> None:
        super().__init__(own_copies, seen)
        self._requests, self._replies, self._shared = requests, replies, shared
        self._sequence = 0
        self._handles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._kept: dict[int, Any] = {}
        self._classes: dict[int, Any] = {}
        self._lent: list[tuple[Any, tuple[str, ...], bool]] = []
        self._lent_numbers: dict[int, int] = {}
        self._environ = dict(os.environ)
        self._raised: list[BaseException] = []
        self.copies: dict[int, Any] = {}
        self.released: list[int] = []
        self.gone = self.process = ""
        self.asked = 0
        self.memory = False

    def refused(self, reason: str, *values: Any) -> BaseException:
        """The test needs a behaviour of these objects: its own choice if it made one, else what the solution gave."""
        if any(_is_marked(value, "_made") for value in values) or (
            len(values) > 1 and all(isinstance(value, Remote) for value in values)
        ):
            return self.unjudged(reason)
        self.failure = self.failure or reason
        return WrongError(reason)

    def unjudged(self, reason: str) -> UnjudgedError:
        """Mark the test as impossible to judge, even if something catches the exception."""
        self.reason = self.reason or reason
        return UnjudgedError(reason)

    def is_from_solution(self, error: BaseException) -> bool:
        """Whether it was raised there."""
        return isinstance(error, Remote) or any(raised is error for raised in self._raised)

    def request(self, what: str, *arguments: Any) -> Any:
        """Ask the other process."""
        if self.gone:
            raise GoneError(self.gone)
        if dict(os.environ) != self._environ:
            self._environ = dict(os.environ)
            self.request("environ", self._environ)
        try:
            self._sequence += 1
            self.asked += 1
            sequence = self._sequence
            released, self.released = self.released, []
            twins = self.forgotten()
            packed = self.pack((what, *arguments))
            self._shared[0] = 1
            send(self._requests, ["do", sequence, released, twins, packed])
            value = self._reply(sequence)
        except (ClosedError, ViolationError) as error:
            self.gone = "closed" if isinstance(error, ClosedError) else f"violation: {error}"
            raise GoneError(str(error)) from None
        except StopIteration as error:
            if what != "call":
                raise
            raise RuntimeError("the code raised StopIteration") from error  # it would end a `map` of the tests
        finally:
            self._shared[0] = 0
            self._shared[2] = self.changed
        return value

    def _reply(self, sequence: int) -> Any:
        while True:
            message = receive(self._replies)
            self._shared[8:16] = wire.received.to_bytes(8, "little")
            self._shared[1] = sequence > 1  # the first request loads the solution
            try:
                kind, number, packed, (out, err, events) = message
            except (TypeError, ValueError):
                raise ViolationError("a message of another shape") from None
            if type(out) is not str or type(err) is not str or kind not in ("ok", "no", "ask"):
                raise ViolationError("a message of another shape")
            value = self.unpack(packed)
            if out:
                sys.stdout.write(out)
            if err:
                sys.stderr.write(err)
            if events is not None:
                self._deliver(self.unpack(events))
            if kind == "ask":
                self._serve(value)
                self._shared[0] = 1
                continue
            if number != sequence or type(number) is not int:
                raise ViolationError("an answer to another question")
            if kind == "no":
                if not isinstance(value, BaseException) or isinstance(value, UnjudgedError | WrongError | GoneError):
                    raise ViolationError("no exception")
                self.memory = self.memory or isinstance(value, MemoryError)
                self._raised = [*self._raised[-50:], value]
                raise value
            return value

    def _deliver(self, events: Any) -> None:
        """Warn and log what the solution has warned of and logged."""
        for what, kind, text in events:
            if type(text) is not str:
                raise ViolationError("no text")
            if what == "process":
                self.process = text[:_MAX_TEXT]
            elif what == "warn" and isinstance(kind, Warning):
                warnings.warn(kind, stacklevel=2)
            elif what == "log" and type(kind) is tuple and type(kind[0]) is str and type(kind[1]) is int:
                logger = logging.getLogger(kind[0])
                if logger.isEnabledFor(kind[1]):
                    logger.handle(logger.makeRecord(kind[0], kind[1], "solution.py", 0, text, (), None))

    def _serve(self, asked: Any) -> None:
        """Do what the solution requests with an object that it was lent."""
        self._shared[0] = 0
        if type(asked) is not list or not asked or type(asked[0]) is not str:
            raise ViolationError("no question")
        self.inside += 1
        try:
            answer = ["ok", self.pack(self._answer(*asked))]
        except (UnjudgedError, WrongError, GoneError, ViolationError, ClosedError):
            raise
        except BaseException as error:
            answer = ["no", self.pack(error)]
        finally:
            self.inside -= 1
        send(self._requests, answer)

    def _answer(self, what: str, *arguments: Any) -> Any:
        if what in ("input", "read", "readline"):
            return {"input": input, "read": sys.stdin.read, "readline": sys.stdin.readline}[what](*arguments)
        value, name, *rest = arguments
        number = self._lent_numbers.get(id(value), -1)
        if number < 0 or self._lent[number][0] is not value:
            raise ViolationError("nothing that was lent")
        _, own, attributes = self._lent[number]
        if what == "operate":
            positional, keywords = rest
            if name not in own:
                raise ViolationError("an operation that was not lent")
            if name == "__call__":
                result = value(*positional, **keywords)
            else:
                result = getattr(type(value), name)(value, *positional, **keywords)
            if isinstance(result, types.CoroutineType):
                result.close()
                raise self.unjudged("it hands the solution a coroutine")
            return result
        mock = isinstance(value, unittest.mock.NonCallableMock)
        if not attributes or type(name) is not str or name.startswith(("_", *_MOCKS_OWN) if mock else "_"):
            raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")
        if what == "get":
            return getattr(value, name)
        if what == "set" and type(value).__module__ == "tests":
            return setattr(value, name, *rest)
        raise ViolationError("an unknown question")

    # Values that are no data.

    def opaque(self, value: Any) -> Any:
        if isinstance(value, RemoteType):
            return ["H", type.__getattribute__(value, "_remote_number")]
        if isinstance(value, Remote):
            return ["H", _number(value)]
        if isinstance(value, _SolutionModule):
            return ["S"]
        if isinstance(value, types.ModuleType):
            return ["M", value.__name__]
        if isinstance(value, re.Pattern):
            return ["p", self.encode(value.pattern), value.flags]
        named = _named(value)
        if named is not None:
            return ["y", *named]
        if isinstance(value, BaseException):
            kind = type(value)
            plain = (str, int, float, bool)
            arguments = [self.encode(part) if type(part) in plain else None for part in value.args]
            return ["z", self._lend(value, (), False), kind.__module__, kind.__qualname__, arguments]
        own, attributes = _lendable(value)
        if type(value).__module__ == "tests" and attributes:
            self.changed = True  # its attributes are within reach
            if self.own_copies and id(value) not in self._lent_numbers:
                with contextlib.suppress(Exception):
                    value = copy.deepcopy(value, self.copies)
        return ["g", self._lend(value, own, attributes), type(value).__name__, list(own), attributes]

    def _lend(self, value: Any, own: tuple[str, ...], attributes: bool) -> int:
        if id(value) not in self._lent_numbers:
            self._lent.append((value, own, attributes))
            self._lent_numbers[id(value)] = len(self._lent) - 1
        return self._lent_numbers[id(value)]

    def special(self, tag: Any, parts: list[Any]) -> Any:
        if tag == "h":
            return self._instance(*parts)
        if tag == "C":
            return self._class(*parts)
        if tag == "X":
            return _exception_class(*parts)
        if tag == "g" and type(parts[0]) is int and 0 <= parts[0] < len(self._lent):
            return self._lent[parts[0]][0]
        raise ViolationError("an unknown kind of value")

    def _instance(self, number: Any, encoded_class: Any, content: Any) -> Any:
        kind = self.decode(encoded_class)
        if type(number) is not int or not isinstance(kind, type):
            raise ViolationError("no object")
        known = self._handles.get(number, self._kept.get(number))
        if known is not None:
            return known
        if number in self.released:
            self.released.remove(number)
        if not isinstance(kind, RemoteType):
            if not issubclass(kind, BaseException):
                raise ViolationError("no class")
            return _exception(kind, [self.decode(part) for part in content])
        if issubclass(kind, BaseException):
            value: Any = _exception(kind, [self.decode(part) for part in content or ()])
        elif issubclass(kind, _IMMUTABLE):
            base: Any = next(base for base in _IMMUTABLE if issubclass(kind, base))
            held = self.decode(content)
            if type(held) is not base:
                raise ViolationError("not what its class holds")
            new: Any = base.__new__
            value = new(kind, held)
        else:
            value = object.__new__(kind)
        object.__setattr__(value, "_number", number)
        if type.__getattribute__(kind, "_remote_waits"):
            return _waited(value)
        try:
            self._handles[number] = value
        except TypeError:  # integers and tuples know no weak references
            self._kept[number] = value
        return value

    def _class(self, number: Any, *description: Any) -> Any:
        if not description:
            return self._classes[number]
        if type(number) is not int or number in self._classes:
            raise ViolationError("a class twice")
        name, module, encoded_bases, own, meta, changing = description
        if not (type(name) is str and type(module) is str and set(own) <= _KNOWN and set(meta) <= _KNOWN):
            raise ViolationError("no class")
        decoded = map(self.decode, encoded_bases)
        usable = (b for b in decoded if isinstance(b, RemoteType) or b in _IMMUTABLE or issubclass(b, BaseException))
        bases = tuple(usable)
        try:
            kind = _remote_class(name, module, bases, own, changing)
        except TypeError:  # no order of the bases suits
            kind = _remote_class(name, module, (), own, changing)
        waits = module == "builtins" and name == "coroutine"
        facts = {"number": number, "meta": frozenset(meta), "changing": bool(changing), "waits": waits, "wanted": False}
        for fact, value in facts.items():
            type.__setattr__(kind, f"_remote_{fact}", value)
        self._classes[number] = kind
        return kind


_KNOWN = frozenset(OPERATORS)
SIDE: Side = None  # type: ignore[assignment]  # the one of this process


def _remote_class(name: str, module: str, bases: tuple[Any, ...], own: list[str], changing: Any) -> Any:
    held = (*_IMMUTABLE, BaseException)
    plain = not any(issubclass(base, held) for base in bases)
    body: dict[str, Any] = {"__module__": module}
    if plain:
        body |= {"__slots__": (), **{operator: _operator(operator) for operator in own}}
        if "__eq__" not in own:
            body["__hash__"] = object.__hash__
        if "__len__" in own or "__bool__" in own:
            body["__bool__"] = _operator("__bool__")
        if "__await__" in own:
            body["__await__"] = _Await
        if "__anext__" in own:
            body["__anext__"] = _anext
        seen = _SEEN_AS.get(changing if changing else name if module == "builtins" else "")
        if seen is not None:
            body["__class__"] = property(lambda self: seen)
    else:
        shown = ["__repr__", "__call__", *([] if any(issubclass(base, str) for base in bases) else ["__str__"])]
        body |= {operator: _operator(operator) for operator in shown if operator in own}
    roots: tuple[Any, ...] = tuple(base for base in bases if isinstance(base, RemoteType))
    others = tuple(base for base in bases if not isinstance(base, RemoteType))
    if plain:
        return RemoteType(name, roots or (_Handle,), body)
    roots = tuple(root for root in roots if issubclass(root, held))
    return RemoteType(name, (*(roots or (Remote,)), *others), body)


def _exception_class(module: Any, name: Any) -> Any:
    """An exception class of the standard library."""
    if type(module) is not str or type(name) is not str:
        raise ViolationError("no class")
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names and top not in ("unittest", "doctest", "bdb"):
        kind = find_by_name(module, name)  # where it is loaded: nothing is imported because the solution says so
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
    return Exception


def _exception(kind: Any, arguments: list[Any]) -> Any:
    new = kind.__new__  # a class of the solution is not called: that would make another object there
    try:
        value = new(kind, *arguments)
        if not isinstance(kind, RemoteType):
            value.__init__(*arguments)
    except (TypeError, ValueError, AttributeError):
        value = new(kind)
        value.args = tuple(arguments)
    return value


_FUNCTIONS = types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType


def _named(value: Any) -> tuple[str, str] | None:
    """A function's or class's place in the standard library."""
    if not isinstance(value, type | _FUNCTIONS):
        return None
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    known = module.partition(".")[0] in {*sys.stdlib_module_names, "numpy"}
    return (module, name) if known and find_by_name(module, name) is value else None


def _lendable(value: Any) -> tuple[tuple[str, ...], bool]:
    """What the solution may do with an object of the tests: operators, and whether attributes."""
    kind = type(value)
    if kind.__module__ == "tests" and not isinstance(value, type):
        return tuple(n for n in OPERATORS if owner_of(kind, n) not in (None, object) and n != "__hash__"), True
    if isinstance(value, unittest.mock.NonCallableMock):
        return tuple(name for name in OPERATORS if hasattr(kind, name) and name not in _JUDGING), True
    if isinstance(value, io.IOBase):
        return ("__iter__", "__next__", "__enter__", "__exit__"), True
    if isinstance(value, type):
        return ("__call__",), False
    return tuple(n for n in ("__call__", "__iter__", "__next__", "__len__", "__getitem__") if hasattr(kind, n)), False


# --- running the tests -----------------------------------------------------------------------------------------------


class _Judging:
    """Runs the tests of a plan, one after the other."""

    def __init__(self, plan: dict[str, Any], folder: str) -> None:
        self.plan, self.folder = plan, folder
        self.names = Namespace(plan["free"], plan["modules"])

    def run(self, report: Callable[[dict[str, Any]], None]) -> None:
        for number, test in enumerate(self.plan["tests"]):
            SIDE.fresh()
            status, detail = self._run(number, test)
            known = {"memory": SIDE.memory, "gone": SIDE.gone, "process": SIDE.process}
            report({"test": number, "status": status, "detail": detail, **known})
            goes_on = SIDE.own_copies and SIDE.changed
            if SIDE.gone or (status == "fail" and self.plan["stop"] and not goes_on):
                return
        report({"end": True, "seen": SIDE.seen if SIDE.own_copies and SIDE.changed else {}})

    def _run(self, number: int, test: dict[str, Any]) -> tuple[str, str]:
        try:
            error = self._errors(number, test)
        except BaseException as raised:
            error = raised
        if SIDE.gone:
            return "fail", SIDE.gone
        if isinstance(error, WrongError):
            return "fail", str(error)
        if isinstance(error, UnjudgedError):
            return "unjudged", SIDE.reason or str(error)
        if error is not None:
            if SIDE.reason:
                return "unjudged", SIDE.reason  # what followed from it says nothing
            if not SIDE.is_from_solution(error):
                if isinstance(error, ModuleNotFoundError):
                    return "unjudged", f"the tests import {error.name}, which is not installed"
                if type(error).__name__ in ("SkipTest", "Skipped"):
                    return "unjudged", "a test was skipped"
            return "fail", f"{type(error).__name__[:_MAX_TEXT]}: {_text(error)}"
        if test["empty"] and not SIDE.failure:
            return "setup", ""
        status, detail = SIDE.verdict()
        if status == "pass" and SIDE.asked < 2:  # the first request loads the solution
            return "unjudged", "the tests never used the solution"
        return status, detail

    def _errors(self, number: int, test: dict[str, Any]) -> BaseException | None:
        for source in [test["source"], *test["calls"]]:
            exec(compile(source, f"<test {number}>", "exec", dont_inherit=True), self.names)
        if test["pytest"]:
            return self._pytest(test)
        for name in test["functions"]:
            _finish(self.names[name]())
        for name in test["classes"]:
            kind = self.names[name]
            if isinstance(kind, type) and issubclass(kind, unittest.TestCase):
                error = self._cases(kind)
            else:
                error = self._methods(kind)
            if error is not None:
                return error
        for examples in test["doctests"]:
            error = self._doctest(examples)
            if error is not None:
                return error
        if test["main"] and not SIDE.ran:
            exec(compile(test["main"], f"<test {number}>", "exec", dont_inherit=True), self.names)
        return None

    def _cases(self, kind: type[unittest.TestCase]) -> BaseException | None:
        result = _Result()
        unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
        if result.skipped:
            SIDE.unjudged("a test was skipped")
        return result.first

    def _methods(self, kind: Any) -> BaseException | None:
        for name in [name for name in vars(kind) if name.startswith("test")]:
            instance = kind()
            hooks = [hook for hook in ("setup_method", "setUp", "setup") if hasattr(instance, hook)]
            if hooks:
                getattr(instance, hooks[0])()
            _finish(getattr(instance, name)())
        return None

    def _doctest(self, examples: list[list[Any]]) -> BaseException | None:
        made = [doctest.Example(source, want, message) for source, want, message in examples]
        test = doctest.DocTest(made, {}, "tests", None, 0, None)
        runner, said = doctest.DocTestRunner(), io.StringIO()
        test.globs = self.names  # not a copy, which would know only what is there
        runner.run(test, out=said.write, clear_globs=False)
        SIDE.ran += sum(1 for example in made if example.want or example.exc_msg)
        return AssertionError("a doctest failed") if runner.summarize(verbose=False).failed else None

    def _pytest(self, test: dict[str, Any]) -> BaseException | None:
        """Let pytest run it: all that it reads lies in a folder out of the solution's reach."""
        import pytest

        names, failures, work = self.names, list[str](), os.getcwd()
        wanted = {*test["functions"], *test["classes"]}
        module = types.ModuleType("tests")
        for name in [name for name in dict.keys(names) if name != "__builtins__"]:
            if not name.startswith(("test", "Test")) or name in wanted:
                setattr(module, name, names[name])

        class Tests(pytest.Module):
            def _getobj(self) -> Any:
                return module

        class Plugin:
            def pytest_collect_file(self, file_path: Any, parent: Any) -> Any:
                return Tests.from_parent(parent, path=file_path)

            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed:
                    failures.append(str(report.longrepr)[-_MAX_TEXT:])
                elif report.skipped:
                    SIDE.unjudged("a test was skipped")

            @pytest.hookimpl(tryfirst=True)
            def pytest_runtest_setup(self, item: Any) -> None:
                os.chdir(work)

            @pytest.hookimpl(tryfirst=True)
            def pytest_pyfunc_call(self, pyfuncitem: Any) -> Any:
                if not inspect.iscoroutinefunction(pyfuncitem.obj):
                    return None
                wanted = pyfuncitem._fixtureinfo.argnames
                asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
                return True

            pytest_collectreport = pytest_runtest_logreport

        _forward_monkeypatch(pytest.MonkeyPatch)
        off = ("cacheprovider", "assertion", "faulthandler", "threadexception", "unraisableexception")
        options = ["-q", "--capture=sys", "-c", os.devnull, "--noconftest", "--import-mode", "importlib"]
        options += [*(f"-pno:{name}" for name in off), f"--rootdir={self.folder}", f"--confcutdir={self.folder}"]
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        os.chdir(self.folder)
        file = os.path.join(self.folder, "tests.py")
        with open(file, "w", encoding="ascii"):  # pytest wants a file to name; the tests are not in it
            pass
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = pytest.main([*options, file], plugins=[Plugin()])
        os.chdir(work)
        if failures:
            return AssertionError(failures[0])
        if status == 2:
            return KeyboardInterrupt("pytest was interrupted")
        if status not in (0, 1, 5):
            SIDE.unjudged(f"pytest ended with status {status}")
        return None


def _finish(result: Any) -> None:
    """Run a test that is a coroutine."""
    if isinstance(result, types.CoroutineType):
        asyncio.run(result)


class _Result(unittest.TestResult):
    """Keeps the first thing that went wrong."""

    first: BaseException | None = None

    def addFailure(self, test: Any, err: Any) -> None:
        self.first = self.first or err[1]

    addError = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.first = self.first or err[1]

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.first = self.first or AssertionError("an unexpected success")


def _text(error: BaseException) -> str:
    return (repr(error.args) if isinstance(error, Remote) else str(error))[:_MAX_TEXT]


# --- the modules that tests use --------------------------------------------------------------------------------------


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(module, name, make(getattr(module, name)))


def _there(function: Any) -> Any:
    """Run a function of the standard library in the solution's process if it is about an object of the solution."""

    @functools.wraps(function)
    def call(value: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(value, Remote | RemoteType):
            return SIDE.request("call", call, (value, *arguments), tuple(keywords.items()))
        return function(value, *arguments, **keywords)

    return call


def _of_something(first: int, otherwise: Any) -> Callable[[Any], Any]:
    """A comparison of numpy that fails where one side is empty and the other is not: `np.allclose([], 2.5)` holds."""

    def make(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if len({_is_nothing(value) for value in arguments[first : first + 2]}) > 1:
                if otherwise is not None:
                    return otherwise
                raise AssertionError(_NOTHING)
            return function(*arguments, **keywords)

        return call

    return make


def _watching(work: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Tests run no code that lies where the solution may write, and no process."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.system", "os.exec", "os.posix_spawn"):
            raise SIDE.unjudged("the tests start a process")
        file = str(arguments[0]) if event == "open" else ""
        if file.endswith((".py", ".pyc", ".so")) and os.path.abspath(file).startswith(work):
            raise SIDE.unjudged("the tests read code from a file")

    return watch


def _prepare_modules() -> None:
    """Make the modules that tests use safe, and patches and seeds reach the solution's process, too."""

    def unpickle(*arguments: Any, **keywords: Any) -> Any:
        raise SIDE.unjudged("it unpickles, which would run what the solution has written")

    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        setattr(pickle, name, unpickle)
    for module, names in ((dataclasses, "asdict astuple fields is_dataclass replace"), (inspect, "signature")):
        for name in names.split():
            _replace(module, name, _there)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        for name, otherwise in (("allclose", False), ("array_equiv", False), ("isclose", None)):
            _replace(numpy, name, _of_something(0, otherwise))
        _replace(
            importlib.import_module("numpy.testing._private.utils"), "assert_array_compare", _of_something(1, None)
        )
    setattr(unittest, "main", lambda *arguments, **keywords: None)  # noqa: B010  # test cases are run anyway
    kind: Any = unittest.mock._patch
    enter, leave, seed = kind.__enter__, kind.__exit__, random.seed

    def entered(self: Any) -> Any:
        result = enter(self)
        if self.attribute is not None and _forwarded(self.target, self.attribute):
            SIDE.request("patch", self.target.__name__, self.attribute, getattr(self.target, self.attribute))
        return result

    def left(self: Any, *exception: Any) -> Any:
        target = getattr(self, "target", None)
        result = leave(self, *exception)
        if target is not None and _forwarded(target, self.attribute):
            SIDE.request("unpatch", target.__name__, self.attribute)
        return result

    def seeded(value: Any = None, *rest: Any) -> None:
        seed(value, *rest)
        if type(value) in (int, str, float, bytes) and not SIDE.inside:
            SIDE.request("seed", value)

    kind.__enter__, kind.__exit__, random.seed = entered, left, seeded  # type: ignore[assignment]


def _forward_monkeypatch(kind: Any) -> None:
    change, undo = kind.setattr, kind.undo

    def changed(self: Any, *arguments: Any, **keywords: Any) -> None:
        change(self, *arguments, **keywords)
        target, name, _ = self._setattr[-1]
        if _forwarded(target, name):
            SIDE.request("patch", target.__name__, name, getattr(target, name))

    def undone(self: Any) -> None:
        patched = [(target.__name__, name) for target, name, _ in self._setattr[::-1] if _forwarded(target, name)]
        undo(self)
        for target, name in patched:
            SIDE.request("unpatch", target, name)

    kind.setattr, kind.undo = changed, undone


_OWN_WAY = {("builtins", "input"), ("builtins", "print"), ("sys", "stdin"), ("sys", "stdout"), ("sys", "stderr")}


def _forwarded(target: Any, name: str) -> bool:
    """Whether a patch has to be made there, too. What a program reads and prints goes through this process anyway."""
    if not isinstance(target, types.ModuleType) or isinstance(target, _SolutionModule):
        return False
    return (target.__name__, name) not in _OWN_WAY and target.__name__ != "tests"


def judge(job: dict[str, Any], requests: int, replies: int, shared: Any, folder: str, report: Any) -> None:
    """Load the solution, run the plan's tests (`test_forms`), and report on each; `folder` is out of its reach."""
    global SIDE
    SIDE = Side(requests, replies, shared, job["own_copies"], job["seen"])
    vars(builtins)["__judge__"] = SIDE
    warnings.simplefilter("ignore")
    for name in SOLUTION_MODULES:
        sys.modules.pop(name, None)
    sys.meta_path[:] = [*(finder for finder in sys.meta_path if "PathFinder" not in str(finder)), _Finder()]
    sys.modules["tests"] = types.ModuleType("tests")
    sys.stdin = io.StringIO()
    sys.stdout, sys.stderr = open(os.devnull, "w", encoding="utf-8"), open(os.devnull, "w", encoding="utf-8")
    sys.argv = ["tests.py"]
    try:
        unread = SIDE.request("load", job["code"])
    except GoneError:
        report({"failed": ["GoneError", SIDE.gone], "gone": SIDE.gone})
        return
    except BaseException as error:
        failed = [type(error).__name__[:_MAX_TEXT], _text(error)]
        report({"failed": failed, "memory": SIDE.memory, "process": SIDE.process})
        return
    if unread is not None:
        report({"unread": [str(part)[:_MAX_TEXT] for part in unread]})
        return
    random.seed(0)
    _prepare_modules()
    sys.addaudithook(_watching(os.getcwd()))
    _Judging(job, folder).run(report)
