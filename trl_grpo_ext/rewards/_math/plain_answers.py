r"""Judge an answer without math-verify: by a verdict that can be proved, or because it is too large to be parsed.

Most completions end in `\boxed{18}` and most references are `18`: then the verdict follows from the regular expressions
of math-verify 0.9 with TRL's settings and its rule for comparing numbers. A box decides wherever there is one, but for
an expression between "final answer is" and "I hope"; a percent sign counts only after an environment; without a box, a
match needs the word "answer" and the beginning of an environment; near decimals are rounded to 6 places.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from ...guard.outcomes import Outcome
from .._judged import too_long

# No leading zeros: as a reference, math-verify reads 07 and cannot read -07.
_INTEGER = r"-?(?:0|[1-9][0-9]{0,29}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,9})"
_DECIMAL = r"-?(?:0|[1-9][0-9]{0,8}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,2})\.[0-9]{1,6}"
_QUOTIENT = r"-?[0-9]{1,15}/[0-9]{1,15}"
_FRACTION = r"-?\\frac\{-?[0-9]{1,15}\}\{[0-9]{1,15}\}"
_ANY_FRACTION = _FRACTION.replace("frac", "[dt]?frac", 1)

_NUMBER = re.compile(rf"{_INTEGER}|{_DECIMAL}|{_QUOTIENT}|{_ANY_FRACTION}")
_UNIT = re.compile(r"\\text\{[ ]?([A-Za-z ]{1,40})\}")
_NOT_UNITS = re.compile(r"and|or|inf|sqrt|percent|pct")  # what math-verify's normalisation rewrites
_CURRENCY = re.compile(r"\A\\?\$")

_REFERENCE = re.compile(
    rf"(?:####[ ])?({_INTEGER}|{_DECIMAL})|({_QUOTIENT}|{_FRACTION})"
    rf"|\$({_NUMBER.pattern})\$|\\boxed\{{({_NUMBER.pattern})\}}|\$\\boxed\{{({_NUMBER.pattern})\}}\$"
)
_OPENS = re.compile(r"\$|\\\[|\\\(|\s\[|\\frac")
_ANSWER = re.compile(r"answer", re.IGNORECASE)
_PERCENT = re.compile(r"%|[Pp]ercent|[Pp]ct")

# Two numbers that are equal when rounded to 6 places are nearer than 1e-6. The rest is for binary floating point.
_MARGIN = Fraction(2, 10**6)

DEEPEST = 40  # brackets within brackets: math-verify's parser needs a dozen Python frames for each
MOST_POWERS = 8  # exponents within exponents, in which its parser's time is exponential
MOST_DIGITS = 2_000  # digits in a row: Python itself refuses to read an integer of more than 4300
LONGEST_ANSWER = 3_000  # characters: its parser takes up to a millisecond for each

_DIGITS = re.compile(rf"[0-9]{{{MOST_DIGITS + 1}}}")
_BRACES = re.compile(r"[{}]")
_BRACKETS = re.compile(r"\\?\^?\\?[{}()\[\]]")
_OPENING = frozenset("{([")
# What is worked out while it is parsed, before its tree can be looked at.
_LARGE_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{\s*[0-9]{7,}\s*\}\s*\{\s*[0-9]{6,}\s*\}")
_DETERMINANT = re.compile(r"\\det|vmatrix")
_MOST_CELLS = 36
# What could end a LaTeX environment inside of a box.
_ENDS = re.compile(r"\$|\\[\])]")
_OPEN_BRACKET = re.compile(r"\s\[")


class PlainNumber(NamedTuple):
    """A number as it was written, without currency, units and box, and whether it has a decimal point."""

    text: str
    value: Fraction
    decimal: bool


def plain_reference(reference: str) -> PlainNumber | None:
    r"""Read a reference that is nothing but a number: `18`, `1,234.5`, `3/4`, `#### 18`, `$18$`, `\boxed{18}`."""
    return _read_reference(reference) if len(reference) <= 100 else None


@lru_cache(maxsize=4096)
def _read_reference(reference: str) -> PlainNumber | None:
    match = _REFERENCE.fullmatch(reference.strip(" \n"))
    return None if match is None else _number(match[match.lastindex or 0])


def plain_answer(text: str) -> PlainNumber | None:
    r"""Read the answer of a completion whose only box holds nothing but a number, with currency or `\text{unit}`."""
    box = only_box(text)
    if box is None or box[1] - box[0] >= 120 or _PERCENT.search(text, box[1]):
        return None
    content = text[slice(*box)].strip(" ")
    unit = _UNIT.search(content)
    if unit is not None:
        if unit.end() != len(content) or _NOT_UNITS.search(unit[1]) or not is_unit(unit[1]):
            return None
        content = content[: unit.start()].rstrip(" ")
    return _number(_CURRENCY.sub("", content, count=1))


def has_no_answer(text: str) -> bool:
    return "\\boxed{" not in text and (_ANSWER.search(text) is None or _OPENS.search(text) is None)


def verdict(reference: PlainNumber, answer: PlainNumber) -> Outcome | None:
    """Compare two numbers as math-verify does; None where it depends on how decimals are rounded."""
    if reference.value == answer.value:
        return Outcome.RIGHT
    if (reference.decimal or answer.decimal) and abs(reference.value - answer.value) < _MARGIN:
        return None
    return Outcome.WRONG


def excess_of_reference(reference: str, max_characters: int) -> str | None:
    size = len(reference)
    return too_long(size, max_characters) if size > max_characters else _excess(reference)


def excess_of_completion(text: str, max_characters: int) -> str | None:
    if len(text) > max_characters:
        return too_long(len(text), max_characters)
    if (box := only_box(text)) is None:
        unclosed = text.rfind("\\boxed{")
        return _excess(text[unclosed:]) if unclosed >= 0 and text.count("{") > text.count("}") + DEEPEST else None
    return excess_of_latex(text[slice(*box)])


def excess_of_latex(latex: str) -> str | None:
    """What makes LaTeX that is an answer too much for the parser, wherever it stands in the completion."""
    if len(latex) > LONGEST_ANSWER:
        return f"an answer of {len(latex)} characters, more than {LONGEST_ANSWER}"
    return _excess(latex)


def answer_alone(text: str) -> str:
    """The completion's box alone where it is surely all that math-verify reads, else the whole completion."""
    box = only_box(text)
    content = "" if box is None else text[slice(*box)]
    if box is None or not content.strip() or _ENDS.search(content) or _PERCENT.search(text, box[1]):
        return text
    if "]" in content and _OPEN_BRACKET.search(text, 0, box[0]):
        return text
    return f"\\boxed{{{content}}}"


def only_box(text: str) -> tuple[int, int] | None:
    r"""Where the content of the only `\boxed{...}` begins and ends; None where math-verify might read another."""
    start = text.find("\\boxed{")
    if start < 0 or text.count("\\boxed") > 1 or "\\fbox" in text or "I hope" in text:
        return None
    start += len("\\boxed{")
    depth = 1
    for brace in _BRACES.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start, brace.start()
    return None


def _number(text: str) -> PlainNumber | None:
    if _NUMBER.fullmatch(text) is None:
        return None
    digits = text.replace(",", "")
    if "/" in digits or "\\" in digits:
        above, below = re.findall(r"-?[0-9]+", digits)
        if int(below) == 0 or int(above) == 0:
            return None
        sign = -1 if digits.startswith("-\\") else 1
        return PlainNumber(text, sign * Fraction(int(above), int(below)), decimal=False)
    return PlainNumber(text, Fraction(digits), decimal="." in digits)


def _excess(expression: str) -> str | None:
    if _DIGITS.search(expression):
        return f"more than {MOST_DIGITS} digits in a row"
    if _LARGE_BINOMIAL.search(expression):
        return "a binomial coefficient with too many digits"
    if _DETERMINANT.search(expression) and expression.count("&") + expression.count("\\\\") >= _MOST_CELLS:
        return f"a determinant with more than {_MOST_CELLS} cells"
    is_power: list[bool] = []
    for bracket in _BRACKETS.finditer(expression):
        if bracket[0][-1] in _OPENING:
            is_power.append("^" in bracket[0])
            if len(is_power) > DEEPEST:
                return f"brackets more than {DEEPEST} deep"
            if sum(is_power) > MOST_POWERS:
                return f"powers more than {MOST_POWERS} deep"
        elif is_power:
            is_power.pop()
    return None


_NAMES = r"""
mm cm dm m km in inch inches ft foot feet yd yard yards mi mile miles mg g gm kg t ton tons tonne tonnes lb lbs pound
pounds oz ounce ounces ms s sec secs second seconds min mins minute minutes h hr hrs hour hours d day days week weeks
month months yr yrs year years L l mL ml liter liters litre litres gal gallon gallons N kN J kJ W kW Pa kPa atm K Hz
kHz MHz V mV A mA C F T mol eV keV MeV rad radian radians degree degrees deg cc sq square cubic cu unit units meter
meters metre metres centimeter centimeters kilometer kilometers kilogram kilograms gram grams dollar dollars cent cents
euro euros rupee rupees Rs rs USD EUR GBP mph kmph per am pm
"""
_UNITS = re.compile(rf"(?:{'|'.join(_NAMES.split())})\.?(?:\^?\{{?-?[23]\}}?|[²³])?")
_WORDS = re.compile(r"[A-Za-z][a-z]+(?:[ -][A-Za-z]?[a-z]+){0,4}\.?")
_SAID = re.compile(
    r"\b(?:no|not|non|never|and|or(?! so\b)|but|than|least|most|over|under|above|below|up|between|is|are|was|were|be|if"
    r"|when|where|unless|otherwise|dozens?|hundreds?|thousands?|millions?|billions?|trillions?|hal(?:f|ves)|thirds?"
    r"|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|squared|cubed|factorial|plus|minus|mod"
    r"|modulo|base|inf|sqrt)\b",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"[\s~/·*]|\\[,;:! ]|\\cdot|\\times")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")


def is_unit(words: str, quantity: str = "") -> bool:
    """Whether words after a quantity name what it counts: after a number any noun, after letters a unit alone."""
    parts = [part for part in _BETWEEN.split(words) if part]
    if all(_UNITS.fullmatch(part) for part in parts):
        return True
    counts = _WORDS.fullmatch(words.strip()) is not None and _SAID.search(words) is None
    return counts and _LETTER.search(quantity) is None
