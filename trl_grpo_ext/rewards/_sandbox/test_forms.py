"""The forms in which a data set holds tests of Python code, and what of them is judged outside the code's process.

An `assert` that compares with a literal, such as `assert add(1, 2) == 3`, becomes one that hands over the value of
`add(1, 2)`. The literal stays here, and so does the comparison: the code under test never sees what is expected, and an
object whose `__eq__` always says yes equals nothing.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...guard.outcomes import shown
from .child import SEND

_MAX_ITEMS = 1000
_TOO_BAD = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


class UnreadableTestsError(Exception):
    """The tests of a row are in none of the forms; the message says why."""


@dataclass(frozen=True)
class Checks:
    """Tests that run in the code's namespace.

    Attributes:
        sources: One source text per test, without the literals.
        slots: For each test, the numbers of the values that it hands over.
        certain: For each test, those of its values that it cannot end without handing over.
        expected: The literals, by number.
    """

    sources: tuple[str, ...]
    slots: tuple[frozenset[int], ...]
    certain: tuple[frozenset[int], ...]
    expected: tuple[Any, ...]


@dataclass(frozen=True)
class Examples:
    """What a program reads and what it must print.

    Attributes:
        pairs: Input and output.
    """

    pairs: tuple[tuple[str, str], ...]


def read_tests(tests: Any, entry_point: Any = None) -> Checks | Examples:
    """Read one row's tests.

    Args:
        tests: A list of statements, one source text, or a list of mappings with `input` and `output`.
        entry_point: What a source text's `check` is called with, where it does not call it itself.

    Raises:
        UnreadableTestsError: They are in none of these forms, there are none, or they are no Python.
    """
    if isinstance(tests, str):
        if not tests.strip():
            raise UnreadableTestsError("there are no tests")
        return _checks((_with_call(tests, entry_point),))
    if not isinstance(tests, list | tuple) or not tests:
        raise UnreadableTestsError(f"the tests are {shown(tests)}, not a list of tests and not a source text")
    if all(isinstance(test, str) for test in tests):
        return _checks(tuple(tests))
    if all(isinstance(test, Mapping) for test in tests):
        pairs = [(test.get("input"), test.get("output")) for test in tests]
        if all(isinstance(given, str) and isinstance(wanted, str) for given, wanted in pairs):
            return Examples(tuple(pairs))
        raise UnreadableTestsError("a test has no `input` or no `output` that is a string")
    raise UnreadableTestsError(f"the tests are neither all strings nor all mappings: {shown(tests)}")


def same_output(printed: bytes, expected: str) -> bool:
    """Whether the lines are the same but for white space at their ends, and empty lines at the end."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    return lines(printed.decode("utf-8", "replace")) == lines(expected.encode("utf-8", "replace").decode("utf-8"))


def equal(encoded: Any, expected: Any) -> bool:
    """Whether an encoded value (`child.encoded_value`) equals a literal, as Python's `==` would have it.

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


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except _TOO_BAD as error:
        raise UnreadableTestsError(f"a test is no Python: {shown(str(error))}") from error


def _with_call(source: str, entry_point: Any) -> str:
    """HumanEval's tests define `check(candidate)` and leave the call to the harness."""
    body = _parsed(source).body
    defines = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body)
    if not defines or any(_calls_check(node) for node in body if not isinstance(node, ast.FunctionDef)):
        return source
    if not isinstance(entry_point, str) or not entry_point.strip():
        raise UnreadableTestsError(
            "the test defines `check` and does not call it, and there is no column `entry_point`"
        )
    return f"{source}\ncheck({entry_point})\n"


def _calls_check(node: ast.AST) -> bool:
    calls = (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))
    return any(isinstance(called, ast.Name) and called.id == "check" for called in calls)


@functools.lru_cache(maxsize=4096)  # the completions of a group have the same tests
def _checks(tests: tuple[str, ...]) -> Checks:
    expected: list[Any] = []
    sources, slots, certain = [], [], []
    for test in tests:
        tree, first, outward = _parsed(test), len(expected), _Outward(expected)
        if not tree.body:
            raise UnreadableTestsError("a test is empty")
        try:
            sources.append(ast.unparse(ast.fix_missing_locations(outward.visit(tree))))
            compile(sources[-1], "<test>", "exec", dont_inherit=True)
        except _TOO_BAD as error:
            raise UnreadableTestsError(f"a test is no Python: {shown(str(error))}") from error
        slots.append(frozenset(range(first, len(expected))))
        called = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
        bodies = [tree.body, *(node.body for node in called)]  # `check` is called: see `_with_call`
        certain.append(frozenset(slot for body in bodies for node in body for slot in _handed_over(node)))
    return Checks(tuple(sources), tuple(slots), tuple(certain), tuple(expected))


def _handed_over(node: ast.stmt) -> list[int]:
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != SEND:
        return []
    slot = call.args[0]
    return [slot.value] if isinstance(slot, ast.Constant) and isinstance(slot.value, int) else []


class _Outward(ast.NodeTransformer):
    """Turns asserts that compare with a literal into calls that hand the other side over."""

    def __init__(self, expected: list[Any]) -> None:
        self.expected = expected

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        test = node.test
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
            return node
        for value, literal in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                self.expected.append(_literal(literal))
            except _TOO_BAD:
                continue
            slot = ast.Constant(len(self.expected) - 1)
            return ast.Expr(ast.Call(ast.Name(SEND, ast.Load()), [slot, value], []))
        return node

    def _left_alone(self, node: ast.AST) -> ast.AST:
        return node  # its asserts may be meant to fail

    visit_Try = visit_TryStar = visit_With = visit_AsyncWith = _left_alone


def _literal(node: ast.expr) -> Any:
    value = ast.literal_eval(node)
    if value is Ellipsis:
        raise ValueError(value)
    return value
