r"""What a reference is read as. The reading covers all of it, or there is none and a sentence that says why.

It is what the reference marks as its answer (the last box, else what follows the last `####`, `<answer>` or "the answer
is"), read as a whole: math-verify itself takes the last number of what it cannot parse, 0 for `3x-y+13=0`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PLAIN = 300  # math-verify's priority of what stands without a word such as "answer"
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARK = re.compile(r"####|<answer>|\banswer(?:\s+is|\s*:|\s+is\s*:)(?!\w)", re.IGNORECASE)
_AROUND = re.compile(r"(?:</answer>|[\s*_`]|(?<!\.)\.(?=[\s*_`]*$))*\Z")
_TWO_NUMBERS = re.compile(r"\d\s+\.?\d")
_DELIMITERS = re.compile(r"(?<!\\)\$+|\\[()\[\]]")
_MONEY = re.compile(r"(?:\\?\$|[€£¥₹])\s?(?=-?[\d.])|(?<=\d)\s?[€£¥₹]")
_QUANTITY = re.compile(r"(-?[\d.,/]*\d\s?(?:\\?%)?)\s*([A-Za-z].*)", re.DOTALL)
_GROUPS = re.compile(r"\\(?:text|mbox|math|operatorname|begin|end)\w*\s*\{[^{}]*\}")
_COMMANDS = re.compile(r"\\[A-Za-z]+")
_FUNCTIONS = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|sqrt|max|min|gcd|lcm|mod|det|lim|pi|inf|infinity|and|or|[ckmd]m|kg|ft"
)
_PROSE = re.compile(
    r"[A-Za-z]{3,}|(?<![A-Za-z])(?:[iI]s|of|to|in|at|if|[nN]o|it|as|by|on|an|be|we|he|so|do|my|up|us)(?![A-Za-z])"
)
_SIGNS = re.compile(r"[\d\\^_=<>+*/|≤≥√π∞²³-]|\w\(|[(\[{].*,")
_LABEL = re.compile(r"(?:^|\s)(?:\([A-Za-z]\)|[A-Za-z0-9]\)|[A-Z]:)\s")
_PICKED = "only a number could be picked out of it; put the answer in dollars or \\boxed{} if it is more than that"
_NO_MATHS = "no mathematics; put it in dollars or \\boxed{}, words as \\boxed{\\text{...}}"
_MORE = "only a part of it is in dollars; put all of the answer in one \\boxed{}"


@dataclass(frozen=True)
class Reference:
    """What was read, as math-verify has it, what was left over of the text, and why nothing was read."""

    gold: tuple[Any, ...] = ()
    left: str = ""
    why: str = ""


def read(text: str, expressions: list[Any], extract: Callable[..., list[Any]]) -> Reference:
    """Read a reference; `expressions` are math-verify's for LaTeX and for plain numbers, `extract` applies them."""
    latex, numbers = expressions[:1], expressions[1:]
    if _BOXED.search(text):
        return Reference(tuple(extract(text, latex, "first_match")))
    mark = max(_MARK.finditer(text), key=lambda match: match.end(), default=None)
    answer = _AROUND.sub("", text[mark.end() if mark else 0 :].strip()).lstrip(" *_`\n:")
    environment = next(pattern for pattern, priority in latex[0][0] if priority == _PLAIN)
    match = environment.match(answer)
    if match and match.lastgroup != "first_latexFraction" and not answer.startswith(("\\frac", "-\\frac")):
        rest = answer[match.end() :].strip().rstrip(".").strip()
        if not rest or is_unit(rest, _DELIMITERS.sub("", match[0])):
            gold = extract(match[0], latex, "first_match")
            return Reference(tuple(gold), rest)
    had_dollars = match is not None or environment.search(answer) is not None
    answer = _MONEY.sub("", _DELIMITERS.sub(" ", answer) if had_dollars else answer).strip()
    if not _TWO_NUMBERS.search(answer) and any(
        priority == _PLAIN and pattern.fullmatch(answer) for pattern, priority in numbers[0][0]
    ):
        return Reference(tuple(extract(answer, numbers, "any_match")))
    words = _COMMANDS.sub(" ", _GROUPS.sub(" ", answer))
    prose = [word for word in _PROSE.findall(words) if not _FUNCTIONS.fullmatch(word)]
    if not prose and _SIGNS.search(answer) is not None and _LABEL.search(answer) is None:
        return Reference(tuple(extract(f"$${answer}$$", latex, "first_match")))
    quantity = _QUANTITY.fullmatch(answer)
    if quantity and is_unit(quantity[2]):
        inner = read(quantity[1], expressions, extract)
        return Reference(inner.gold, quantity[2], inner.why)
    if had_dollars:
        return Reference(left=text, why=_MORE)
    return Reference(left=text, why=_PICKED if re.search(r"\d", answer) else _NO_MATHS)


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
