"""Expressions that surely differ, by their values at a point, without sympy's `simplify` and `solve`.

That two are equal is never concluded here: math-verify asks sympy then.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import sympy
from math_verify import grader
from sympy import Add, Rational, Symbol
from sympy.core.numbers import ImaginaryUnit

_COMMON = (
    *(Add, ImaginaryUnit, Rational, Symbol, sympy.Mul, sympy.NumberSymbol, sympy.Pow),
    *(sympy.Abs, sympy.cos, sympy.exp, sympy.log, sympy.sin, sympy.tan),
)
_NAME = re.compile(r"[A-DF-Za-df-z](_\{?\w+\}?)?")
_DIGITS, _MARGIN = 20, 1e-8
_simplify = grader.simplify
_solve_and_compare = grader.sympy_solve_and_compare
_is_of_symbols = grader.is_expr_of_only_symbols


def simplify(difference: Any) -> Any:
    """Math-verify's `simplify`, which only asks it whether a difference is zero: 1 stands for what is surely not."""
    return sympy.S.One if is_nonzero(difference) else _simplify(difference)


def sympy_solve_and_compare(gold: Any, pred: Any, *precision: int) -> bool:
    r"""Math-verify's, but where both equations say what one symbol is, as `y = c e^x` does, and the values differ.

    Their solutions for any symbol differ then. Its quirks stay: imaginary solutions are dropped, so both have none; it
    compares names without case, and a symbol with a product by their letters, so names of one letter only are judged.
    """
    if (
        isinstance(gold, sympy.Eq)
        and isinstance(pred, sympy.Eq)
        and isinstance(gold.lhs, Symbol)
        and gold.lhs == pred.lhs
    ):
        values = [_value(side) for side in (gold.rhs, pred.rhs)]
        symbols = gold.free_symbols | pred.free_symbols
        names = {symbol.name.lower() for symbol in symbols if _NAME.fullmatch(symbol.name)}
        is_plain = len(names) == len(symbols) and gold.lhs not in gold.rhs.free_symbols | pred.rhs.free_symbols
        if is_plain and all(value == value.real for value in values) and is_nonzero(gold.rhs - pred.rhs):
            return False
    return bool(_solve_and_compare(gold, pred, *precision))


def is_name(side: Any) -> bool:
    """Whether the left side of an equation says what it is of (`x`, `f(x)`, `AB`, `A/S`), and not `x + y`: then 5 is no
    answer to `x + y = 5`, as it is to math-verify."""
    return bool(_is_of_symbols(side)) and not side.has(Add)


def is_nonzero(difference: Any) -> bool:
    return _MARGIN < abs(_value(difference)) < float("inf")


def _value(expression: Any) -> complex:
    """The value at a point that depends on the symbols' names alone; not a number where it cannot be worked out."""
    with contextlib.suppress(Exception):  # whatever sympy raises
        if all(isinstance(node, _COMMON) for node in sympy.preorder_traversal(expression)):
            symbols = enumerate(sorted(expression.free_symbols, key=str))
            point = {
                symbol: Rational(sum(map(ord, symbol.name)) % 89 + 3 * place + 48, 97) for place, symbol in symbols
            }
            return complex(expression.evalf(_DIGITS, subs=point))
    return complex("nan")


REPLACED = {
    "simplify": simplify,
    "sympy_solve_and_compare": sympy_solve_and_compare,
    "is_expr_of_only_symbols": is_name,
}
"""What `math_verify.grader` is to use instead of its own."""
