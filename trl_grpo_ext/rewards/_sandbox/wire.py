"""The conversation of the process that runs the tests with the one that holds the solution: values as data, by type.

Containers that can change have a twin on the other side, which each message brings up to date. What is not data crosses
as whatever a side makes of it. Nothing here trusts the other side: what is no message raises `ViolationError`.
"""

import collections
import datetime
import decimal
import fractions
import json
import operator
import pathlib
import sys
import threading
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SOLUTION_MODULES = frozenset(
    "solution solutions main submission candidate answer code_solution program my_solution your_solution "  # noqa: SIM905
    "solution_module my_module your_module module task implementation".split()
)
"""Module names from which tests import the solution."""
NO_THREAD = "can't start new thread"  # what a RuntimeError says where there is no memory for a thread's stack
MAX_MESSAGE = 16 * 2**20  # bytes of one message
_NUMPY_KINDS = "biufcUSMm"
_RUNNERS = ("unittest", "doctest", "bdb")  # whose exceptions a runner of tests takes for its own
_NO_VALUE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, AssertionError)
Json = Any


class ViolationError(Exception):
    """Something arrived that is not a message."""


class ClosedError(Exception):
    """The other side has closed."""


class TooLongError(Exception):
    """A message is longer than is allowed."""


def wants_memory(error: BaseException) -> bool:
    no_thread = type(error) is RuntimeError and [*map(type, error.args)] == [str] and error.args[0] == NO_THREAD
    return no_thread or isinstance(error, MemoryError)


def text_of(value: Any) -> str:
    if type(value) is not str:
        raise ViolationError("no text")
    return value


_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, object, type),
        *(slice, type(None), enumerate, zip, map, filter, reversed, memoryview),
        *(collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter),
        *(collections.UserList, collections.UserDict, collections.UserString),
        *(fractions.Fraction, decimal.Decimal, datetime.date, datetime.datetime, datetime.time, datetime.timedelta),
    )
}
_TYPE_NAMES = {kind: name for name, kind in _TYPES.items()}


def _arguments(value: Any) -> list[Any]:
    return list(value.__reduce_ex__(4)[1])


# Values that never change: tag, and from and to a list of others.
_VALUES: dict[type, tuple[str, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    int: ("i", lambda value: [format(value, "x")], lambda parts: int(parts[0], 16)),
    float: ("f", lambda value: [value.hex()], lambda parts: float.fromhex(parts[0])),
    complex: ("c", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    bytes: ("b", lambda value: [value.hex()], lambda parts: bytes.fromhex(parts[0])),
    uuid.UUID: ("uuid", lambda value: [str(value)], lambda parts: uuid.UUID(text_of(parts[0]))),
    type(Ellipsis): ("...", lambda _: [], lambda _: Ellipsis),
    type(NotImplemented): ("ni", lambda _: [], lambda _: NotImplemented),
    type: ("T", lambda value: [_TYPE_NAMES[value]], lambda parts: _TYPES[text_of(parts[0])]),
    tuple: ("t", list, tuple),
    frozenset: ("F", list, frozenset),
    type({}.keys()): ("keys", list, lambda items: dict.fromkeys(items).keys()),
    type({}.values()): ("values", list, lambda items: dict(enumerate(items)).values()),
    type({}.items()): ("items", list, lambda items: dict(items).items()),
}
for _kind in (
    *(range, slice, fractions.Fraction, decimal.Decimal, pathlib.PosixPath),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
):
    _VALUES[_kind] = (_kind.__name__, _arguments, lambda parts, kind=_kind: kind(*parts))  # type: ignore[misc]


def _pairs(value: Any) -> list[Any]:
    return [part for pair in dict.items(value) for part in pair]


def _fill(value: Any, parts: list[Any]) -> None:
    if isinstance(value, dict):
        value.clear()
        if isinstance(value, collections.defaultdict):
            value.default_factory, *parts = parts
        for key, part in zip(parts[::2], parts[1::2], strict=True):
            value[key] = part
    elif isinstance(value, set):
        value.clear()
        value.update(parts)
    elif isinstance(value, collections.UserList | collections.UserDict):
        [value.data] = parts
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(parts[1:])
    elif isinstance(value, list | bytearray):
        value[:] = parts if isinstance(value, list) else parts[0]
    else:
        new = _new_array(parts)
        if value.shape != new.shape or value.dtype != new.dtype:
            raise ViolationError("an array of another shape")
        value[...] = new


def _new_array(parts: list[Any]) -> Any:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        raise ViolationError("numpy is not loaded")
    kind = numpy.dtype(text_of(parts[0]))
    if kind.kind not in _NUMPY_KINDS:
        raise ViolationError("an array of objects")
    return numpy.frombuffer(parts[2], kind).reshape(parts[1]).copy()


_Container = tuple[str, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]
# Containers that can change: tag, contents as a list of values, and a new one from what was written of its contents.
_CONTAINERS: dict[type, _Container] = {
    list: ("l", list, lambda _: []),
    dict: ("d", _pairs, lambda _: {}),
    set: ("s", list, lambda _: set()),
    bytearray: ("B", lambda value: [bytes(value)], lambda _: bytearray()),
    collections.OrderedDict: ("od", _pairs, lambda _: collections.OrderedDict()),
    collections.Counter: ("ct", _pairs, lambda _: collections.Counter()),
    collections.defaultdict: ("dd", lambda v: [v.default_factory, *_pairs(v)], lambda _: collections.defaultdict()),
    collections.deque: ("dq", lambda value: [value.maxlen, *value], lambda parts: collections.deque(maxlen=parts[0])),
    collections.UserList: ("ul", lambda value: [value.data], lambda _: collections.UserList()),
    collections.UserDict: ("ud", lambda value: [value.data], lambda _: collections.UserDict()),
}
_ARRAY: _Container = (
    *("n", lambda value: [value.dtype.str, value.shape, value.tobytes()]),
    lambda parts: _new_array([parts[0], parts[1][1], bytes.fromhex(parts[2][1][0])]),
)
_READ_VALUE = {tag: read for tag, _, read in _VALUES.values()}
_READ_CONTAINER = {row[0]: row for row in (*_CONTAINERS.values(), _ARRAY)}


def may_be_data(kind: type) -> bool:
    """Whether an object that is of this class may cross by value."""
    return any(issubclass(one, kind) for one in (*_TYPE_NAMES, *_VALUES, *_CONTAINERS))


def find_by_name(module: Any, name: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def exception_class(kind: type) -> type[BaseException] | None:
    module = str(kind.__module__)
    known = module.partition(".")[0] in sys.stdlib_module_names and issubclass(kind, BaseException)
    return kind if known and find_by_name(module, kind.__qualname__) is kind else None


class Codec:
    """One side's view of the values that cross. The sides number their twins in twos, one from 0, the other from 1."""

    own_copies = False
    """Whether this side's containers stay as they are when the other side changes them: it then has new ones."""
    forgets = False  # whether it lets go of twins, and says so with each message
    opaque: Callable[[Any], Json]  # what a value that is no data crosses as
    from_opaque: Callable[[Any, list[Any]], Any]

    def __init__(self, first: int) -> None:
        self._parity = self._next = first
        self._twins: dict[int, list[Any]] = {}  # by number: the object, its parts when it last crossed, its container
        self._numbers: dict[int, int] = {}
        self._written: set[int] = set()
        self.changed = False  # whether the other side has changed a container of this side

    def pack(self, value: Any) -> Json:
        """Encode a value, with whatever twins have changed since the last message, and those to forget."""
        forgotten = self._forgotten() if self.forgets else []
        self._written = set()
        payload = self.encode(value)
        changed = [n for n in list(self._twins) if n not in self._written and self._differs(n)]
        return [payload, [self._full(number) for number in changed], forgotten]

    def encode(self, value: Any) -> Json:
        kind = type(value)
        if value is None or kind is bool or kind is str or (kind is int and -(2**53) < value < 2**53):
            return value
        numpy: Any = sys.modules.get("numpy")
        array = numpy is not None and kind is numpy.ndarray and value.dtype.kind in _NUMPY_KINDS
        row = _ARRAY if array else _CONTAINERS.get(kind)
        if row is not None:
            number = self._numbers.get(id(value))
            if number is None:
                number = self._next
                self._next = self._next + 2
                self._keep(number, value, row)
            elif number in self._written or not self._differs(number):
                return ["=", number]
            return self._full(number)
        if kind is type and value not in _TYPE_NAMES:
            return self.opaque(value)
        zone = getattr(value, "tzinfo", None) if kind in (datetime.datetime, datetime.time) else None
        if kind in _VALUES and type(zone) in (type(None), datetime.timezone):
            tag, parts, _ = _VALUES[kind]
            return [tag, [self.encode(part) for part in parts(value)]]
        scalar = numpy is not None and kind.__module__ == "numpy" and isinstance(value, numpy.generic)
        if scalar and value.dtype.kind in _NUMPY_KINDS:
            return ["n0", [value.dtype.str, value.tobytes().hex()]]
        return self.opaque(value)

    def _full(self, number: int) -> Json:
        self._written.add(number)
        value, _, (tag, parts, _) = twin = self._twins[number]
        twin[1] = parts(value)
        return [tag, number, [self.encode(part) for part in twin[1]]]

    def _differs(self, number: int) -> bool:
        value, before, (tag, parts, _) = self._twins[number]
        now = parts(value)
        if tag in ("n", "B"):
            return bool(now != before)
        return len(now) != len(before) or not all(map(operator.is_, now, before))

    def _keep(self, number: int, value: Any, row: _Container) -> None:
        self._twins[number] = [value, (), row]
        self._numbers[id(value)] = number

    def unpack(self, message: Json) -> Any:
        try:
            payload, changes, forgotten = message
            for number in forgotten:
                self._forget(number)
            value = self.decode(payload)
            for change in changes:
                self.decode(change)
        except _NO_VALUE as error:
            raise ViolationError("a message holds no value") from error
        return value

    def decode(self, encoded: Json) -> Any:
        if encoded is None or type(encoded) in (bool, int, float, str):
            return encoded
        tag, *parts = encoded
        if tag == "=":
            return self._twins[parts[0]][0]
        if tag in _READ_VALUE:
            return _READ_VALUE[tag]([self.decode(part) for part in parts[0]])
        if tag in _READ_CONTAINER:
            return self._read_container(tag, *parts)
        if tag == "n0":
            return _new_array([parts[0][0], [1], bytes.fromhex(parts[0][1])])[0]
        if tag == "x":  # of the standard library, if it is loaded: nothing is imported because a message says so
            module, name, arguments = parts
            kind = find_by_name(text_of(module), text_of(name))
            known = isinstance(kind, type) and exception_class(kind) and module.partition(".")[0] not in _RUNNERS
            return made_exception(kind if known else Exception, [self.decode(argument) for argument in arguments])
        return self.from_opaque(tag, parts)

    def _read_container(self, tag: str, number: Any, encoded: Any) -> Any:
        row = _READ_CONTAINER[tag]
        value = row[2](encoded)
        if type(number) is not int or number < 0:
            raise ViolationError("no number")
        own = number % 2 == self._parity
        if number not in self._twins:
            if own:
                raise ViolationError("a number of this side")
            self._keep(number, value, row)
        elif type(self._twins[number][0]) is not type(value):
            raise ViolationError("a container of another type")
        else:
            self.changed = self.changed or own
            if own and self.own_copies:
                self._forget(number)
                self._keep(number, value, row)
            value = self._twins[number][0]
        _fill(value, [self.decode(part) for part in encoded])
        self._twins[number][1] = row[1](value)
        return value

    def _forget(self, number: int) -> None:
        del self._numbers[id(self._twins.pop(number)[0])]

    def _forgotten(self) -> list[int]:
        """Let go of the twins that nothing on this side refers to any more, and name them."""
        unused = [number for number, references in _references(self._twins) if references <= _OF_THE_TABLE]
        gone = [number for number in unused if not self._differs(number)]  # else it has to be sent yet
        for number in gone:
            self._forget(number)
        return gone


def _references(twins: dict[int, list[Any]]) -> list[tuple[int, int]]:
    return [(number, sys.getrefcount(twin[0])) for number, twin in twins.items()]


# A list or a dict takes no weak reference, and to keep them all makes each message as long as all before it. How many
# references the table and the look at it hold differs between releases of Python, so it is measured.
[(_, _OF_THE_TABLE)] = _references({0: [object()]})


def made_exception(kind: Any, parts: list[Any]) -> Any:
    """An exception with this cause and these arguments, even if its class takes others."""
    cause, *arguments = parts or [None]
    new = kind.__new__  # a class of the solution is not called: that would make another object there
    try:
        value = new(kind, *arguments)
        if exception_class(kind) is not None:
            value.__init__(*arguments)
    except (TypeError, ValueError, AttributeError):
        value = new(kind)
        value.args = tuple(arguments)
    if cause is not None:
        value.__cause__ = cause
    return value


class Conversation(Codec):
    """One side of the conversation: it asks the other to do something, and does meanwhile what that one asks for."""

    fatal: tuple[type[BaseException], ...] = (ClosedError,)  # what ends the conversation instead of being an answer
    perform: Callable[..., Any]  # does what the other side asks for

    def __init__(self, first: int, incoming: int, outgoing: int) -> None:
        super().__init__(first)
        self._incoming = Connection(incoming, writable=False)
        self._outgoing = Connection(outgoing, readable=False)
        self._lock = threading.RLock()
        self.received = 0

    def news(self) -> Any:
        """What goes with each message, or None."""

    def take_note(self, news: Any) -> None:
        """Take note of the other side's news."""

    def request(self, what: str, *arguments: Any) -> Any:
        with self._lock:
            self._send("do", (what, *arguments))
            while True:
                kind, packed, news = self._receive()
                if kind == "do":
                    self.answer(packed, news)
                    continue
                value = self.unpack(packed)
                self.take_note(None if news is None else self.unpack(news))
                if kind == "ok":
                    return value
                if kind != "no" or not isinstance(value, BaseException):
                    raise ViolationError("a message of another shape")
                raise value

    def answer(self, packed: Json, news: Json) -> None:
        try:
            question = self.unpack(packed)
            self.take_note(None if news is None else self.unpack(news))
            kind = "ok"
            value = self.perform(*question)
        except self.fatal:
            raise
        except BaseException as error:  # what was asked for may raise anything, which is the answer
            kind = "no"
            value = error
        try:
            self._send(kind, value)
        except ClosedError:
            raise
        except BaseException as error:  # a value of the solution's may do anything while it is written down
            known = type(error) if isinstance(error, MemoryError | RecursionError) else ValueError
            self._send("no", known("a value could not be handed over"))

    def _send(self, kind: str, value: Any) -> None:
        packed = self.pack(value)
        news = self.news()
        data = json.dumps([kind, packed, None if news is None else self.pack(news)]).encode("ascii")
        if len(data) > MAX_MESSAGE:
            raise TooLongError("a value is too long to be handed over")
        try:
            self._outgoing.send_bytes(data)
        except OSError as error:
            raise ClosedError(str(error)) from error

    def _receive(self) -> tuple[Any, Any, Any]:
        try:
            data = self._incoming.recv_bytes(MAX_MESSAGE)
        except (EOFError, OSError) as error:
            raise ClosedError(str(error)) from error
        self.received += len(data) + 4
        try:
            kind, packed, news = json.loads(data)
        except (ValueError, TypeError, RecursionError) as error:
            raise ViolationError("a message of another shape") from error
        return kind, packed, news
