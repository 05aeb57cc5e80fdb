"""Messages between the process that runs the tests and the one that holds the solution: values as data, by exact type.

A message is JSON with its length before it. A value of a plain type is rebuilt on the other side as what it was; a
subclass is not plain. Containers that can change (`list`, `dict`, `set`, ...) have a twin on the other side: each
message brings the twins' contents up to date, so that what a function does to its arguments is seen by its caller, and
`a is b` stays so. What is not data crosses as whatever a side makes of it (`Codec.opaque`, `Codec.special`).

Nothing here trusts the other side: what is not a message raises `ViolationError`.
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
    """Write one message.

    Raises:
        ViolationError: It is too long.
        ClosedError: Nobody reads.
    """
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
    """Read one message.

    Raises:
        ViolationError: It is none.
        ClosedError: There is no more.
    """
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


def _iso(value: Any) -> list[Any] | None:
    zone = value.tzinfo
    return [value.isoformat(), value.fold] if zone is None or type(zone) is datetime.timezone else None


_SCALARS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    int: ("i", lambda value: format(value, "x")),
    float: ("f", float.hex),
    complex: ("c", lambda value: [value.real.hex(), value.imag.hex()]),
    bytes: ("b", bytes.hex),
    range: ("r", lambda value: [format(part, "x") for part in (value.start, value.stop, value.step)]),
    fractions.Fraction: ("q", lambda value: [format(part, "x") for part in (value.numerator, value.denominator)]),
    decimal.Decimal: ("D", str),
    datetime.date: ("date", datetime.date.isoformat),
    datetime.datetime: ("datetime", _iso),
    datetime.time: ("time", _iso),
    datetime.timedelta: ("delta", lambda value: [value.days, value.seconds, value.microseconds]),
    datetime.timezone: ("zone", lambda value: value.utcoffset(None).total_seconds()),
    uuid.UUID: ("uuid", lambda value: value.hex),
    pathlib.PosixPath: ("path", str),
    type(Ellipsis): ("e", lambda value: 0),
    type(NotImplemented): ("e", lambda value: 1),
}


def _ints(parts: Any) -> list[int]:
    return [int(part, 16) for part in parts]


_SCALARS_BACK: dict[str, Callable[[Any], Any]] = {
    "i": lambda text: int(text, 16),
    "f": float.fromhex,
    "c": lambda parts: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
    "b": bytes.fromhex,
    "r": lambda parts: range(*_ints(parts)),
    "q": lambda parts: fractions.Fraction(*_ints(parts)),
    "D": lambda text: decimal.Decimal(_text(text)),
    "date": datetime.date.fromisoformat,
    "datetime": lambda parts: datetime.datetime.fromisoformat(parts[0]).replace(fold=parts[1]),
    "time": lambda parts: datetime.time.fromisoformat(parts[0]).replace(fold=parts[1]),
    "delta": lambda parts: datetime.timedelta(*parts),
    "zone": lambda seconds: datetime.timezone(datetime.timedelta(seconds=seconds)),
    "uuid": lambda text: uuid.UUID(_text(text)),
    "path": lambda text: pathlib.PosixPath(_text(text)),
    "e": lambda index: _NUMBERED[index],
    "T": lambda name: _TYPES[name],
}


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ViolationError("no text")
    return value


# What is made of other values, and never changes.
_VALUES: dict[type, tuple[str, Callable[[Any], list[Any]]]] = {
    tuple: ("t", list),
    frozenset: ("F", list),
    slice: ("slice", lambda value: [value.start, value.stop, value.step]),
    type({}.keys()): ("keys", list),
    type({}.values()): ("values", list),
    type({}.items()): ("items", list),
    collections.UserString: ("ustring", lambda value: [value.data]),
}
_VALUES_BACK: dict[str, Callable[[list[Any]], Any]] = {
    "t": tuple,
    "F": frozenset,
    "slice": lambda parts: slice(*parts),
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "items": lambda items: dict(items).items(),
    "ustring": lambda parts: collections.UserString(_text(parts[0])),
}


class _Kind:
    """A type of containers that can change: its contents as a list of values, and back into one that is there."""

    def __init__(self, tag: str, new: Callable[[], Any], parts: Callable[[Any], Any], fill: Callable[..., None]):
        self.tag, self.new, self.parts, self.fill = tag, new, parts, fill


def _pairs(value: Any) -> list[Any]:
    return [part for pair in dict.items(value) for part in pair]


def _fill_list(value: Any, parts: list[Any]) -> None:
    value[:] = parts


def _fill_set(value: Any, parts: list[Any]) -> None:
    value.clear()
    value.update(parts)


def _fill_dict(value: Any, parts: list[Any]) -> None:
    items = dict(zip(parts[::2], parts[1::2], strict=True))
    dict.clear(value)
    dict.update(value, items)


def _fill_default(value: Any, parts: list[Any]) -> None:
    value.default_factory = parts[0]
    _fill_dict(value, parts[1:])


def _fill_ordered(value: Any, parts: list[Any]) -> None:
    value.clear()
    for key, part in zip(parts[::2], parts[1::2], strict=True):
        value[key] = part


def _fill_deque(value: Any, parts: list[Any]) -> None:
    value.clear()
    value.extend(parts[1:])


def _fill_bytes(value: Any, parts: list[Any]) -> None:
    value[:] = parts[0]


def _fill_user(value: Any, parts: list[Any]) -> None:
    value.data = parts[0]


def _fill_array(value: Any, parts: list[Any]) -> None:
    del value[:]
    value.extend(parts[1:])


def _fill_namespace(value: Any, parts: list[Any]) -> None:
    vars(value).clear()
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        vars(value)[_text(name)] = part


_CONTAINERS: dict[type, _Kind] = {
    list: _Kind("l", list, list, _fill_list),
    dict: _Kind("d", dict, _pairs, _fill_dict),
    set: _Kind("s", set, list, _fill_set),
    bytearray: _Kind("B", bytearray, lambda value: [bytes(value)], _fill_bytes),
    collections.OrderedDict: _Kind("od", collections.OrderedDict, _pairs, _fill_ordered),
    collections.Counter: _Kind("ct", collections.Counter, _pairs, _fill_dict),
    collections.defaultdict: _Kind(
        "dd", collections.defaultdict, lambda value: [value.default_factory, *_pairs(value)], _fill_default
    ),
    collections.deque: _Kind("dq", collections.deque, lambda value: [value.maxlen, *value], _fill_deque),
    collections.UserList: _Kind("ul", collections.UserList, lambda value: [value.data], _fill_user),
    collections.UserDict: _Kind("ud", collections.UserDict, lambda value: [value.data], _fill_user),
    array.array: _Kind("ar", lambda: array.array("b"), lambda value: [value.typecode, *value], _fill_array),
    types.SimpleNamespace: _Kind(
        "ns",
        types.SimpleNamespace,
        lambda value: [part for pair in vars(value).items() for part in pair],
        _fill_namespace,
    ),
}
_TAGS = {kind.tag: (python, kind) for python, kind in _CONTAINERS.items()}


class Codec:
    """One side's view of the values that cross.

    Args:
        first: The number of its first twin: the sides count in twos, one from 0, the other from 1.
    """

    def __init__(self, first: int) -> None:
        self._parity = first
        self._next = first
        # By number: the object, what its parts were when it last crossed, and what this side had sent, where the other
        # side has changed it since.
        self._twins: dict[int, list[Any]] = {}
        self._numbers: dict[int, int] = {}
        self._written: set[int] = set()

    # What a side has to say about values that are no data.

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
            self._full(number, twin[0], _CONTAINERS.get(type(twin[0])))
            for number, twin in list(self._twins.items())
            if number not in self._written and self._changed(twin)
        ]
        return [payload, changes]

    def encode(self, value: Any) -> Json:
        """Encode a value as part of the message that is being packed."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int and -_SMALL < value < _SMALL:
            return value
        container = _CONTAINERS.get(kind)
        if container is not None:
            return self._container(value, container)
        if kind in _SCALARS:
            tag, write = _SCALARS[kind]
            written = write(value)
            return self.opaque(value) if written is None else [tag, written]
        if kind in _VALUES:
            tag, parts = _VALUES[kind]
            return [tag, [self.encode(part) for part in parts(value)]]
        if kind is type and value in _TYPE_NAMES:
            return ["T", _TYPE_NAMES[value]]
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind.__module__ == "numpy":
            if kind is numpy.ndarray and value.dtype.kind in _NUMPY_KINDS:
                return self._container(value, None)
            if issubclass(kind, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
                return ["n0", value.dtype.str, value.tobytes().hex()]
        return self.opaque(value)

    def _container(self, value: Any, kind: _Kind | None) -> Json:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._next
            self._next += 2
            self._keep(number, value)
        elif number in self._written or not self._changed(self._twins[number]):
            return ["=", number]
        return self._full(number, value, kind)

    def _full(self, number: int, value: Any, kind: _Kind | None) -> Json:
        self._written.add(number)
        parts = _parts(value)
        self._twins[number][1:] = parts, parts
        if kind is None:
            return ["n", number, value.dtype.str, list(value.shape), parts[0].hex()]
        return [kind.tag, number, [self.encode(part) for part in parts]]

    @staticmethod
    def _changed(twin: list[Any]) -> bool:
        parts, before = _parts(twin[0]), twin[1]
        if type(twin[0]) is bytearray or type(twin[0]) not in _CONTAINERS:
            return bool(parts != before)
        return len(parts) != len(before) or not all(map(operator.is_, parts, before))

    def _keep(self, number: int, value: Any) -> None:
        self._twins[number] = [value, (), None]
        self._numbers[id(value)] = number

    # Reading.

    def unpack(self, message: Json) -> Any:
        """Decode a message, and bring the twins that it speaks of up to date.

        Raises:
            ViolationError: It is none.
        """
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
        if tag in _SCALARS_BACK:
            return _SCALARS_BACK[tag](parts[0])
        if tag in _VALUES_BACK:
            return _VALUES_BACK[tag]([self.decode(part) for part in parts[0]])
        if tag in _TAGS:
            return self._read_container(tag, parts[0], parts[1])
        if tag in ("n", "n0"):
            return self._read_numpy(tag, parts)
        return self.special(tag, parts)

    def _read_container(self, tag: str, number: Any, encoded: Any) -> Any:
        python, kind = _TAGS[tag]
        if tag == "dq" and number not in self._twins:
            value: Any = collections.deque(maxlen=self.decode(encoded[0]))
        elif tag == "ar" and number not in self._twins:
            value = array.array(encoded[0])
        else:
            value = kind.new()
        value = self._known(number, python, value)
        parts = [self.decode(part) for part in encoded]
        kind.fill(value, parts)
        self._twins[number][1] = _parts(value)
        return value

    def _read_numpy(self, tag: str, parts: Any) -> Any:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            raise ViolationError("numpy is not loaded")
        if tag == "n0":
            return numpy.frombuffer(bytes.fromhex(parts[1]), self._dtype(numpy, parts[0]))[0]
        number, kind, shape, data = parts
        new = numpy.frombuffer(bytes.fromhex(data), self._dtype(numpy, kind)).reshape([int(n) for n in shape]).copy()
        value = self._known(number, numpy.ndarray, new)
        if value is not new:
            if value.shape != new.shape or value.dtype != new.dtype:
                raise ViolationError("an array of another shape")
            value[...] = new
        self._twins[number][1] = _parts(value)
        return value

    @staticmethod
    def _dtype(numpy: Any, text: Any) -> Any:
        kind = numpy.dtype(_text(text))
        if kind.kind not in _NUMPY_KINDS:
            raise ViolationError("an array of objects")
        return kind

    def _known(self, number: Any, python: type, new: Any) -> Any:
        """The container of this number, existing or new."""
        if type(number) is not int:
            raise ViolationError("no number")
        twin = self._twins.get(number)
        if twin is None:
            if number < 0 or number % 2 == self._parity % 2:
                raise ViolationError("a number of this side")
            self._keep(number, new)
            return new
        if type(twin[0]) is not python:
            raise ViolationError("a container of another type")
        return twin[0]

    def as_sent(self, compute: Callable[[], Any]) -> Any:
        """Compute with the contents that this side's containers had before the other side changed them."""
        changed = [
            (twin[0], twin[2], _CONTAINERS[type(twin[0])])
            for twin in self._twins.values()
            if twin[2] is not None and twin[2] is not twin[1] and type(twin[0]) in _CONTAINERS
        ]
        now = [list(kind.parts(value)) for value, _, kind in changed]
        try:
            for value, parts, kind in changed:
                kind.fill(value, list(parts))
            return compute()
        finally:
            for (value, _, kind), parts in zip(changed, now, strict=True):
                kind.fill(value, parts)

    # Forgetting.

    def forget(self, number: int) -> None:
        """Let go of a twin."""
        value, *_ = self._twins.pop(number)
        del self._numbers[id(value)]

    def forgotten(self) -> list[int]:
        """Let go of the twins that nothing on this side refers to any more, and name them."""
        # Referred to by the table's entry, by the loop's variables and by getrefcount's argument.
        unused = [number for number, twin in self._twins.items() if sys.getrefcount(twin[0]) <= 2]
        gone = [number for number in unused if not self._changed(self._twins[number])]  # else it has to be sent yet
        for number in gone:
            self.forget(number)
        return gone


def _parts(value: Any) -> Any:
    kind = _CONTAINERS.get(type(value))
    return [value.tobytes()] if kind is None else kind.parts(value)
