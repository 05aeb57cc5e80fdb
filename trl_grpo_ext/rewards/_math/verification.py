r"""A worker's task for `math_accuracy`: call math-verify exactly as TRL's `accuracy_reward` does.

Only the server that forks the workers imports this, and with it sympy. A worker that takes too long is killed.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from antlr4.atn.ParserATNSimulator import ParserATNSimulator
from antlr4.atn.PredictionMode import PredictionMode
from antlr4.dfa.DFA import DFA
from latex2sympy2_extended import NormalizationConfig, latex2sympy2
from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parser, verify
from math_verify.parser import extract_target_from_pred, get_extraction_regexes
from sympy import Add, Expr, FiniteSet, Float, I, Mul, Pow, Rational, Symbol
from sympy.core.expr import UnevaluatedExpr

from . import differences, notation, references
from .work import excess_of_work

for _name in ("math_verify.parser", "math_verify.grader", "latex2sympy2_extended.math_normalization"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # "Timeout is disabled", once per worker

_REFERENCE = get_extraction_regexes([LatexExtractionConfig(), ExprExtractionConfig()])
_ANSWER = get_extraction_regexes(
    [
        LatexExtractionConfig(
            normalization_config=NormalizationConfig(units=True),
            boxed_match_priority=0,
            try_extract_without_anchor=False,
        )
    ]
)
_PROBE = "x \\boxed{7}"
_SHOWN = 200
_AS_TEXT = "math-verify cannot parse it, and the answer is not the same text"
_SPACE = re.compile(r"(?<![A-Za-z0-9\\])\s+|\s+(?![A-Za-z0-9])")
_BASED = re.compile(r"\(?([0-9A-Za-z]+)\)?_\{?([0-9]{1,2})\}?")
_PARSER = latex2sympy2.PSParser
_STATES = _PARSER.atn.decisionToState
_CHOICES = [DFA(state, decision) for decision, state in enumerate(_STATES)]
_IN_CONTEXT = {decision for decision, state in enumerate(_STATES) if _PARSER.ruleNames[state.ruleIndex] == "atom_expr"}
_UNPARSED = Symbol("unparsed")


def check(job: Mapping[str, Any]) -> dict[str, str]:
    """Judge `answer`, a completion's text, or without one see whether `reference` alone can be parsed and compared.

    Equal texts are right without being parsed, as they are to math-verify, which compares texts last. Of a reference
    alone that is in order the outcome is "scored". Sympy's own spelling is not asked for: writing out a million digits
    never returns.
    """
    with replaced():
        return _checked(job)


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Math-verify with our parts, for as long as the block runs: whoever else uses it in this process has its own."""
    ours = [
        *((grader, name, part) for name, part in differences.REPLACED.items()),
        (parser, "normalize_latex", notation.normalize),
        (latex2sympy2, "_Latex2Sympy", _Converter),
    ]
    theirs = [getattr(module, name) for module, name, _ in ours]
    for module, name, part in ours:
        setattr(module, name, part)
    try:
        yield
    finally:
        for (module, name, _), part in zip(ours, theirs, strict=True):
            setattr(module, name, part)


def _checked(job: Mapping[str, Any]) -> dict[str, str]:
    reference, text = job["reference"], job.get("answer", _PROBE)
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
        return {"outcome": "unparseable_reference", "detail": _AS_TEXT, **read}
    if excess := excess_of_work(answer):
        return {"outcome": "refused", "detail": excess, "found": _shown(answer), **read}
    right = verify(list(gold), answer, timeout_seconds=None) and not _different(gold, answer)
    if "answer" not in job:
        return {"outcome": "scored", **read}
    right = right or _equal_if_imaginary(gold[0], answer[0])
    return {"outcome": "right" if right else "wrong", "found": _shown(answer), **read}


def _parsed(text: str, expressions: list[Any], mode: str) -> list[Any]:
    """Math-verify's `parse`, which would build its regular expressions again for each configuration."""
    try:
        found: list[Any] = extract_target_from_pred(
            text, expressions, fallback_mode="first_match", extraction_mode=mode
        )
    except MemoryError:
        raise  # the worker says so, and its successor tries again
    except Exception:  # as math-verify's own `parse`: an expression that breaks its parser is no expression
        return []
    return found


@lru_cache(maxsize=1024)
def _reference(text: str) -> references.Reference:
    return references.read(text, _REFERENCE, _parsed)


@lru_cache(maxsize=1024)
def _reference_text(text: str) -> str:
    return _text(lambda: references.read(text, _REFERENCE, _parsed).gold)


def _text(extract: Callable[[], Sequence[Any]]) -> str:
    """The one LaTeX that math-verify reads, normalised, without parsing it; empty where it reads none or several."""
    parse_latex = parser.parse_latex_cached
    parser.parse_latex_cached = lambda latex: _UNPARSED
    try:
        found = extract()
    finally:
        parser.parse_latex_cached = parse_latex
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
    """Whether two differ although math-verify takes them as equal.

    It compares exact fractions by `evalf(chop=True)`, and reads `1010_2` as 1010, whatever the base.
    """
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
    if differences.is_nonzero(first - second):
        return False
    return bool(verify(first, second, timeout_seconds=None))


def _shown(parsed: Any) -> str:
    return parsed[-1][:_SHOWN] if isinstance(parsed[-1], str) else "[parsed]"


_FORMS = r"""
18 :: 17 ¦ 1,234.5 :: 18 dollars ¦ -\frac{3}{4} :: 0.75 ¦ \frac{\sqrt{3}}{3} :: \frac{1}{\sqrt{3}}
2^{10} :: 3 \times 10^5 ¦ x^2+2x+1 :: (x+1)^2 ¦ \frac{x^2-1}{x-1} :: x+1 ¦ \sin^2 x+\cos^2 x :: \ln 2
\log_2 8 :: e^{2} ¦ 2\pi :: 90^\circ ¦ \binom{5}{2} :: 5! ¦ \sum_{k=1}^{3} k :: \int_0^1 x\,dx
3+4i :: 4i-3 ¦ \{1,2,3\} :: \{3,2,1\} ¦ \{1,2\} :: 1, 2 ¦ (1,2) :: [1,2] ¦ (0,1)\cup(2,3] :: (2,3]\cup(0,1)
(-\infty,3) :: x<3 ¦ 1<x<2 :: (1,2) ¦ 2x+3y=6 :: 4x+6y=12 ¦ x=3 :: x=4
\begin{pmatrix}1&2\\3&4\end{pmatrix} :: \begin{bmatrix}1&2\\3&5\end{bmatrix} ¦ \text{yes} :: \text{(B)}
50\% :: 18 \text{ cm} ¦ \pm 2 :: 2 \text{ or } -2
"""
"""Pairs of the usual forms."""


def _try(pair: str) -> None:
    """Fill caches that later workers inherit: a first integral takes ten times as long."""
    first, second = pair.split(" :: ")
    for other in (first, second):
        check({"reference": f"${first}$", "answer": f"\\boxed{{{other}}}"})


_CHORES = [partial(_try, pair) for line in _FORMS.split("\n")[1:-1] for pair in line.split(" ¦ ")]
check.chores = _CHORES  # type: ignore[attr-defined]  # of the server, before its first worker
