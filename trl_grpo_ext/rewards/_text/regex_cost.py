"""How many steps can a regular expression take on a text of a given length, at most?

Python's `re` tries alternatives one after the other, so some patterns take time exponential in the text, and it holds
the interpreter's lock meanwhile: nothing in the process could stop it. This bound says beforehand where that is ruled
out. It is an upper bound from the parsed pattern, generous to the text and not to the pattern: what it lets pass is
fast, what it doesn't may be fast as well.
"""

from __future__ import annotations

import math
import re
from typing import Any


class RegexCost:
    """A bound on the steps of one pattern; with `full` it is tried from the text's beginning only.

    Every path of the matcher is counted: a repeat may end after any number of rounds, each alternative may be tried,
    and what follows is tried again for each of them. So choices multiply along a sequence and add up over alternatives.
    """

    def __init__(self, pattern: str, flags: int = 0, *, full: bool = False) -> None:
        self._asked = (pattern, flags, full)
        self._tree: list[Any] | None = None
        self._starts: str | None = None
        try:
            from re import _parser  # type: ignore[attr-defined]  # private: where it changes, all is counted as slow

            parsed = _parser.parse(pattern, flags)
            self._tree = list(parsed)
            self._starts = "" if full else _beginning(self._tree, parsed.state.flags)
        except (ImportError, AttributeError, TypeError, ValueError):
            self._tree = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _cost, self._asked  # a parsed pattern does not pickle

    def steps(self, text: str) -> float:
        """An upper bound on the steps for this text; infinite if there is no useful bound."""
        if self._tree is None:
            return math.inf
        try:
            choices, size = _choices(self._tree, len(text))
        except (_UnknownElementError, ValueError, TypeError, IndexError, RecursionError):
            return math.inf
        starts = len(text) + 1
        if self._starts is not None:
            starts = _occurrences(text, self._starts) if self._starts else 1
        return len(text) + starts * choices * size


def _cost(pattern: str, flags: int, full: bool) -> RegexCost:
    return RegexCost(pattern, flags, full=full)


class _UnknownElementError(Exception):
    """An element of a pattern that this module does not know."""


def _beginning(tree: list[Any], flags: int) -> str | None:
    """What every match begins with: a literal string, "" for the beginning of the text, None for nothing in common."""
    if not tree:
        return None
    name, argument = str(tree[0][0]), tree[0][1]
    if name == "AT" and (str(argument) == "AT_BEGINNING_STRING" or not flags & re.MULTILINE):
        return "" if str(argument) in ("AT_BEGINNING", "AT_BEGINNING_STRING") else None
    literals = []
    for operation, argument in tree if not flags & re.IGNORECASE else ():
        if str(operation) != "LITERAL":
            break
        literals.append(chr(argument))
    return "".join(literals) or None


def _occurrences(text: str, literal: str) -> int:
    overlaps = literal[0] in literal[1:]
    return text.count(literal[0] if overlaps else literal) + 1


def _choices(tree: Any, length: int) -> tuple[float, int]:
    """In how many ways a sequence may be gone through, at most, and of how many elements it is."""
    choices, size = 1.0, 1
    for operation, argument in tree:
        ways, elements = _of_element(str(operation), argument, length)
        choices, size = choices * ways, size + elements
    return choices, size


def _of_element(name: str, argument: Any, length: int) -> tuple[float, int]:
    if name in ("LITERAL", "NOT_LITERAL", "ANY", "AT", "FAILURE"):
        return 1.0, 1
    if name == "IN":
        return 1.0, len(argument)
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        lowest, highest, body = argument
        ways, elements = _choices(body, length)
        rounds = min(int(highest), length + 1)  # a round that matches nothing ends the repeat
        needed = min(int(lowest), length + 1)
        if ways == 1.0:
            return max(rounds - needed, 0) + 1.0, elements * max(needed, 1)
        rounds = max(rounds, needed)
        if rounds * math.log(ways) > 60:
            return math.inf, elements
        return sum(ways**count for count in range(rounds + 1)), elements
    if name == "BRANCH":
        branches = [_choices(branch, length) for branch in argument[1]]
        return sum(ways for ways, _ in branches), sum(elements for _, elements in branches)
    if name in ("SUBPATTERN", "ATOMIC_GROUP", "ASSERT", "ASSERT_NOT"):
        inside = {"SUBPATTERN": 3, "ATOMIC_GROUP": None}.get(name, 1)
        return _choices(argument if inside is None else argument[inside], length)
    if name in ("GROUPREF", "GROUPREF_IGNORE"):
        return length + 1.0, 1  # compares as many characters
    if name == "GROUPREF_EXISTS":
        yes, no = _choices(argument[1], length), _choices(argument[2] or [], length)
        return yes[0] + no[0], yes[1] + no[1]
    raise _UnknownElementError(name)
