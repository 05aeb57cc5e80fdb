r"""How much work an expression asks for, by its tree alone, before sympy evaluates anything of it.

Bounded are the bits of exact numbers and the terms of finite sums and products without a short form. The limits are far
above what answers of people have: 4 million bits are 1.2 million digits.
"""

import contextlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from sympy import Add, Basic, Function, Integral, Mul, Pow, Product, Rational, Sum, binomial, factorial
from sympy.core.expr import UnevaluatedExpr
from sympy.matrices import MatrixBase
from sympy.matrices.expressions import MatPow

MOST_BITS = 4_000_000
MOST_TERMS = 3_000
MOST_FUNCTIONS = 3
_EXACT_BITS = 1_000
"""Smaller numbers, all of which a float can hold, are worked out; of larger ones only the size is kept."""

Size = Fraction | float | None  # an exact value, the bits of one, or None where no exact value is made


class _TooMuchError(Exception):
    """The message says of what the expression asks for too much."""


def excess_of_work(parsed: Sequence[Any]) -> str | None:
    """Say of what these expressions ask for too much, or None where they do not."""
    nodes = list(parsed)
    for node in nodes:  # grows meanwhile: parents before children, without recursion, since sums nest deeply
        nodes.extend(_children(node))
    sizes: dict[int, Size] = {}  # by identity: hashing a deep expression recurses
    try:
        for node in reversed(nodes):
            if id(node) not in sizes:
                sizes[id(node)] = _limited(_size(node, [sizes[id(child)] for child in _children(node)]))
    except _TooMuchError as excess:
        return str(excess)
    return None


def _children(node: Any) -> Sequence[Any]:
    if isinstance(node, MatrixBase):
        return node.flat()  # type: ignore[no-any-return]
    return node.args if isinstance(node, Basic) else ()


def _size(node: Any, inner: Sequence[Size]) -> Size:
    if isinstance(node, Rational):
        value = Fraction(int(node.p), int(node.q)) if node.q else Fraction(0)
        return value if _bits(value) < _EXACT_BITS else _bits(value)
    if isinstance(node, Sum | Product):
        _check_terms(node)
        return None
    if isinstance(node, Integral):
        _check_integrand(node.function)
        return None
    if isinstance(node, MatrixBase):
        return max((_bits(size) for size in inner if size is not None), default=None)
    if isinstance(node, Pow) and inner[0] is None and isinstance(inner[1], Fraction):
        _check_expansion(node.base, inner[1])
    if any(size is None for size in inner) or not inner:
        return None
    known = [size for size in inner if size is not None]
    values = [size for size in known if isinstance(size, Fraction)]
    exact = len(values) == len(known)
    bits = [_bits(size) for size in known]
    if isinstance(node, Add):
        return sum(values, Fraction(0)) if exact and sum(bits) < _EXACT_BITS else sum(bits)
    if isinstance(node, Mul):
        return math.prod(values, start=Fraction(1)) if exact and sum(bits) < _EXACT_BITS else sum(bits)
    if isinstance(node, Pow | MatPow):
        return _power(*known)
    if isinstance(node, factorial):
        return _factorial(known[0])
    if isinstance(node, binomial) and exact:
        return _choices(*values)
    return known[0] if isinstance(node, UnevaluatedExpr) else None


def _power(base: Size, exponent: Size) -> Size:
    if isinstance(base, Fraction) and base in (0, 1, -1):
        return abs(base)
    if not isinstance(exponent, Fraction):
        raise _TooMuchError("a power with a huge exponent")
    bits = _bits(base) * float(abs(exponent))
    if exponent.denominator != 1:
        _limited(bits)  # sympy takes out the whole part
        return None
    return base**exponent.numerator if isinstance(base, Fraction) and bits < _EXACT_BITS else bits


def _factorial(number: Size) -> Size:
    if not isinstance(number, Fraction):
        raise _TooMuchError("the factorial of a huge number")
    if number.denominator != 1 or number < 0:
        return None
    bits = float(number) * math.log2(max(2.0, float(number)))
    return Fraction(math.factorial(int(number))) if bits < _EXACT_BITS else bits


def _choices(total: Fraction, chosen: Fraction) -> Size:
    if total.denominator != 1 or chosen.denominator != 1 or not 0 <= chosen <= total:
        return None
    few = min(chosen, total - chosen)
    bits = min(float(total), float(few) * math.log2(max(2.0, float(total))))
    return Fraction(math.comb(int(total), int(chosen))) if bits < _EXACT_BITS else bits


def _check_expansion(base: Any, exponent: Fraction) -> None:
    """A power of a sum of symbols is multiplied out to be compared."""
    addends = [base]
    for node in addends:
        addends.extend(node.args if isinstance(node, Add) else ())
    count = sum(not isinstance(node, Add) for node in addends)
    if exponent.denominator != 1 or count < 2:
        return
    power = abs(exponent.numerator)
    if power > MOST_TERMS or math.comb(power + min(count, 99) - 1, min(power, min(count, 99) - 1)) > MOST_TERMS:
        raise _TooMuchError(f"a power of {count} terms with the exponent {float(power):.3g}")


def _check_terms(node: Any) -> None:
    """A sum or product over a range is worked out term by term unless it has a polynomial's short form."""
    for variable, first, last in (limits for limits in node.limits if len(limits) == 3):
        count = math.inf
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # a symbol, or infinite
            count = float(last - first)
        if MOST_TERMS < count < math.inf and not (isinstance(node, Sum) and node.function.is_polynomial(variable)):
            raise _TooMuchError(f"a {type(node).__name__.lower()} of {count:.3g} terms")


def _check_integrand(integrand: Any) -> None:
    """Functions of functions are searched through for an antiderivative that there is not."""
    nodes = [(integrand, 0)]
    for node, above in nodes:
        depth = above + isinstance(node, Function | Integral)
        if depth > MOST_FUNCTIONS:
            raise _TooMuchError(f"an integral of functions more than {MOST_FUNCTIONS} deep")
        nodes.extend((child, depth) for child in _children(node))


def _bits(size: Size) -> float:
    if isinstance(size, Fraction):
        return float(size.numerator.bit_length() + size.denominator.bit_length() - 1)
    return size or 0.0


def _limited(size: Size) -> Size:
    if isinstance(size, float) and size > MOST_BITS:
        digits = "too many" if math.isinf(size) else f"about {size * math.log10(2):.3g}"
        raise _TooMuchError(f"a number with {digits} digits")
    return size
