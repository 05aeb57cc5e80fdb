"""The process that runs the tests of a solution, which another one holds: `server` forks both.

The data set's tests are trusted; the solution's values are not. Plain values arrive as data, so `==`, `len`, `sorted`,
`isinstance` and asserts are Python's own here. Anything else that the solution returns is a `Remote`: its attributes,
calls, items and iteration are requests to the other process, whose answers are data again. An object of the solution's
own class must not decide whether a test passes, so its `==`, order, truth, membership and arithmetic with the tests'
values are never requested: a test that needs them cannot be judged (`UnjudgedError`).
"""

# Tables of words are easier to read as words; beside the tests' own process, pathlib gives nothing here.
# ruff: noqa: SIM905, PTH109, PTH123
from __future__ import annotations

import asyncio
import builtins
import contextlib
import copy
import doctest
import importlib
import importlib.abc
import importlib.machinery
import inspect
import io
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
from .wire import ClosedError, Codec, ViolationError, receive, send

SOLUTION_MODULES = frozenset(
    "solution solutions main submission candidate answer code_solution program my_solution your_solution "
    "solution_module my_module your_module module task implementation".split()
)
"""Module names from which tests import the solution."""

_MAX_TEXT = 200
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
_GIVES: dict[str, tuple[type, ...]] = {
    **{f"__{name}__": (str,) for name in ("str", "repr", "format")},
    **{f"__{name}__": (int,) for name in ("len", "int", "index")},
    "__float__": (float,),
    "__complex__": (complex,),
}
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
_SEEN_AS = {
    "generator": types.GeneratorType,
    "function": types.FunctionType,
    "method": types.MethodType,
    "builtin_function_or_method": types.BuiltinFunctionType,
    "coroutine": types.CoroutineType,
    "async_generator": types.AsyncGeneratorType,
    "list": list,
    "dict": dict,
    "set": set,
    "bytearray": bytearray,
}


class UnjudgedError(BaseException):
    """The test needs something that only the solution could say."""


class GoneError(BaseException):
    """The other process has ended, or sent something that is not a message."""


class RemoteType(type):
    """A class of the solution."""

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        made = SIDE.request("call", cls, arguments, tuple(keywords.items()))
        SIDE.made_by_tests.add(type(made))
        return made

    def __getattr__(cls, name: str) -> Any:
        return _attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        SIDE.request("set", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        SIDE.request("delete", cls, name)

    def __iter__(cls) -> Any:
        return cls._meta("__iter__")

    def __len__(cls) -> Any:
        return cls._meta("__len__")

    def __getitem__(cls, key: Any) -> Any:
        return cls._meta("__getitem__", key)

    def __contains__(cls, value: Any) -> bool:
        return any(member is value for member in cls)

    def __bool__(cls) -> bool:
        return True

    def _meta(cls, name: str, *arguments: Any) -> Any:
        if name not in type.__getattribute__(cls, "_remote_meta"):
            raise TypeError(f"the class {cls.__name__} has no {name}")
        return SIDE.operated(name, SIDE.request("operate", cls, name, arguments))


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
        return SIDE.request("call", copy.deepcopy, (self,), ())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SIDE.unjudged("it pickles an object of the solution")

    def __dir__(self) -> Any:
        return []

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was not finished, or all ends
            SIDE.released.append(_number(self))


class _Handle(Remote):
    __slots__ = ("__weakref__", "_informed", "_number")


def _inform(value: Any) -> None:
    """Remember that an object was computed from a value of the tests, which may be the expected one."""
    if isinstance(value, _Handle):
        object.__setattr__(value, "_informed", True)


def _is_informed(value: Any) -> bool:
    try:
        return bool(object.__getattribute__(value, "_informed"))
    except AttributeError:
        return False


def _ask_informed(value: Any, name: str) -> None:
    """Whether it may still give data: `abs(f(2) - 2.5) < 1e-6` is for numbers, `(vector * 2).x` is fine."""
    if not _is_informed(value):
        return
    if name in _TO_NUMBERS or type(value) not in SIDE.made_by_tests:
        raise SIDE.unjudged(f"it takes {name} of what the solution's own arithmetic made of a value of the tests")


def _number(value: Any) -> int:
    number: int = object.__getattribute__(value, "_number")
    return number


def _attribute(value: Any, name: str) -> Any:
    if name.startswith("__") and name.endswith("__") and name not in _NAMES:
        raise AttributeError(f"{name} of an object of the solution")
    _ask_informed(value, name)
    if name in _PREDICATES and not isinstance(value, type):
        raise SIDE.unjudged(f"it asks an object of the solution's own class for `{name}`")
    return SIDE.request("get", value, name)


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if name in _UNARY:
            _ask_informed(self, name)
        if name == "__call__":
            return SIDE.request("call", self, arguments, tuple(keywords.items()))
        if name == "__exit__":
            arguments = (*arguments[:2], None)
        result = SIDE.request("operate", self, name, arguments)
        if name in _UNARY and _is_informed(self):
            _inform(result)
        if name not in _UNARY and result is not NotImplemented:
            mixed = not all(isinstance(argument, Remote) for argument in arguments)
            if mixed or any(map(_is_informed, (self, *arguments))):
                if not isinstance(result, _Handle):
                    raise SIDE.unjudged(f"it takes the result of the solution's own {name} with a value of the tests")
                _inform(result)
        return SIDE.operated(name, result)

    def judge(self: Any, *arguments: Any) -> Any:
        changing = type.__getattribute__(type(self), "_remote_changing")
        if changing and name in _JUDGING and name != "__hash__":
            held = [_held(value) for value in (self, *arguments)]
            return bool(held[0]) if name == "__bool__" else getattr(held[0], name)(*held[1:])
        raise SIDE.unjudged(f"it needs the {name} of the solution's own class {type(self).__name__}")

    return judge if name in _JUDGING else operate


def _held(value: Any) -> Any:
    """What an object of a class that extends `list`, `dict`, ... holds, as the built-in type."""
    if isinstance(value, Remote) and type.__getattribute__(type(value), "_remote_changing"):
        return SIDE.request("content", value)
    return value


async def _waited(value: Any) -> Any:
    """A coroutine of the solution: it runs in a loop over there, from its beginning to its end."""
    return SIDE.request("wait", value)


class _Await:
    """What `await` iterates over: nothing, with a result."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __iter__(self) -> _Await:
        return self

    def __next__(self) -> Any:
        raise StopIteration(SIDE.request("wait", self._value))


async def _anext(self: Any) -> Any:
    return SIDE.request("wait_next", self)


class _SolutionModule(types.ModuleType):
    """`import solution`."""

    __all__: tuple[str, ...] = ()  # the tests' free names are found in the solution anyway

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return SIDE.request("name", name)
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
    """Provides the modules from which tests import the solution, if no real module has that name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in SOLUTION_MODULES:
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def create_module(self, spec: Any) -> Any:
        return _SolutionModule(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def _is_match(value: Any) -> bool:
    """Whether it is a match object of `re`, which many functions in data sets return."""
    return isinstance(value, _Handle) and (type(value).__module__, type(value).__name__) == ("re", "Match")


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
            return SIDE.request("name", name)
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None


class Side(Codec):
    """The tests' side of the conversation, and what is known so far of the test that runs.

    Args:
        requests: Where requests are written.
        replies: Where replies are read.
        waiting: A byte that says whether an answer is awaited.
    """

    def __init__(self, requests: int, replies: int, waiting: Any) -> None:
        super().__init__(0)
        self._requests, self._replies, self._waiting = requests, replies, waiting
        self._sequence = 0
        self._handles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._kept: dict[int, Any] = {}
        self._classes: dict[int, Any] = {}
        self._lent: list[tuple[Any, tuple[str, ...], bool]] = []
        self._lent_numbers: dict[int, int] = {}
        self._inside = 0
        self._built: set[int] = set()
        self.released: list[int] = []
        self.made_by_tests: set[type] = set()
        self.gone = ""
        self.asked = 0
        self.memory = False
        self.fresh()

    def fresh(self) -> None:
        """Begin with a test."""
        self.ran, self.failure, self.reason, self.sites = 0, "", "", dict[int, bool]()

    # What the tests call, by the name `__judge__` (see `test_forms`).

    def check(self, value: Any, swallowed: bool = False, expected: Callable[[], Any] | None = None) -> bool:
        """Whether an assert holds.

        Args:
            value: What it asserts.
            swallowed: Whether its exception would be caught and forgotten.
            expected: One side of a comparison, to be computed once more: it must not depend on what the solution did
                to its arguments (`a.clear(); return []` is no way to `assert f(a) == sorted(a)`).
        """
        if _is_match(value):  # it says no more than True
            value = True
        if isinstance(value, Remote | RemoteType | types.ModuleType) and not isinstance(value, _IMMUTABLE):
            raise self.unjudged("an assert takes an object of the solution for true")
        truth = bool(value)
        self.ran += 1
        if not truth and (swallowed or self._inside):
            self.failure = "an assert failed, and its exception was caught"
        if truth and expected is not None:
            now = expected()
            try:
                same = bool(now == self.as_sent(expected))
            except Exception:  # it can only be computed from what the solution left
                same = False
            if not same:
                self.reason = self.reason or "what it expects depends on an argument that the solution has changed"
        return truth

    def checking(self, function: Any) -> Callable[..., Any]:
        """A call such as `self.assertEqual(...)`."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            if isinstance(function, Remote):
                raise self.unjudged("it calls an assertion of the solution's own")
            name = getattr(function, "__name__", "")
            if name in ("assertTrue", "assertFalse", "assert_") and arguments:
                self.check(arguments[0])
                self.ran -= 1
            try:
                result = function(*arguments, **keywords)
            except AssertionError:
                if self._inside:
                    self.failure = "an assert failed, and its exception was caught"
                raise
            self.ran += 1
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

    def several(self, site: int, values: Any) -> Iterator[Any]:
        """Iterate over what the solution decides the length of."""
        self.sites.setdefault(site, False)
        for value in values:
            self.sites[site] = True
            yield value

    def zipped(self, *values: Any, **keywords: Any) -> Iterator[Any]:
        """`zip`, where asserts follow: what the solution returned may be too short for them."""
        longest, count = max((len(value) for value in values if hasattr(value, "__len__")), default=0), 0
        for parts in zip(*values, **keywords):  # noqa: B905  # it is the tests' own
            count += 1
            yield parts
        if count < longest:
            self.skipped()

    # The conversation.

    def unjudged(self, reason: str) -> UnjudgedError:
        """Mark the test as impossible to judge, even if something catches the exception."""
        self.reason = self.reason or reason
        return UnjudgedError(reason)

    def request(self, what: str, *arguments: Any) -> Any:
        """Ask the other process."""
        if self.gone:
            raise GoneError(self.gone)
        try:
            self._sequence += 1
            self.asked += 1
            sequence = self._sequence
            released, self.released = self.released, []
            twins = self.forgotten()
            packed = self.pack((what, *arguments))
            self._waiting[0] = 1
            send(self._requests, ["do", sequence, released, twins, packed])
            return self._reply(sequence)
        except ClosedError as error:
            self.gone = "closed"
            raise GoneError(str(error)) from None
        except ViolationError as error:
            self.gone = f"violation: {error}"
            raise GoneError(str(error)) from None
        finally:
            self._waiting[0] = 0

    def _reply(self, sequence: int) -> Any:
        while True:
            message = receive(self._replies)
            self._waiting[8:16] = wire.received.to_bytes(8, "little")
            try:
                kind, number, packed, printed = message
                out, err = printed
            except (TypeError, ValueError):
                raise ViolationError("a message of another shape") from None
            if type(out) is not str or type(err) is not str or kind not in ("ok", "no", "ask"):
                raise ViolationError("a message of another shape")
            value = self.unpack(packed)
            if out:
                sys.stdout.write(out)
            if err:
                sys.stderr.write(err)
            if kind == "ask":
                self._serve(value)
                self._waiting[0] = 1
                continue
            if number != sequence or type(number) is not int:
                raise ViolationError("an answer to another question")
            if kind == "no":
                if not isinstance(value, BaseException) or isinstance(value, UnjudgedError | GoneError):
                    raise ViolationError("no exception")
                self.memory = self.memory or isinstance(value, MemoryError)
                raise value
            return value

    def _serve(self, asked: Any) -> None:
        """Do what the solution requests with an object that it was lent."""
        self._waiting[0] = 0
        if type(asked) is not list or not asked or type(asked[0]) is not str:
            raise ViolationError("no question")
        self._inside += 1
        try:
            answer = ["ok", self.pack(self._answer(*asked))]
        except (UnjudgedError, GoneError, ViolationError, ClosedError):
            raise
        except BaseException as error:
            answer = ["no", self.pack(error)]
        finally:
            self._inside -= 1
        send(self._requests, answer)

    def _answer(self, what: str, *arguments: Any) -> Any:
        if what == "input":
            return input(*arguments)
        if what == "read":
            return sys.stdin.read(*arguments)
        if what == "readline":
            return sys.stdin.readline()
        value, *rest = arguments
        number = self._lent_numbers.get(id(value), -1)
        if number < 0 or self._lent[number][0] is not value:
            raise ViolationError("nothing that was lent")
        _, own, attributes = self._lent[number]
        if what == "operate":
            name, positional, keywords = rest
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
        name = rest[0]
        if not attributes or type(name) is not str or name.startswith("_"):
            raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")
        if what == "get":
            return getattr(value, name)
        if what == "set" and type(value).__module__ == "tests":
            return setattr(value, name, rest[1])
        raise ViolationError("an unknown question")

    def operated(self, name: str, result: Any) -> Any:
        """The result of an operator, of a type that Python takes."""
        wanted = _GIVES.get(name)
        if wanted is not None and type(result) not in wanted:
            raise TypeError(f"{name} of the solution returned {type(result).__name__}")
        return result

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
        number = self._lent_numbers.get(id(value))
        if isinstance(value, BaseException):
            number = self._lend(value, (), False) if number is None else number
            kind = type(value)
            return ["z", number, kind.__module__, kind.__qualname__, [self._argument(a) for a in value.args]]
        own, attributes = _lendable(value)
        number = self._lend(value, own, attributes) if number is None else number
        return ["g", number, type(value).__name__, list(own), attributes]

    def _argument(self, value: Any) -> Any:
        return self.encode(value) if type(value) in (str, int, float, bool, type(None)) else None

    def _lend(self, value: Any, own: tuple[str, ...], attributes: bool) -> int:
        self._lent.append((value, own, attributes))
        self._lent_numbers[id(value)] = len(self._lent) - 1
        return len(self._lent) - 1

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
            value = _new(base, kind, held)
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
        bases = []
        for encoded in encoded_bases:
            base = self.decode(encoded)
            if isinstance(base, RemoteType) or base in _IMMUTABLE or issubclass(base, BaseException):
                bases.append(base)
        try:
            kind = _remote_class(name, module, tuple(bases), own, changing)
        except TypeError:  # no order of the bases suits
            kind = _remote_class(name, module, (), own, changing)
        for attribute, value in (
            ("number", number),
            ("meta", frozenset(meta)),
            ("changing", bool(changing)),
            ("waits", module == "builtins" and name == "coroutine"),
        ):
            type.__setattr__(kind, f"_remote_{attribute}", value)
        self._classes[number] = kind
        return kind


_KNOWN = frozenset(OPERATORS)
SIDE: Side = None  # type: ignore[assignment]  # the one of this process


def _remote_class(name: str, module: str, bases: tuple[Any, ...], own: list[str], changing: Any) -> Any:
    plain = not any(issubclass(base, (*_IMMUTABLE, BaseException)) for base in bases)
    body: dict[str, Any] = {"__module__": module}
    if plain:
        body["__slots__"] = ()
        body |= {operator: _operator(operator) for operator in own}
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
        shown: list[str] = [operator for operator in ("__repr__", "__call__") if operator in own]
        if not any(issubclass(base, str) for base in bases):
            shown += [operator for operator in ("__str__",) if operator in own]
        body |= {operator: _operator(operator) for operator in shown}
    roots: tuple[Any, ...] = tuple(base for base in bases if isinstance(base, RemoteType))
    others = tuple(base for base in bases if not isinstance(base, RemoteType))
    if plain:
        return RemoteType(name, roots or (_Handle,), body)
    if any(not issubclass(root, (*_IMMUTABLE, BaseException)) for root in roots):
        roots = tuple(root for root in roots if issubclass(root, (*_IMMUTABLE, BaseException)))
    return RemoteType(name, (*(roots or (Remote,)), *others), body)


def _new(base: Any, kind: Any, held: Any) -> Any:
    return base.__new__(kind, held)


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


def _named(value: Any) -> tuple[str, str] | None:
    """A function's or class's place in the standard library."""
    if not isinstance(
        value,
        type
        | types.FunctionType
        | types.BuiltinFunctionType
        | types.MethodDescriptorType
        | types.WrapperDescriptorType,
    ):
        return None
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names and top != "numpy":
        return None
    return (module, name) if find_by_name(module, name) is value else None


def _lendable(value: Any) -> tuple[tuple[str, ...], bool]:
    """What the solution may do with an object of the tests: operators, and whether attributes."""
    kind = type(value)
    if kind.__module__ == "tests" and not isinstance(value, type):
        return tuple(
            name for name in OPERATORS if owner_of(kind, name) not in (None, object) and name != "__hash__"
        ), True
    if isinstance(value, unittest.mock.NonCallableMock):
        return ("__call__",) if callable(value) else (), True
    if isinstance(value, io.IOBase):
        return ("__iter__", "__next__", "__enter__", "__exit__"), True
    own = [name for name in ("__call__", "__iter__", "__next__", "__len__", "__getitem__") if hasattr(kind, name)]
    if isinstance(value, type):
        own = ["__call__"]
    return tuple(own), False


# --- running the tests -----------------------------------------------------------------------------------------------


class _Judging:
    """Runs the tests of a plan, one after the other."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.names = Namespace(plan["free"], plan["modules"])
        self.module = types.ModuleType("tests")

    def run(self, report: Callable[[dict[str, Any]], None]) -> None:
        for number, test in enumerate(self.plan["tests"]):
            SIDE.fresh()
            status, detail = self._run(number, test)
            report({"test": number, "status": status, "detail": detail, "memory": SIDE.memory, "gone": SIDE.gone})
            if SIDE.gone or (status == "fail" and self.plan["stop"]):
                return

    def _run(self, number: int, test: dict[str, Any]) -> tuple[str, str]:
        try:
            error = self._errors(number, test)
        except BaseException as raised:
            error = raised
        if SIDE.gone:
            return "fail", SIDE.gone
        if isinstance(error, UnjudgedError):
            return "unjudged", SIDE.reason or str(error)
        if error is not None and SIDE.reason:
            return "unjudged", SIDE.reason  # what followed from it says nothing
        if isinstance(error, ModuleNotFoundError) and not isinstance(error, Remote):
            return "unjudged", f"the tests import {error.name}, which is not installed"
        if type(error).__name__ in ("SkipTest", "Skipped") and not isinstance(error, Remote):
            return "unjudged", "a test was skipped"
        if error is not None:
            return "fail", f"{type(error).__name__[:_MAX_TEXT]}: {_text(error)}"
        if SIDE.failure:
            return "fail", SIDE.failure
        if test["empty"]:
            return "setup", ""
        if SIDE.reason:
            return "unjudged", SIDE.reason
        if not SIDE.ran:
            return "unjudged", "no assert ran"
        if not all(SIDE.sites.values()):
            return "unjudged", "an assert sits in a loop whose length the solution decides, and it ran not once"
        if not SIDE.asked > 1:  # the first request loads the solution
            return "unjudged", "the tests never used the solution"
        return "pass", ""

    def _errors(self, number: int, test: dict[str, Any]) -> BaseException | None:
        if test["doctest"]:
            return self._doctests(doctest.DocTestParser().get_doctest(test["source"], self.names, "tests", None, 0))
        exec(compile(test["source"], f"<test {number}>", "exec", dont_inherit=True), self.names)
        if test["candidates"]:
            candidate = eval(compile(test["entry"], "<entry_point>", "eval", dont_inherit=True), self.names)
            for name in test["candidates"]:
                self.names[name](candidate)
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
        for source in test["docstrings"]:
            error = self._doctests(doctest.DocTestParser().get_doctest(source, self.names, "tests", None, 0))
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
            for hook in ("setup_method", "setUp", "setup"):
                if hasattr(instance, hook):
                    getattr(instance, hook)()
                    break
            _finish(getattr(instance, name)())
        return None

    def _doctests(self, test: doctest.DocTest) -> BaseException | None:
        runner, said = doctest.DocTestRunner(), io.StringIO()
        test.globs = self.names  # not a copy, which would know only what is there
        runner.run(test, out=said.write, clear_globs=False)
        SIDE.ran += sum(1 for example in test.examples if example.want or example.exc_msg)
        return AssertionError("a doctest failed") if runner.summarize(verbose=False).failed else None

    def _pytest(self, test: dict[str, Any]) -> BaseException | None:
        import pytest

        names, failures = self.names, []
        wanted = {*test["functions"], *test["classes"]}
        module = types.ModuleType("tests")
        for name in [name for name in dict.keys(names) if name != "__builtins__"]:
            if not name.startswith(("test", "Test")) or name in wanted:
                setattr(module, name, names[name])

        class Tests(pytest.Module):
            def _getobj(self) -> Any:
                return module

        class Plugin:
            ran = 0

            def pytest_collect_file(self, file_path: Any, parent: Any) -> Any:
                return Tests.from_parent(parent, path=file_path)

            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed:
                    failures.append(str(report.longrepr)[-_MAX_TEXT:])
                elif report.skipped:
                    SIDE.unjudged("a test was skipped")
                self.ran += report.when == "call"

            @pytest.hookimpl(tryfirst=True)
            def pytest_pyfunc_call(self, pyfuncitem: Any) -> Any:
                if not inspect.iscoroutinefunction(pyfuncitem.obj):
                    return None
                wanted = pyfuncitem._fixtureinfo.argnames
                asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
                return True

            def pytest_collectreport(self, report: Any) -> None:
                if report.failed:
                    failures.append(str(report.longrepr)[-_MAX_TEXT:])

        options = ["-q", "--capture=sys", "-p", "no:cacheprovider", "-p", "no:assertion", "-c", os.devnull]
        options += [
            "-p",
            "no:faulthandler",
            "-p",
            "no:logging",
            "-p",
            "no:threadexception",
            "--noconftest",
            "--rootdir",
            os.getcwd(),
        ]
        options += ["--confcutdir", os.getcwd(), "--import-mode", "importlib"]
        with open("tests.py", "w", encoding="ascii"):  # pytest wants a file to name; the tests are not in it
            pass
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        plugin = Plugin()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = pytest.main([*options, "tests.py"], plugins=[plugin])
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
    if isinstance(error, Remote):
        return repr(error.args)[:_MAX_TEXT]
    return str(error)[:_MAX_TEXT]


def _unpickle(*arguments: Any, **keywords: Any) -> Any:
    raise SIDE.unjudged("it unpickles, which would run what the solution has written")


def _forward_patches() -> None:
    """Make patches of modules in the solution's process too."""
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
        if type(value) in (int, str, float, bytes) and not SIDE._inside:
            SIDE.request("seed", value)

    kind.__enter__, kind.__exit__, random.seed = entered, left, seeded  # type: ignore[assignment]


_OWN_WAY = {("builtins", "input"), ("builtins", "print"), ("sys", "stdin"), ("sys", "stdout"), ("sys", "stderr")}


def _forwarded(target: Any, name: str) -> bool:
    """Whether a patch has to be made there, too. What a program reads and prints goes through this process anyway."""
    if not isinstance(target, types.ModuleType) or isinstance(target, _SolutionModule):
        return False
    return (target.__name__, name) not in _OWN_WAY and target.__name__ != "tests"


def judge(job: dict[str, Any], requests: int, replies: int, waiting: Any, report: Callable[..., None]) -> None:
    """Load the solution, run the plan's tests and report on each.

    Args:
        job: `code`, and the plan of `test_forms`.
        requests: Where requests to the solution's process are written.
        replies: Where its replies are read.
        waiting: A byte of shared memory that says whether an answer is awaited.
        report: Takes what there is to say.
    """
    global SIDE
    SIDE = Side(requests, replies, waiting)
    vars(builtins)["__judge__"] = SIDE
    warnings.simplefilter("ignore")
    sys.meta_path.insert(0, _Finder())
    for name in SOLUTION_MODULES:
        sys.modules.pop(name, None)
    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        setattr(pickle, name, _unpickle)
    sys.modules["tests"] = types.ModuleType("tests")
    sys.stdin = io.StringIO()
    sys.stdout, sys.stderr = _Nowhere(), _Nowhere()
    sys.argv = ["tests.py"]
    setattr(unittest, "main", lambda *arguments, **keywords: None)  # noqa: B010  # test cases are run anyway
    try:
        unread = SIDE.request("load", job["code"])
    except GoneError:
        report({"failed": ["GoneError", SIDE.gone], "gone": SIDE.gone})
        return
    except BaseException as error:
        report({"failed": [type(error).__name__[:_MAX_TEXT], _text(error)], "memory": SIDE.memory})
        return
    if unread is not None:
        report({"unread": [str(part)[:_MAX_TEXT] for part in unread]})
        return
    _forward_patches()
    _Judging(job).run(report)
    report({"end": True})


class _Nowhere(io.TextIOBase):
    """Discards what is printed if nothing captures it."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def writable(self) -> bool:
        return True
