"""Finding the JSON in a completion, and reading it without trusting it. Everything here is linear in the text."""

import json
import math
import re
from typing import Any

from .fences import fences

MOST_DIGITS = 1000

# A string always matches, closed or not, and possessively: there is nothing to go back to.
_STRUCTURE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_QUOTES_AND_BRACES = re.compile(r'["{}]')
# What stands before an object that is a part of another value: a key, a bracket, or a neighbour's comma.
_INSIDE = re.compile(r'(?:"\s{0,9}:|[\[{]|[}\]"0-9]\s{0,9},)\s{0,90}\Z')
_ATTEMPTS = 16


class RefusedError(Exception):
    """JSON that is too deep, or has a number that is too large, to be looked at."""


class AmbiguousError(Exception):
    """JSON that is ambiguous: an object has a key twice."""


def fenced(text: str) -> str | None:
    """The inside of the last closed fence marked `json`, or else of the last unmarked one."""
    closed = [(label, inside) for label, inside, is_closed in fences(text) if is_closed]
    insides = [inside for label, inside in closed if label == "json"] or [ins for label, ins in closed if not label]
    return insides[-1] if insides else None


def last_object(text: str) -> str | None:
    """The last closed object that is not part of another value and parses, read backwards from its closing brace."""
    tokens = [(match.group(), match.start()) for match in _QUOTES_AND_BRACES.finditer(text)]
    last = len(tokens) - 1
    for _ in range(_ATTEMPTS):
        while last >= 0 and tokens[last][0] != "}":
            last -= 1
        if last < 0:
            return None
        first = _opening(text, tokens, last)
        if first is not None:
            start, end = tokens[first][1], tokens[last][1] + 1
            if not _INSIDE.search(text[max(start - 100, 0) : start]) and _parses(text[start:end]):
                return text[start:end]
        last -= 1
    return None


def _opening(text: str, tokens: list[tuple[str, int]], last: int) -> int | None:
    """The token of the brace that the one at `last` closes, if what lies between is written as JSON is."""
    depth, index = 0, last
    while index >= 0:
        token = tokens[index][0]
        if token == '"':  # the end of a string: go to its beginning, past quotes after an odd number of backslashes
            index -= 1
            while index >= 0 and (tokens[index][0] != '"' or _is_escaped(text, tokens[index][1])):
                index -= 1
        elif token == "}":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return index
        index -= 1
    return None


def _is_escaped(text: str, position: int) -> bool:
    start = position
    while start > 0 and text[start - 1] == "\\":
        start -= 1
    return (position - start) % 2 == 1


def _parses(text: str) -> bool:
    try:
        json.loads(text, parse_int=len, parse_float=len, parse_constant=_no_constant)
    except RecursionError:
        return True  # refused later, for its depth
    except ValueError:
        return False
    return True


def depth_of(text: str) -> int:
    """How deep brackets and braces outside of strings are nested."""
    depth = deepest = 0
    for match in _STRUCTURE.finditer(text):
        token = match.group()
        if token in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in ("]", "}"):
            depth -= 1
    return deepest


def read_json(text: str, max_depth: int) -> Any:
    """Parse JSON strictly: NaN and Infinity are none, an object has each key once, numbers fit a finite double."""
    deepest = depth_of(text)
    if deepest > max_depth:
        raise RefusedError(f"nested {deepest} deep, more than max_depth, {max_depth}")
    hooks: dict[str, Any] = {"parse_int": _integer, "parse_float": _finite, "parse_constant": _no_constant}
    try:
        return json.loads(text, object_pairs_hook=_object, **hooks)
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
