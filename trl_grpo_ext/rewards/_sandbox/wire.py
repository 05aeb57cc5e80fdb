"""Messages between the process that runs the tests and the one that holds the solution: values as data, by exact type.

A message is JSON with its length before it. A value of a plain type is rebuilt on the other side as what it was; a
subclass is not plain. Containers that can change (`list`, `dict`, `set`, ...) have a twin on the other side: each
message brings the twins up to date, and `a is b` stays so. What is not data crosses as whatever a side makes of it
(`Codec.opaque`, `Codec.special`). Nothing here trusts the other side: what is no message raises `ViolationError`.
"""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import json
import operator
import os
import pathlib
import struct
import sys
import types
import uuid
from collections.abc import Callable
from typing import Any

SOLUTION_MODULES = frozenset(
    "solution solutions main submission candidate answer code_solution program my_solution your_solution "  # noqa: SIM905
    "solution_module my_module your_module module task implementation".split()
)
"""Module names from which tests import the solution."""
MAX_MESSAGE = 16 * 2**20
"""Bytes of one message."""
_LENGTH = struct.Struct("!I")
_SMALL = 2**53
_NUMPY_KINDS = "biufcUSMm"
Json = Any

received = 0
"""Bytes that this process has read so far."""


class ViolationError(Exception):
    """Something arrived that is not a message."""


class ClosedError(Exception):
    """The other side has closed."""


def send(descriptor: int, message: Json) -> None:
    """Write one message."""
    data = json.dumps(message).encode("ascii")
    if len(data) > MAX_MESSAGE:
        raise ViolationError("it is too long")
    view = memoryview(_LENGTH.pack(len(data)) + data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        raise ClosedError(str(error)) from error


def receive(descriptor: int) -> Json:
    """Read one message."""
    (length,) = _LENGTH.unpack(_exactly(descriptor, _LENGTH.size))
    if length > MAX_MESSAGE:
        raise ViolationError("a message is too long")
    try:
        return json.loads(_exactly(descriptor, length))
    except (ValueError, RecursionError) as error:
        raise ViolationError("a message is no JSON") from error


def _exactly(descriptor: int, size: int) -> bytes:
    global received
    received += size
    data = bytearray()
    while len(data) < size:
        try:
            piece = os.read(descriptor, min(size - len(data), 2**20))
        except OSError as error:
            raise ClosedError(str(error)) from error
        if not piece:
            raise ClosedError("the end")
        data += piece
    return bytes(data)


# --- plain values ----------------------------------------------------------------------------------------------------

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
_NUMBERED = (Ellipsis, NotImplemented)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ViolationError("no text")
    return value


def _hex(parts: Any) -> list[str]:
    return [format(part, "x") for part in parts]


def _ints(parts: Any) -> list[int]:
    return [int(part, 16) for part in parts]


def _iso(value: Any) -> list[Any] | None:
    zone = value.tzinfo
    return [value.isoformat(), value.fold] if zone is None or type(zone) is datetime.timezone else None


# Values written as text or numbers: type, tag, writing, reading.
_SCALARS: list[tuple[type, str, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (int, "i", lambda value: format(value, "x"), lambda text: int(text, 16)),
    (float, "f", float.hex, float.fromhex),
    (complex, "c", lambda value: [value.real.hex(), value.imag.hex()], lambda p: complex(*map(float.fromhex, p))),
    (bytes, "b", bytes.hex, bytes.fromhex),
    (range, "r", lambda value: _hex((value.start, value.stop, value.step)), lambda parts: range(*_ints(parts))),
    (
        *(fractions.Fraction, "q", lambda value: _hex((value.numerator, value.denominator))),
        lambda parts: fractions.Fraction(*_ints(parts)),
    ),
    (decimal.Decimal, "D", str, lambda text: decimal.Decimal(_text(text))),
    (datetime.date, "date", datetime.date.isoformat, datetime.date.fromisoformat),
    (datetime.datetime, "datetime", _iso, lambda p: datetime.datetime.fromisoformat(p[0]).replace(fold=p[1])),
    (datetime.time, "time", _iso, lambda p: datetime.time.fromisoformat(p[0]).replace(fold=p[1])),
    (
        *(datetime.timedelta, "delta", lambda value: [value.days, value.seconds, value.microseconds]),
        lambda parts: datetime.timedelta(*parts),
    ),
    (
        *(datetime.timezone, "zone", lambda value: value.utcoffset(None).total_seconds()),
        lambda seconds: datetime.timezone(datetime.timedelta(seconds=seconds)),
    ),
    (uuid.UUID, "uuid", lambda value: value.hex, lambda text: uuid.UUID(_text(text))),
    (pathlib.PosixPath, "path", str, lambda text: pathlib.PosixPath(_text(text))),
    (type(Ellipsis), "e", lambda value: 0, lambda index: _NUMBERED[index]),
    (type(NotImplemented), "e", lambda value: 1, lambda index: _NUMBERED[index]),
]
# Values made of others that never change: the same, from and to a list of them.
_VALUES: list[tuple[type, str, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = [
    (tuple, "t", list, tuple),
    (frozenset, "F", list, frozenset),
    (slice, "slice", lambda value: [value.start, value.stop, value.step], lambda parts: slice(*parts)),
    (type({}.keys()), "keys", list, lambda items: dict.fromkeys(items).keys()),
    (type({}.values()), "values", list, lambda items: dict(enumerate(items)).values()),
    (type({}.items()), "items", list, lambda items: dict(items).items()),
    (
        *(collections.UserString, "ustring", lambda value: [value.data]),
        lambda parts: collections.UserString(_text(parts[0])),
    ),
]
_WRITE_SCALAR = {kind: (tag, write) for kind, tag, write, _ in _SCALARS}
_READ_SCALAR: dict[str, Callable[[Any], Any]] = {tag: read for _, tag, _, read in _SCALARS}
_READ_SCALAR["T"] = lambda name: _TYPES[name]
_WRITE_VALUE = {kind: (tag, parts) for kind, tag, parts, _ in _VALUES}
_READ_VALUE = {tag: read for _, tag, _, read in _VALUES}


def _pairs(value: Any) -> list[Any]:
    return [part for pair in dict.items(value) for part in pair]


def _fill_slice(value: Any, parts: list[Any]) -> None:
    value[:] = parts


def _fill_bytes(value: Any, parts: list[Any]) -> None:
    value[:] = parts[0]


def _fill_set(value: Any, parts: list[Any]) -> None:
    value.clear()
    value.update(parts)


def _fill_dict(value: Any, parts: list[Any]) -> None:
    value.clear()
    for key, part in zip(parts[::2], parts[1::2], strict=True):
        value[key] = part


def _fill_default(value: Any, parts: list[Any]) -> None:
    value.default_factory = parts[0]
    _fill_dict(value, parts[1:])


def _fill_rest(value: Any, parts: list[Any]) -> None:
    while value:
        value.pop()
    value.extend(parts[1:])


def _fill_user(value: Any, parts: list[Any]) -> None:
    value.data = parts[0]


def _fill_namespace(value: Any, parts: list[Any]) -> None:
    _fill_dict(vars(value), [_text(part) if number % 2 == 0 else part for number, part in enumerate(parts)])


# Containers that can change: tag, its contents as a list of values, and back into one that is there.
_CONTAINERS: dict[type, tuple[str, Callable[[Any], list[Any]], Callable[[Any, list[Any]], None]]] = {
    list: ("l", list, _fill_slice),
    dict: ("d", _pairs, _fill_dict),
    set: ("s", list, _fill_set),
    bytearray: ("B", lambda value: [bytes(value)], _fill_bytes),
    collections.OrderedDict: ("od", _pairs, _fill_dict),
    collections.Counter: ("ct", _pairs, _fill_dict),
    collections.defaultdict: ("dd", lambda value: [value.default_factory, *_pairs(value)], _fill_default),
    collections.deque: ("dq", lambda value: [value.maxlen, *value], _fill_rest),
    collections.UserList: ("ul", lambda value: [value.data], _fill_user),
    collections.UserDict: ("ud", lambda value: [value.data], _fill_user),
    array.array: ("ar", lambda value: [value.typecode, *value], _fill_rest),
    types.SimpleNamespace: ("ns", lambda value: _pairs(vars(value)), _fill_namespace),
}
_TAGS = {tag: (kind, fill) for kind, (tag, _, fill) in _CONTAINERS.items()}


class Codec:
    """One side's view of the values that cross.

    Args:
        first: The number of its first twin: the sides count in twos, one from 0, the other from 1.
    """

    own_copies = False
    """Whether this side's containers stay as they are when the other side changes them: it then has new ones."""

    def __init__(self, first: int) -> None:
        self._parity = self._next = first
        self._twins: dict[int, list[Any]] = {}  # by number: the object, and its parts when it last crossed
        self._numbers: dict[int, int] = {}
        self._written: set[int] = set()
        self.changed = False  # whether the other side has changed a container of this side

    def opaque(self, value: Any) -> Json:
        """Encode a value that is not data."""
        raise NotImplementedError

    def special(self, tag: Any, parts: list[Any]) -> Any:
        """Decode what `opaque` of the other side has written."""
        raise NotImplementedError

    # Writing.

    def pack(self, value: Any) -> Json:
        """Encode a value, with whatever twins have changed since the last message."""
        self._written = set()
        payload = self.encode(value)
        changes = [
            self._full(number, twin[0])
            for number, twin in list(self._twins.items())
            if number not in self._written and self._differs(twin)
        ]
        return [payload, changes]

    def encode(self, value: Any) -> Json:
        """Encode a value as part of the message that is being packed."""
        kind = type(value)
        if value is None or kind is bool or kind is str or (kind is int and -_SMALL < value < _SMALL):
            return value
        if kind in _CONTAINERS:
            return self._container(value)
        if kind in _WRITE_SCALAR:
            tag, write = _WRITE_SCALAR[kind]
            written = write(value)
            return self.opaque(value) if written is None else [tag, written]
        if kind in _WRITE_VALUE:
            tag, parts = _WRITE_VALUE[kind]
            return [tag, [self.encode(part) for part in parts(value)]]
        if kind is type and value in _TYPE_NAMES:
            return ["T", _TYPE_NAMES[value]]
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind.__module__ == "numpy":
            if kind is numpy.ndarray and value.dtype.kind in _NUMPY_KINDS:
                return self._container(value)
            if issubclass(kind, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
                return ["n0", value.dtype.str, value.tobytes().hex()]
        return self.opaque(value)

    def _container(self, value: Any) -> Json:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._next
            self._next += 2
            self._keep(number, value)
        elif number in self._written or not self._differs(self._twins[number]):
            return ["=", number]
        return self._full(number, value)

    def _full(self, number: int, value: Any) -> Json:
        self._written.add(number)
        parts = self._twins[number][1] = _parts(value)
        if type(value) not in _CONTAINERS:
            return ["n", number, value.dtype.str, list(value.shape), parts[0].hex()]
        return [_CONTAINERS[type(value)][0], number, [self.encode(part) for part in parts]]

    @staticmethod
    def _differs(twin: list[Any]) -> bool:
        parts, before = _parts(twin[0]), twin[1]
        if type(twin[0]) is bytearray or type(twin[0]) not in _CONTAINERS:
            return bool(parts != before)
        return len(parts) != len(before) or not all(map(operator.is_, parts, before))

    def _keep(self, number: int, value: Any) -> None:
        self._twins[number] = [value, ()]
        self._numbers[id(value)] = number

    # Reading.

    def unpack(self, message: Json) -> Any:
        """Decode a message, and bring the twins that it speaks of up to date."""
        try:
            payload, changes = message
            value = self.decode(payload)
            for change in changes:
                self.decode(change)
        except (
            *(TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError, ArithmeticError),
            *(RecursionError, AssertionError),
        ) as error:
            raise ViolationError("a message holds no value") from error
        return value

    def decode(self, encoded: Json) -> Any:
        """Decode a part of a message."""
        if encoded is None or type(encoded) in (bool, int, float, str):
            return encoded
        tag, *parts = encoded
        if tag == "=":
            return self._twins[parts[0]][0]
        if tag in _READ_SCALAR:
            return _READ_SCALAR[tag](parts[0])
        if tag in _READ_VALUE:
            return _READ_VALUE[tag]([self.decode(part) for part in parts[0]])
        if tag in _TAGS:
            return self._read_container(tag, parts[0], parts[1])
        if tag in ("n", "n0"):
            return self._read_numpy(tag, parts)
        return self.special(tag, parts)

    def _read_container(self, tag: str, number: Any, encoded: Any) -> Any:
        kind, fill = _TAGS[tag]
        if tag == "dq":
            new: Any = collections.deque(maxlen=self.decode(encoded[0]))
        else:
            new = array.array(encoded[0]) if tag == "ar" else kind()
        value = self._known(number, new)
        fill(value, [self.decode(part) for part in encoded])
        self._twins[number][1] = _parts(value)
        return value

    def _read_numpy(self, tag: str, parts: Any) -> Any:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            raise ViolationError("numpy is not loaded")
        kind = numpy.dtype(_text(parts[0 if tag == "n0" else 1]))
        if kind.kind not in _NUMPY_KINDS:
            raise ViolationError("an array of objects")
        if tag == "n0":
            return numpy.frombuffer(bytes.fromhex(parts[1]), kind)[0]
        number, _, shape, data = parts
        new = numpy.frombuffer(bytes.fromhex(data), kind).reshape([int(n) for n in shape]).copy()
        value = self._known(number, new)
        if value is not new:
            if value.shape != new.shape or value.dtype != new.dtype:
                raise ViolationError("an array of another shape")
            value[...] = new
        self._twins[number][1] = _parts(value)
        return value

    def _known(self, number: Any, new: Any) -> Any:
        """The container of this number that is to be filled: the one that is there, or the new one."""
        if type(number) is not int:
            raise ViolationError("no number")
        twin, own = self._twins.get(number), number % 2 == self._parity % 2
        if twin is None:
            if number < 0 or own:
                raise ViolationError("a number of this side")
        elif type(twin[0]) is not type(new):
            raise ViolationError("a container of another type")
        else:
            self.changed = self.changed or own
            if not (own and self.own_copies):
                return twin[0]
            self.forget(number)
        self._keep(number, new)
        return new

    # Forgetting.

    def forget(self, number: int) -> None:
        """Let go of a twin."""
        del self._numbers[id(self._twins.pop(number)[0])]

    def forgotten(self) -> list[int]:
        """Let go of the twins that nothing on this side refers to any more, and name them."""
        # Referred to by the table's entry, by the loop's variables and by getrefcount's argument.
        unused = [number for number, twin in self._twins.items() if sys.getrefcount(twin[0]) <= 2]
        gone = [number for number in unused if not self._differs(self._twins[number])]  # else it has to be sent yet
        for number in gone:
            self.forget(number)
        return gone


def _parts(value: Any) -> Any:
    return _CONTAINERS[type(value)][1](value) if type(value) in _CONTAINERS else [value.tobytes()]
