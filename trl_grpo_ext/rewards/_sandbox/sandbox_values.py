"""Comparing what an untrusted process says a value is with the value it should be."""

from __future__ import annotations

from typing import Any

_MAX_ITEMS = 1000


def equal(encoded: Any, expected: Any) -> bool:
    """Whether an encoded value (`sandbox_child.encoded_value`) equals a literal, as Python's `==` would have it.

    The encoded value is hostile. It is followed only as far as the literal goes, and only the literal's own elements
    enter sets, so neither its depth nor its hashes cost more than its length.
    """
    try:
        return _equal(encoded, expected)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError, RecursionError):
        return False  # it is no encoded value


def _equal(encoded: Any, expected: Any) -> bool:
    kind, items = encoded[0], encoded[-1]
    if isinstance(expected, list | tuple):
        if kind != ("l" if isinstance(expected, list) else "t") or len(items) != len(expected):
            return False
        return all(_equal(item, value) for item, value in zip(items, expected, strict=True))
    if isinstance(expected, set | frozenset):
        if kind != "e" or len(items) != len(expected):
            return False
        return {item for item in map(_decoded, items) if item in expected} == expected
    if isinstance(expected, dict):
        if kind != "d" or len(items) != len(expected):
            return False
        found = set()
        for key, value in ((_decoded(key), value) for key, value in items):
            if key not in expected or not _equal(value, expected[key]):
                return False
            found.add(key)
        return len(found) == len(expected)
    return bool(kind in "cifzsb" and _decoded(encoded) == expected)


def _decoded(encoded: Any) -> Any:
    """A value that can be an element of a set, or a key."""
    kind = encoded[0]
    if kind == "c":
        if encoded[1] is None or isinstance(encoded[1], bool):
            return encoded[1]
    elif kind == "i":
        return int(encoded[1], 16)
    elif kind == "f":
        return float.fromhex(encoded[1])
    elif kind == "z":
        return complex(float.fromhex(encoded[1]), float.fromhex(encoded[2]))
    elif kind == "s":
        if isinstance(encoded[1], str):
            return encoded[1]
    elif kind == "b":
        return bytes.fromhex(encoded[1])
    elif kind == "t":
        return tuple(map(_decoded, encoded[1]))
    elif kind == "e" and len(encoded[1]) <= _MAX_ITEMS:
        return frozenset(map(_decoded, encoded[1]))
    raise ValueError(kind)
