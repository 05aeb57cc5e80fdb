r"""A worker's task for `math_accuracy`: call math-verify exactly as TRL's `accuracy_reward` does.

Only the server that forks the workers imports this, and with it sympy. A worker that takes too long is killed.
"""

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any
from unittest import mock

import sympy
from antlr4.atn.ParserATNSimulator import ParserATNSimulator
from antlr4.atn.PredictionMode import PredictionMode
from antlr4.dfa.DFA import DFA
from latex2sympy2_extended import NormalizationConfig, latex2sympy2
from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parser, verify
from math_verify.parser import extract_target_from_pred, get_extraction_regexes
from sympy import Add, Basic, Expr, FiniteSet, Float, Function, I, Integral, Mul, Pow, Product, Rational, Sum, Symbol
from sympy.core.expr import UnevaluatedExpr
from sympy.core.numbers import ImaginaryUnit
from sympy.matrices import MatrixBase
from sympy.matrices.expressions import MatPow

from . import plain_answers, references

for _name in ("math_verify.parser", "math_verify.grader", "latex2sympy2_extended.math_normalization"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # "Timeout is disabled", once per worker

_REFERENCE = get_extraction_regexes([LatexExtractionConfig(), ExprExtractionConfig()])
_BOX: Any = {"boxed_match_priority": 0, "try_extract_without_anchor": False}  # as TRL has it
_ANSWER = get_extraction_regexes([LatexExtractionConfig(normalization_config=NormalizationConfig(units=True), **_BOX)])
_SHOWN = 200
_SPACE = re.compile(r"(?<![A-Za-z0-9\\])\s+|\s+(?![A-Za-z0-9])")
_BASED = re.compile(r"\(?([0-9A-Za-z]+)\)?_\{?([0-9]{1,2})\}?")
_PARSER = latex2sympy2.PSParser
_STATES = _PARSER.atn.decisionToState
_CHOICES = [DFA(state, decision) for decision, state in enumerate(_STATES)]
_IN_CONTEXT = {decision for decision, state in enumerate(_STATES) if _PARSER.ruleNames[state.ruleIndex] == "atom_expr"}
_WITHOUT_PARSING: Any = {"parse_latex_cached": lambda latex: Symbol("unparsed")}
_COMMON: tuple[Any, ...] = (Add, ImaginaryUnit, Rational, Symbol, sympy.Mul, sympy.NumberSymbol, sympy.Pow)
_COMMON += (sympy.Abs, sympy.cos, sympy.exp, sympy.log, sympy.sin, sympy.tan)
_NAME = re.compile(r"[A-DF-Za-df-z](_\{?\w+\}?)?")
_DIGITS = 20
_SURELY = 1e-8
_NOTHING = 5e-7  # when rounded to 6 places
_their_simplify = grader.simplify
_their_comparison = grader.sympy_solve_and_compare
_their_numeric_eq = grader.sympy_numeric_eq
_is_expr_of_only_symbols = grader.is_expr_of_only_symbols

# How much work an expression asks for is known by its tree alone: the bits of exact numbers, and the terms of finite
# sums and products without a short form. The limits are far above what answers of people have.
MOST_BITS = 4_000_000
MOST_TERMS = 3_000
MOST_FUNCTIONS = 3
_EXACT_BITS = 1_000  # smaller numbers, all of which a float can hold, are worked out

Size = Fraction | float | None  # an exact value, the bits of one, or None where no exact value is made


def check(job: Mapping[str, Any]) -> dict[str, str]:
    """Judge `answer`, a completion's text, or without one see whether `reference` alone can be parsed and compared.

    Equal texts are right without being parsed. Of a reference alone that is in order the outcome is "scored". Sympy's
    own spelling is not asked for: writing out a million digits never returns.
    """
    with replaced():
        return _checked(job)


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Math-verify with our parts, for as long as the block runs: whoever else uses it in this process has its own."""
    grading: Any = {"simplify": _simplify, "sympy_solve_and_compare": _solve, "is_expr_of_only_symbols": _is_name}
    grading |= {"sympy_numeric_eq": _numeric_eq}
    with (
        mock.patch.multiple(grader, **grading),
        mock.patch.object(parser, "normalize_latex", references.normalize),
        mock.patch.object(latex2sympy2, "_Latex2Sympy", _Converter),
    ):
        yield


def _checked(job: Mapping[str, Any]) -> dict[str, str]:
    reference = job["reference"]
    text = job.get("answer", "x \\boxed{7}")
    same = _reference_text(reference)
    if same and _squeezed(same) == _squeezed(_text(partial(_parsed, text, _ANSWER, "first_match"))):
        return {"outcome": "right", "gold": same[:_SHOWN], "found": same[:_SHOWN]}
    known = _reference(reference)
    if not (gold := known.gold):
        return {"outcome": "unparseable_reference", "detail": known.why, "left": known.left}
    read = {"gold": _shown(gold), "left": known.left[:_SHOWN]}
    if excess := excess_of_work(gold):
        return {"outcome": "unparseable_reference", "detail": excess, **read}
    answer = _parsed(text, _ANSWER, "first_match")
    if not answer:
        return {"outcome": "no_answer", **read}
    if isinstance(gold[0], str):
        why = plain_answers.excess_of_latex(gold[0]) or "math-verify cannot parse it"
        return {"outcome": "unparseable_reference", "detail": f"{why}, and the answer is not the same text", **read}
    too_much = plain_answers.excess_of_latex(answer[0]) if isinstance(answer[0], str) else None
    if excess := too_much or excess_of_work(answer):
        return {"outcome": "refused", "detail": excess, "found": _shown(answer), **read}
    right = verify(list(gold), answer, timeout_seconds=None) and not _different(gold, answer)
    if "answer" not in job:
        return {"outcome": "scored", **read}
    right = right or _equal_if_imaginary(gold[0], answer[0])
    return {"outcome": "right" if right else "wrong", "found": _shown(answer), **read}


def _parsed(text: str, expressions: list[Any], mode: str) -> list[Any]:
    """Math-verify's `parse`, which would build its regular expressions again for each configuration."""
    try:
        return list(extract_target_from_pred(text, expressions, fallback_mode="first_match", extraction_mode=mode))
    except MemoryError:
        raise  # the worker says so, and its successor tries again
    except Exception:  # as math-verify's own `parse`: an expression that breaks its parser is no expression
        return []


@lru_cache(maxsize=1024)
def _reference(text: str) -> references.Reference:
    return references.read(text, _REFERENCE, _parsed)


@lru_cache(maxsize=1024)
def _reference_text(text: str) -> str:
    return _text(lambda: references.read(text, _REFERENCE, _parsed).gold)


def _text(extract: Callable[[], Sequence[Any]]) -> str:
    """The one LaTeX that math-verify reads, normalised, without parsing it; empty where it reads none or several."""
    with mock.patch.multiple(parser, **_WITHOUT_PARSING):
        found = extract()
    return found[-1].strip() if found and isinstance(found[-1], str) and not isinstance(found[0], FiniteSet) else ""


def _squeezed(text: str) -> str:
    return _SPACE.sub("", " ".join(text.split()))


class _Choices(ParserATNSimulator):
    """Choices of ANTLR's faster mode, SLL, but where that fails for every `x^2`."""

    def adaptivePredict(self, tokens: Any, decision: int, context: Any) -> int:
        self.predictionMode = PredictionMode.LL if decision in _IN_CONTEXT else PredictionMode.SLL
        return super().adaptivePredict(tokens, decision, context)  # type: ignore[no-any-return]


class _Converter(latex2sympy2._Latex2Sympy):
    """Tries the faster mode first, which either gives the same tree or fails: ANTLR's own way of parsing twice."""

    def create_parser(self, latex: str) -> Any:
        if excess := plain_answers.excess_of_latex(latex):
            raise ValueError(excess)
        parser = super().create_parser(latex)
        _refuse_numbers_in_a_row(parser)
        parser._interp = _Choices(parser, _PARSER.atn, _CHOICES, _PARSER.sharedContextCache)
        try:
            tree = parser.math()
        except MemoryError:
            raise
        except Exception:  # of this mode alone: the usual parser decides
            return super().create_parser(latex)
        parser.math = lambda: tree
        return parser


def _refuse_numbers_in_a_row(parser: Any) -> None:
    """`5 6` is no number, and neither is `1.5.2`: latex2sympy adds or multiplies them."""
    stream = parser.getTokenStream()
    stream.fill()
    before = ""
    for token, following in pairwise(stream.tokens):
        if token.type == following.type == _PARSER.NUMBER and before[:1] not in ("\\", "_", "^", "]"):
            raise ValueError("two numbers in a row")
        before = token.text
    stream.seek(0)


def _different(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    """Whether two differ although math-verify, which chops fractions and leaves out bases, takes them as equal."""
    bases = [isinstance(read[-1], str) and _BASED.fullmatch(read[-1]) for read in (gold, answer)]
    if bases[0] and bases[1] and bases[0].groups() != bases[1].groups():
        return True
    values = []
    for expression in (gold[0], answer[0]):
        if not isinstance(expression, Add | Mul | Pow | Rational) or expression.atoms(Float, UnevaluatedExpr, Symbol):
            return False
        value = expression.doit()
        if not isinstance(value, Rational):
            return False
        values.append(value)
    return bool(values[0] != values[1])


def _equal_if_imaginary(gold: Any, answer: Any) -> bool:
    """Whether two are equal with `i` as the imaginary unit; to math-verify it is a symbol like any other."""
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return False
    letters = {symbol for symbol in gold.free_symbols | answer.free_symbols if symbol.name in ("i", "j", "k")}
    if {symbol.name for symbol in letters} != {"i"}:
        return False  # none, or unit vectors
    first, second = (side.xreplace(dict.fromkeys(letters, I)) for side in (gold, answer))
    return not _is_nonzero(first - second) and bool(verify(first, second, timeout_seconds=None))


def _simplify(difference: Any) -> Any:
    """Math-verify's `simplify`, which only asks it whether a difference is zero: 1 stands for what is surely not."""
    return sympy.S.One if _is_nonzero(difference) else _their_simplify(difference)


def _solve(gold: Any, pred: Any, *precision: int) -> bool:
    r"""Math-verify's, but where both equations say what one symbol is, as `y = c e^x` does, and the values differ.

    Their solutions for any symbol differ then. Its quirks stay: imaginary solutions are dropped, so both have none; it
    compares names without case, and a symbol with a product by their letters, so names of one letter only are judged.
    """
    if isinstance(gold, sympy.Eq) and isinstance(pred, sympy.Eq) and isinstance(gold.lhs, Symbol):
        values = [_value(side) for side in (gold.rhs, pred.rhs)]
        symbols = gold.free_symbols | pred.free_symbols
        names = {symbol.name.lower() for symbol in symbols if _NAME.fullmatch(symbol.name)}
        is_plain = len(names) == len(symbols) and gold.lhs not in gold.rhs.free_symbols | pred.rhs.free_symbols
        is_plain = is_plain and gold.lhs == pred.lhs and all(value == value.real for value in values)
        if is_plain and _is_nonzero(gold.rhs - pred.rhs):
            return False
    return bool(_their_comparison(gold, pred, *precision))


def _is_name(side: Any) -> bool:
    """Whether the left side of an equation says what it is of (`x`, `f(x)`, `AB`, `A/S`), and not `x + y`: then 5 is no
    answer to `x + y = 5`, as it is to math-verify."""
    return bool(_is_expr_of_only_symbols(side)) and not side.has(Add)


def _numeric_eq(gold: Any, pred: Any, *precision: int) -> bool:
    """Math-verify's, but for a gold that it rounds to nothing, which counts with its own six digits."""
    if not _their_numeric_eq(gold, pred, *precision):
        return False
    with contextlib.suppress(Exception):  # no numbers, or whatever sympy raises
        sides = (side.subs(dict.fromkeys(side.free_symbols, 0)) for side in (gold, pred))
        size, other = (complex(side.evalf(_DIGITS)) for side in sides)
        return not 0 < abs(size) < _NOTHING or abs(size - other) <= 1e-6 * abs(size)
    return True


def _is_nonzero(difference: Any) -> bool:
    return _SURELY < abs(_value(difference)) < float("inf")


def _value(expression: Any) -> complex:
    """The value at a point that depends on the symbols' names alone; not a number where it cannot be worked out."""
    with contextlib.suppress(Exception):  # whatever sympy raises
        if all(isinstance(node, _COMMON) for node in sympy.preorder_traversal(expression)):
            symbols = enumerate(sorted(expression.free_symbols, key=str))
            point = {one: Rational(sum(map(ord, one.name)) % 89 + 3 * place + 48, 97) for place, one in symbols}
            return complex(expression.evalf(_DIGITS, subs=point))
    return complex("nan")


def _shown(parsed: Any) -> str:
    return parsed[-1][:_SHOWN] if isinstance(parsed[-1], str) else "[parsed]"


class _TooMuchError(Exception):
    pass


def excess_of_work(parsed: Sequence[Any]) -> str | None:
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
    if isinstance(node, sympy.factorial):
        return _factorial(known[0])
    if isinstance(node, sympy.binomial) and exact:
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
    bits = min(float(total), float(min(chosen, total - chosen)) * math.log2(max(2.0, float(total))))
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


_FORMS = r"""
18 :: 17 ¦ 1,234.5 :: 18 dollars ¦ -\frac{3}{4} :: 0.75 ¦ \frac{\sqrt{3}}{3} :: \frac{1}{\sqrt{3}}
2^{10} :: 3 \times 10^5 ¦ x^2+2x+1 :: (x+1)^2 ¦ \frac{x^2-1}{x-1} :: x+1 ¦ \sin^2 x+\cos^2 x :: \ln 2
\log_2 8 :: e^{2} ¦ 2\pi :: 90^\circ ¦ \binom{5}{2} :: 5! ¦ \sum_{k=1}^{3} k :: \int_0^1 x\,dx
3+4i :: 4i-3 ¦ \{1,2,3\} :: \{3,2,1\} ¦ \{1,2\} :: 1, 2 ¦ (1,2) :: [1,2] ¦ (0,1)\cup(2,3] :: (2,3]\cup(0,1)
(-\infty,3) :: x<3 ¦ 1<x<2 :: (1,2) ¦ 2x+3y=6 :: 4x+6y=12 ¦ x=3 :: x=4
\begin{pmatrix}1&2\\3&4\end{pmatrix} :: \begin{bmatrix}1&2\\3&5\end{bmatrix} ¦ \text{yes} :: \text{(B)}
50\% :: 18 \text{ cm} ¦ \pm 2 :: 2 \text{ or } -2
"""


_PAIRS = [pair.split(" :: ") for line in _FORMS.split("\n")[1:-1] for pair in line.split(" ¦ ")]
_JOBS = [{"reference": f"${one}$", "answer": f"\\boxed{{{other}}}"} for one, two in _PAIRS for other in (one, two)]
# Of the server, before its first worker, for caches that all inherit: a first integral takes ten times as long.
check.chores = [partial(check, job) for job in _JOBS]  # type: ignore[attr-defined]
