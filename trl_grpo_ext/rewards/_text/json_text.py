"""Finding the JSON in a completion, and reading it without trusting it. Everything here is linear in the text."""

import decimal
import itertools
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .fences import fences

MOST_DIGITS = 1000
EXTRACTS = ("fence", "whole", "last")  # where a completion's JSON may be, see `find_json`

# A string always matches, closed or not, and possessively: there is nothing to go back to.
_STRUCTURE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)

# JSON's grammar in steps: one key and scalar or closing bracket, or up to the next opening bracket.
_SPACE = r"[ \t\n\r]*+"
_STRING = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})[^"\\\x00-\x1f]*+)*+"'
_NUMBER = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"
_VALUE = rf"(?:({_STRING}|{_NUMBER}|true|false|null)|[\[{{])"
_MEMBER = rf"{_STRING}{_SPACE}:{_SPACE}{_VALUE}"
_FIRST = {"{": re.compile(rf"{_SPACE}(?:{_MEMBER}|\}})"), "[": re.compile(rf"{_SPACE}(?:{_VALUE}|\])")}
_NEXT = {"{": re.compile(rf"{_SPACE}(?:,{_SPACE}{_MEMBER}|\}})"), "[": re.compile(rf"{_SPACE}(?:,{_SPACE}{_VALUE}|\])")}
_BEGINS = re.compile(rf'\{{(?={_SPACE}["}}])|\[(?={_SPACE}[\[{{"\]tfn0-9-])')
_VALUE_ENDS = ('"', "}", "]", "true", "false", "null", *"0123456789")


class RefusedError(Exception):
    """JSON that is too deep, or has a number that is too large, to be looked at."""


class AmbiguousError(Exception):
    """JSON that is ambiguous: an object has a key twice."""


def find_json(text: str, extract: str) -> tuple[int, int] | None:
    """Where a completion's JSON begins and ends; None if it has none."""
    if extract == "last":
        return _last_object(text)
    start = 0
    end = len(text)
    if extract == "fence":
        closed = [(label, begin, stop) for label, begin, stop, is_closed in fences(text) if is_closed]
        marked = [block for block in closed if block[0] == "json"] or [block for block in closed if not block[0]]
        if not marked:
            return None
        _, start, end = marked[-1]
    inside = text[start:end]
    start += len(inside) - len(inside.lstrip())
    return (start, start + len(inside.strip())) if inside.strip() else None


def find_short_json(text: str, extract: str, most: int) -> tuple[int, int] | None:
    """Like `find_json`; JSON of more than `most` characters, or a text ten times as long, is a `RefusedError`."""
    longest = most if extract == "whole" else 10 * most
    if len(text) > longest:
        raise RefusedError(f"a completion of {len(text)} characters, more than {longest}")
    where = find_json(text, extract)
    if where is not None and where[1] - where[0] > most:
        raise RefusedError(f"{where[1] - where[0]} characters of JSON, more than max_characters, {most}")
    return where


def _last_object(text: str) -> tuple[int, int] | None:
    """The last closed object that is not part of another value, which may be cut off or broken."""
    found = None
    done = 0
    seen = 0
    depth = 0  # of what was opened and not closed, in prose and in broken JSON
    while (bracket := _BEGINS.search(text, done)) is not None:
        start = bracket.start()
        depth = max(depth + _opened(text, seen, start), 0)
        done, known, unclosed = _end(text, start)
        depth += unclosed
        seen = max(seen, known)
        if not unclosed and bracket[0] == "{" and not (depth and _is_inside(text, start)):
            found = (start, done)
    return found


def _opened(text: str, start: int, end: int) -> int:
    opened = text.count("{", start, end) + text.count("[", start, end)
    return opened - text.count("}", start, end) - text.count("]", start, end)


def _end(text: str, start: int) -> tuple[int, int, int]:
    """From where on other JSON may begin, where the JSON of this bracket ends or breaks, and how much it left open.

    A string before a break may hold other JSON: what seemed to begin it may be a quotation mark in prose.
    """
    opened = [text[start]]
    place = start + 1
    free = place
    steps = _FIRST
    while opened:
        step = steps[opened[-1]].match(text, place)
        if step is None:
            return free, place, len(opened)
        place = step.end()
        free = place
        steps = _NEXT
        if step[1] is not None:
            free = step.start(1)
        elif text[place - 1] in _FIRST:
            opened.append(text[place - 1])
            steps = _FIRST
        else:
            opened.pop()
    return place, place, 0


def _is_inside(text: str, start: int) -> bool:
    """Whether a key, a bracket, or a value and a comma stand before it."""
    before = text[max(start - 200, 0) : start].rstrip()
    if before.endswith((":", ",")):
        return before[:-1].rstrip().endswith('"' if before[-1] == ":" else _VALUE_ENDS)
    return before.endswith(("[", "{"))


def depth_of(text: str) -> int:
    steps = ({"[": 1, "{": 1, "]": -1, "}": -1}.get(match.group(), 0) for match in _STRUCTURE.finditer(text))
    return max(itertools.accumulate(steps, initial=0))


def read_json(text: str, max_depth: int, *, unique: bool = True) -> Any:
    """Parse JSON strictly: no NaN or Infinity, numbers fit a finite double, and if `unique`, keys are not repeated."""
    deepest = depth_of(text)
    if deepest > max_depth:
        raise RefusedError(f"nested {deepest} deep, more than max_depth, {max_depth}")
    hooks: dict[str, Any] = {"parse_int": _integer, "parse_float": _finite, "parse_constant": _no_constant}
    try:
        return json.loads(text, object_pairs_hook=_object if unique else None, **hooks)
    except RecursionError as error:
        raise RefusedError(f"nested {deepest} deep") from error


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise RefusedError(f"an integer of {len(digits)} digits, more than {MOST_DIGITS}")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise RefusedError("a number that is no finite double")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise AmbiguousError("an object has a key twice")
    return read


_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})++|\d++)?(?:\.\d*+)?(?:[eE][+-]?\d{1,4})?", re.ASCII)
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]|[^\s\[\]{}:,"]+', re.DOTALL)
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_DECIMAL = decimal.Context(prec=MOST_DIGITS + 100, traps=[])  # nothing raises, and integers are exact


class Located(NamedTuple):
    """A value of a JSON text and its characters."""

    kind: str  # "object", "array", "string", "number", "boolean" or "null"
    start: int
    end: int
    value: Any = None  # a text, a `Decimal`, True or False; of null, objects and arrays None
    # Of an object keys, as often as they are there, and values; of an array numbers from 0 and items.
    members: tuple[tuple[str | int, "Located"], ...] = ()


@dataclass
class _Open:
    kind: str
    start: int
    key: str | None = None
    members: list[tuple[str | int, Located]] = field(default_factory=list)

    def add(self, value: Located) -> None:
        self.members.append((len(self.members) if self.key is None else self.key, value))
        self.key = None


def read_located(text: str, start: int, end: int, max_depth: int, *, unique: bool = True) -> Located:
    """Read the JSON between two characters of a text as `read_json` does, and say where each value stands."""
    read_json(text[start:end], max_depth, unique=unique)  # what follows relies on its being JSON
    top = _Open("", start)
    opened = [top]
    for match in _TOKEN.finditer(text, start, end):
        token = match.group()
        current = opened[-1]
        kind = _KINDS.get(token[0], "number")
        if kind in ("object", "array"):
            opened.append(_Open(kind, match.start()))
        elif token in ("}", "]"):
            opened.pop()
            opened[-1].add(Located(current.kind, current.start, match.end(), members=tuple(current.members)))
        elif current.kind == "object" and current.key is None:
            current.key = json.loads(token)
        else:
            value = read_number(token) if kind == "number" else json.loads(token)
            current.add(Located(kind, *match.span(), value))
    ((_, value),) = top.members
    return value


def read_number(digits: str) -> decimal.Decimal:
    return _DECIMAL.create_decimal(digits)


def read_plain_number(text: str) -> decimal.Decimal | None:
    digits = text.strip()
    if len(digits) > MOST_DIGITS or not _PLAIN_NUMBER.fullmatch(digits):
        return None
    number = read_number(digits.replace(",", ""))
    return number if number.is_finite() else None


def is_near(said: decimal.Decimal, right: decimal.Decimal, absolute: float, relative: float) -> bool:
    """Whether a number is at most `absolute` or `relative`, a share of the right one, away from the right one."""
    share = _DECIMAL.multiply(read_number(repr(relative)), _DECIMAL.abs(right))
    allowed = _DECIMAL.max(read_number(repr(absolute)), share)
    return bool(_DECIMAL.abs(_DECIMAL.subtract(said, right)) <= allowed)
