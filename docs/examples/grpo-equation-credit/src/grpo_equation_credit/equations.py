r"""The equations in a text, and whether they hold. Exact, without `eval`, and in time linear in the text.

An equation is `48/2 = 24`, `$3 x 4 = $12`, GSM8K's `<<48/2=24>>`, or a chain `2 + 3 = 5 = 10/2`, of which each part is
one. A side is made of decimal numbers (thousands separators, a currency sign before, a percent sign after), `+ - * /`
with their typographic forms and `x`, and parentheses. One side at least must calculate something. Between `=` and the
result GSM8K's annotation may stand: `48/2 = <<48/2=24>>24`.

What cannot be read for certain is no equation: powers, letters, products without a sign, `10 + 20%`, a side that goes
on in words ("= 7 - he"), numbers of more than 20 characters, sides of more than 64 signs or 200 characters.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

_LONGEST_SIDE = 200
_MOST_TOKENS = 64
_LONGEST_NUMBER = 20
_SIGNS = r"0-9.,$€£%()+\-−–*x×·/÷ \t"
_OF_SIDE = re.compile(f"[{_SIGNS}]")
_RUN = re.compile(f"[{_SIGNS}]{{0,{_LONGEST_SIDE + 1}}}")
_GAP = re.compile(r"[ \t]*(?:<<[^<>\n]{0,200}>>)?")
_TOKEN = re.compile(
    r"""[ \t]*(?:
        [$€£]?(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?|\.\d+)(?P<percent>%?)
        |(?P<sign>[-+−–*×·/÷()]|(?<![A-Za-z])x(?![A-Za-z]))
    )""",
    re.VERBOSE | re.ASCII,
)
_OPERATORS = {"+": "+", "-": "-", "−": "-", "–": "-", "*": "*", "x": "*", "×": "*", "·": "*", "/": "/", "÷": "/"}
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2, "negative": 3}


@dataclass(frozen=True)
class Equation:
    """One equation of a text.

    Attributes:
        start: Where its first character stands.
        end: The place after its last character.
        result: Where its right-hand side begins.
        holds: Whether both sides are equal, or equal when the left one is rounded to the right one's decimal places.
        sides: Both sides, however their numbers were written, for telling whether it was there before.
    """

    start: int
    end: int
    result: int
    holds: bool
    sides: tuple[str, str]


class _Token(NamedTuple):
    kind: str  # "number", "(", ")" or an operator
    start: int
    end: int
    value: Fraction = Fraction(0)
    decimals: int | None = None  # None: a percentage, which is not rounded


def find_equations(text: str) -> list[Equation]:
    """The equations of a text, by the place of their `=`."""
    return [found for place in _equals_signs(text) if (found := _equation_at(text, place)) is not None]


def _equals_signs(text: str) -> Iterator[int]:
    for match in re.finditer(r"(?<![=<>!:])=(?![=>])", text):
        yield match.start()


def _equation_at(text: str, place: int) -> Equation | None:
    left = _left_side(text, place)
    right = _right_side(text, place + 1)
    if left is None or right is None or not (_calculates(left) or _calculates(right)):
        return None
    sides = (_plain(left), _plain(right))
    if sides[0] == sides[1]:
        return None
    try:
        holds = abs(_value(left) - _value(right)) <= _rounding(right)
    except ZeroDivisionError:
        holds = False
    return Equation(left[0].start, right[-1].end, right[0].start, holds, sides)


def _left_side(text: str, end: int) -> list[_Token] | None:
    start = end
    while start > 0 and end - start <= _LONGEST_SIDE and _OF_SIDE.match(text[start - 1]):
        start -= 1
    if end - start > _LONGEST_SIDE:
        return None
    tokens, stop = _tokens(text, start, end)
    while stop < end:  # something that is no token, such as a full stop: the side begins after it
        if text[stop] in ".,$" and text[stop + 1].isdigit() and tokens and tokens[-1].end == stop:
            return None  # "5,3": a number of another country
        tokens, stop = _tokens(text, stop + 1, end)
    while tokens and tokens[0].kind == ")":  # "a) 3 + 4"
        tokens = tokens[1:]
    # Of "in 2019 3 + 4" the side is what follows the last place where no operator stands between two operands.
    for i in range(len(tokens) - 1, 0, -1):
        if _adjacent(tokens[i - 1], tokens[i]):
            if tokens[i].kind == "(" or tokens[i - 1].end == tokens[i].start:
                return None  # "2 (3 + 4)": a product without a sign
            tokens = tokens[i:]
            break
    while tokens and tokens[0].kind == "(" and _depth(tokens) > 0:  # "(3 + 4 = 7)"
        tokens = tokens[1:]
    return tokens if _readable(tokens) else None


def _right_side(text: str, start: int) -> list[_Token] | None:
    gap = _GAP.match(text, start)
    start = gap.end() if gap else start
    run = _RUN.match(text, start)
    end = run.end() if run else start
    if end - start > _LONGEST_SIDE:
        return None
    tokens, _ = _tokens(text, start, end)
    for i in range(1, len(tokens)):
        if _adjacent(tokens[i - 1], tokens[i]):
            if tokens[i - 1].end == tokens[i].start:
                return None
            tokens = tokens[:i]  # "= 7 (which is odd)"
            break
    while tokens and tokens[-1].kind == ")" and _depth(tokens) < 0:  # "(3 + 4 = 7)"
        tokens = tokens[:-1]
    return tokens if _readable(tokens) else None


def _tokens(text: str, start: int, end: int) -> tuple[list[_Token], int]:
    """The tokens from `start`, and where the first thing stands that is none. No token reaches beyond `end`."""
    tokens: list[_Token] = []
    while start < end and (match := _TOKEN.match(text, start, end + 1)):
        number, sign = match["number"], match["sign"]
        if number is None:
            kind = sign if sign in "()" else _OPERATORS[sign]
            tokens.append(_Token(kind, match.start("sign"), match.end()))
        elif len(number) > _LONGEST_NUMBER:
            return [], end
        else:
            decimals = None if match["percent"] else len(number.partition(".")[2])
            value = Fraction(number.replace(",", "")) / (100 if match["percent"] else 1)
            first = match.start() + len(match[0]) - len(match[0].lstrip(" \t"))
            tokens.append(_Token("number", first, match.end(), value, decimals))
        start = match.end()
    if not text[start:end].strip():
        start = end
    return tokens, start


def _adjacent(before: _Token, after: _Token) -> bool:
    return before.kind in ("number", ")") and after.kind in ("number", "(")


def _depth(tokens: Sequence[_Token]) -> int:
    return sum((token.kind == "(") - (token.kind == ")") for token in tokens)


def _calculates(tokens: Sequence[_Token]) -> bool:
    """Whether there is an operation, and not only a sign."""
    return any(b.kind in _RANK and a.kind in ("number", ")") for a, b in itertools.pairwise(tokens))


def _readable(tokens: Sequence[_Token]) -> bool:
    """Whether the tokens are one expression, and mean one thing only."""
    if not tokens or len(tokens) > _MOST_TOKENS:
        return False
    if tokens[0].kind == "-" and len(tokens) > 1 and tokens[0].end != tokens[1].start:
        return False  # "apples - 3 + 4": who knows what comes before
    percentages = [token.decimals is None for token in tokens if token.kind == "number"]
    if len(set(percentages)) > 1 and any(token.kind in ("+", "-") for token in tokens):
        return False  # "10 + 20%": of one, or of ten?
    depth, operand = 0, False  # whether an operand has just ended
    for kind in (token.kind for token in tokens):
        depth += (kind == "(") - (kind == ")")
        if depth < 0:
            return False
        if kind in ("number", "("):
            if operand:
                return False
            operand = kind == "number"
        elif operand:
            operand = kind == ")"
        elif kind != "-":
            return False
    return operand and depth == 0


def _value(tokens: Sequence[_Token]) -> Fraction:
    """Evaluate an expression with the usual precedence (Dijkstra's shunting yard); no recursion.

    Raises:
        ZeroDivisionError: It divides by zero.
    """
    values: list[Fraction] = []
    waiting: list[str] = []
    operand = False
    for token in tokens:
        kind = token.kind
        if kind == "number":
            values.append(token.value)
        elif kind == "(":
            waiting.append(kind)
        elif kind == ")":
            while waiting[-1] != "(":
                _apply(waiting.pop(), values)
            waiting.pop()
        elif not operand:
            waiting.append("negative")
            continue
        else:
            while waiting and waiting[-1] != "(" and _RANK[waiting[-1]] >= _RANK[kind]:
                _apply(waiting.pop(), values)
            waiting.append(kind)
        operand = kind in ("number", ")")
    while waiting:
        _apply(waiting.pop(), values)
    return values[0]


def _apply(operator: str, values: list[Fraction]) -> None:
    right = values.pop()
    if operator == "negative":
        values.append(-right)
        return
    left = values.pop()
    if operator == "+":
        values.append(left + right)
    elif operator == "-":
        values.append(left - right)
    elif operator == "*":
        values.append(left * right)
    else:
        values.append(left / right)


def _rounding(right: Sequence[_Token]) -> Fraction:
    """How far the sides may be apart: half a unit of the last decimal place of a single number, such as 3.33."""
    numbers = [token for token in right if token.kind == "number"]
    if len(numbers) != 1 or any(token.kind not in ("number", "-", "(", ")") for token in right):
        return Fraction(0)
    decimals = numbers[0].decimals
    return Fraction(1, 2 * 10**decimals) if decimals else Fraction(0)


def _plain(tokens: Sequence[_Token]) -> str:
    return "".join(f"[{token.value}]" if token.kind == "number" else token.kind for token in tokens)
