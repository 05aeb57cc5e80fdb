"""Find expressions that surely differ without sympy's `simplify` and `solve`, which may take seconds to say so.

Expressions whose values at one point differ are not equal. That two are equal is never concluded here: math-verify asks
sympy then, and wherever more than exact numbers, symbols and the commonest functions is involved.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import mpmath
import sympy
from math_verify import grader
from sympy import Add, Expr, Integral, Rational, Symbol
from sympy.core.numbers import ImaginaryUnit

_COMMON = (
    *(Add, ImaginaryUnit, Rational, Symbol, sympy.Mul, sympy.NumberSymbol, sympy.Pow),
    *(sympy.Abs, sympy.cos, sympy.exp, sympy.log, sympy.sin, sympy.tan),
)
_NAME = re.compile(r"[A-DF-Za-df-z](_\{?\w+\}?)?")
_DIGITS, _MARGIN = 20, 1e-8
_FAR, _LARGE = 1e-3, 1_000
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
    """Whether an expression is surely not zero."""
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


def differ_by_quadrature(gold: Any, answer: Any) -> bool:
    """Whether two numbers, one with definite integrals, are so far apart that no error of a quadrature explains it.

    Sympy may look for an antiderivative for minutes. Two rules and a cut interval have to agree here; that two numbers
    are equal is never concluded, and integrands with large or tiny numbers, which may have narrow peaks, are left.
    """
    if not isinstance(gold, Expr) or not isinstance(answer, Expr) or not (gold.has(Integral) or answer.has(Integral)):
        return False
    with contextlib.suppress(Exception):  # whatever sympy and mpmath raise
        first, second = (
            _value(side.xreplace({integral: _quadrature(integral) for integral in side.atoms(Integral)}))
            for side in (gold, answer)
        )
        return _FAR * (1 + abs(first)) < abs(first - second) < float("inf")
    return False


def _quadrature(integral: Any) -> Any:
    ((variable, start, end),) = integral.limits
    integrand = integral.function
    numbers = [abs(number) for number in integrand.atoms(Rational)]
    is_plain = all(isinstance(node, _COMMON) for node in sympy.preorder_traversal(integrand))
    if integrand.free_symbols - {variable} or not is_plain:
        raise ValueError("no plain function of one variable")
    if any(number and not 1 / _LARGE < number < _LARGE for number in numbers):
        raise ValueError("numbers of very different size")
    function = sympy.lambdify(variable, integrand, "mpmath")
    low, high = (
        mpmath.mpf(bound.evalf(_DIGITS)) if bound.is_finite else mpmath.inf * int(sympy.sign(bound))
        for bound in (start, end)
    )
    cut = low + (1 if mpmath.isinf(high) else 0.382 * (high - low)) if mpmath.isfinite(low) else mpmath.mpf(0)
    values = [
        mpmath.quad(function, [low, high], method="tanh-sinh", maxdegree=6),
        mpmath.quad(function, [low, high], method="gauss-legendre", maxdegree=5),
        mpmath.quad(function, [low, cut, high], method="tanh-sinh", maxdegree=6),
    ]
    if max(abs(value - values[0]) for value in values) > _FAR / 10 * (1 + abs(values[0])):
        raise ValueError("the rules disagree")
    return Rational(mpmath.nstr(values[0].real, 15)) + sympy.I * Rational(mpmath.nstr(mpmath.im(values[0]), 15))


REPLACED = {
    "simplify": simplify,
    "sympy_solve_and_compare": sympy_solve_and_compare,
    "is_expr_of_only_symbols": is_name,
}
"""What `math_verify.grader` is to use instead of its own."""
