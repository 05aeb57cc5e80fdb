r"""What a reference is read as. The reading covers all of it, or there is none and a sentence that says why.

It is what the reference marks as its answer (the last box, else what follows the last `####`, `<answer>` or "the answer
is"), read as a whole: math-verify itself takes the last number of what it cannot parse, 0 for `3x-y+13=0`.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from latex2sympy2_extended import math_normalization, normalize_latex

from .plain_answers import LONGEST_ANSWER, is_unit

_PLAIN = 300  # math-verify's priority of what stands without a word such as "answer"
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARK = re.compile(r"####|<answer>|\banswer(?:\s+is|\s*:|\s+is\s*:)(?!\w)", re.IGNORECASE)
_AROUND = re.compile(r"(?:</answer>|[\s*_`]|(?<!\.)\.(?=[\s*_`]*$))*\Z")
_TWO_NUMBERS = re.compile(r"\d\s+\.?\d")
# `3,5`, not `1,234`: to math-verify it is 3.5, which only an amount is, such as `3,5%` or `3,50 euros`.
_LIST = re.compile(r"-?(?![1-9]\d{0,2}(?:,\d{3})+\Z)\d+(?:,\d+)+")
_DELIMITERS = re.compile(r"(?<!\\)\$+|\\[()\[\]]")
_MONEY = re.compile(r"(?:\\?\$|[€£¥₹])\s?(?=-?[\d.])|(?<=\d)\s?[€£¥₹]")
_QUANTITY = re.compile(r"(-?[\d.,/]*\d\s?(?:\\?%)?)\s*([A-Za-z].*)", re.DOTALL)
_GROUPS = re.compile(r"\\(?:text|mbox|math|operatorname|begin|end)\w*\s*\{[^{}]*\}(?:\s*\{[clr| ]*\})?")
_COMMANDS = re.compile(r"\\[A-Za-z]+")
_NAMES = "ln|log|exp|sqrt|max|min|gcd|lcm|mod|det|lim|pi|inf|infinity|and|or|[ckmd]m|kg|ft"
_FUNCTIONS = re.compile(rf"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|{_NAMES}")
_SHORT = r"[iI]s|of|to|in|at|if|[nN]o|it|as|by|on|an|be|we|he|so|do|my|up|us"
_PROSE = re.compile(rf"[A-Za-z]{{3,}}|(?<![A-Za-z])(?:{_SHORT})(?![A-Za-z])")
_SIGNS = re.compile(r"[\d\\^_=<>+*/|≤≥√π∞²³-]|\w[(!:]|[(\[{].*,")
# `(a) 5`, `b) 5` where no bracket is open, `C: 5`; not `\cos (x) e^x`, `(n) + 1`, `\forall x \in A: x > 0`.
_APPLIED = re.compile(r"\\[A-Za-z]+\s*(?:\([A-Za-z]\)|[A-Z]:)|[-+*/=(,|<>]\s*\([A-Za-z]\)")
_LABEL = re.compile(
    r"(?P<label>(?:^|\s)(?:\([A-Za-z]\)\s+(?![=+*/^<>,)\]}|!])|[A-Z]:\s))"
    r"|(?P<closed>(?:^|(?<=\s))[A-Za-z0-9]\)(?=\s))|[()\[\]]"
)
_IN_ONE_BOX = "put all of the answer in one \\boxed{}, words as \\boxed{\\text{...}}"

# Notation that math-verify's normalisation loses or misreads is rewritten before it, for references and answers alike.
# What cannot be rewritten stays, so that its parser says whether it is read.
_GAP = r"(?:\\[,;:! ]|~|[ \u00a0\u2009\u202f])"
_TEXT = re.compile(r"(\\(?:text|mbox|mathrm|mathbf|operatorname)\w*\s*\{[^{}]*\})")
_MIXED = re.compile(rf"(?<![\d.,/^_{{])(\d{{1,9}}){_GAP}+(\d{{1,9}})\s*/\s*(\d{{1,9}})(?![\d/])")
_GROUPED = re.compile(rf"(?<![\d.,^_{{])([1-9]\d{{0,2}})((?:{_GAP}\d{{3}})+)(?!\d)")
_REPEATING = re.compile(r"(\d{1,40})\.(\d{0,40})(?:\\(?:overline|bar|dot)\s*\{(\d{1,40})\}|(?<=\.)\((\d{1,40})\))")
_DEGREES = r"(?:\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\u00b0)"
_PRIME = r"(?:'|\u2032|\^\s*\{?\s*\\prime\s*\}?)"
_MINUTES = re.compile(rf"(\d{{1,9}}){_DEGREES}\s*(\d{{1,2}}){_PRIME}(?!{_PRIME})(?:\s*(\d{{1,2}}){_PRIME}{{2}})?")
_PRIMES = re.compile(r"(?<=[A-Za-z)\]}])('+)(?![A-Za-z])")
_DOTS = re.compile(r"\\(?:[lchd]?dots|dots[cbmio])(?![A-Za-z])|\.\.\.|\u2026")
_POWER_OF_TEN = re.compile(r"(?<![A-Za-z_\d])(-?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?![\w.])")
_NAME = re.compile(r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|pi)(?![A-Za-z])")
_ROOT = re.compile(r"\u221a\s*(?:(\d+|[A-Za-z])|\(([^()]*)\))")
_CHARACTERS = str.maketrans(
    {"\u00b2": "^{2}", "\u00b3": "^{3}", "\u2212": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00b1": r"\pm "}
    | {"\u00f7": r"\div ", "\u221e": r"\infty ", "\u00b0": r"^{\circ}"}
)
_DECIMAL_GOES_ON = re.compile(rf"(\d\.\d+)\s*(?:{_DOTS.pattern})\s*$")
_UNREADABLE = r"\\uncertain "

_END = re.compile(
    r"(?P<quantity>.*?[^\s^_\\~])(?:\\[,;:! ]|[\s~])*"
    r"(?P<words>\\(?:text|mbox|mathrm|textrm|rm)\s*\{(?:[^{}]*)\}(?:\^\s*\{?-?\d\}?|\{\^\d\}|\\[,;:! ]|[\s~]|/|\\cdot"
    r"|\\(?:text|mbox|mathrm|textrm|rm)\s*\{[^{}]*\})*)[\s.]*",
    re.DOTALL,
)
_WRAPPER = re.compile(r"\\(?:text|mbox|mathrm|textrm|rm)(?![A-Za-z])|[{}^]|(?<=[\s{^])-?\d")
_ANGLES = re.compile(r"\\langle(.*?)\\rangle", re.DOTALL)
_EMPTY = re.compile(r"\\varnothing(?![A-Za-z])")
_BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_FRACTION = re.compile(rf"\\[dtc]?frac\s*(?:(\d)|({_BRACED}))\s*(?:(\d)|({_BRACED}))")
_BARE_ROOT = re.compile(r"\\sqrt\s*(\d|[A-Za-z](?![A-Za-z]))")
_FEET = re.compile(r"(?<=\d)\s*['\u2032]\s*(?=\d)")
_SIGN = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_NO_UNITS = re.compile(r".{1,2}|multiple|prime|ratio|pure|square|cube|cubic|more|less")
_BARE = [name for name in math_normalization.units if not _NO_UNITS.fullmatch(name)]
_BARE += ["cm", "mm", "km", "dm", "kg", "gm", "ft", "lb", "hr", "yr", "sq"]
_BARE_END = re.compile(rf"(\d|\}}|\s)\s*(?:{'|'.join(sorted(_BARE, key=len, reverse=True))})(?:s|es)?\s*$")


class Reference(NamedTuple):
    """What was read, as math-verify has it, what was left over of the text, and why nothing was read."""

    gold: tuple[Any, ...] = ()
    left: str = ""
    why: str = ""


def read(text: str, expressions: list[Any], extract: Callable[..., list[Any]], is_amount: bool = False) -> Reference:
    """Read a reference; `expressions` are math-verify's for LaTeX and for plain numbers, `extract` applies them."""
    latex = expressions[:1]
    numbers = expressions[1:]
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
    answer = (_DELIMITERS.sub(" ", answer) if had_dollars else answer).strip()
    is_list = _LIST.fullmatch(answer) is not None and not is_amount
    answer = _MONEY.sub("", answer).strip()
    plain = any(priority == _PLAIN and pattern.fullmatch(answer) for pattern, priority in numbers[0][0])
    if plain and not is_list and not _TWO_NUMBERS.search(answer):
        return Reference(tuple(extract(answer, numbers, "any_match")))
    words = _COMMANDS.sub(" ", _GROUPS.sub(" ", answer))
    prose = [word for word in _PROSE.findall(words) if not _FUNCTIONS.fullmatch(word)]
    label = _label(answer)
    has_signs = _SIGNS.search(answer) is not None
    if has_signs and not prose and not label:
        return Reference(tuple(extract(f"$${answer}$$", latex, "first_match")))
    quantity = _QUANTITY.fullmatch(answer)
    if quantity and is_unit(quantity[2]):
        inner = read(quantity[1], expressions, extract, is_amount=True)
        return Reference(inner.gold, quantity[2], inner.why)
    why = "no digit and no sign of mathematics"
    if prose or label:
        why = f"{', '.join(map(repr, prose[:3])) or repr(label)} may be {'words' if prose else 'a label'}"
    return Reference(left=text, why=f"{why}; {_IN_ONE_BOX}")


def _label(text: str) -> str:
    opened = 0
    for match in _LABEL.finditer(_APPLIED.sub("", text)):
        if match["label"] or (match["closed"] and opened <= 0):
            return match[0].strip()
        opened += 1 if match[0] in "([" else -1
    return ""


def normalize(text: str, config: Any) -> str:
    """`normalize_latex` of what is rewritten, without its own units."""
    if config.boxed in ("all", "last"):
        text = math_normalization.extract_boxed_content(text, mode=config.boxed)
    if len(text) > 10 * LONGEST_ANSWER:  # it is never parsed
        return text
    text = "".join(part if place % 2 else _rewritten(part) for place, part in enumerate(_TEXT.split(text)))
    text = _both_signs(text)
    end = _END.fullmatch(text) if config.units else None
    if end and is_unit(_WRAPPER.sub(" ", end["words"]), end["quantity"]):
        text = end["quantity"]
    done: str = normalize_latex(text, config=replace(config, boxed="none", units=False))
    if config.units:
        for _ in range(2):
            done = _BARE_END.sub(r"\1", done).strip() or done
    return done


def _rewritten(text: str) -> str:
    rules: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
        (_MINUTES, lambda m: _fraction(int(m[1]) + Fraction(int(m[2]), 60) + Fraction(int(m[3] or 0), 3600))),
        (_POWER_OF_TEN, r"\1\\times 10^{\2}"),
        (_NAME, r"\\\1 "),
        (_ROOT, lambda match: f"\\sqrt{{{match[1] or match[2]}}}"),
        (_REPEATING, _repeating),
        (_BARE_ROOT, r"\\sqrt{\1}"),
        (_FRACTION, lambda m: f"\\frac{m[2] or f'{{{m[1]}}}'}{m[4] or f'{{{m[3]}}}'}"),
        (_FEET, _UNREADABLE),
        (_MIXED, r"\1\\frac{\2}{\3}"),
        (_GROUPED, lambda match: match[1] + re.sub(r"\D", "", match[2])),
        (_PRIMES, lambda match: "^{" + r"\prime" * len(match[1]) + "}"),
        (_ANGLES, r"(\1)"),
        (_EMPTY, r"\\emptyset "),
        (_DECIMAL_GOES_ON, r"\1"),
        (_DOTS, _UNREADABLE),
    ]
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text.translate(_CHARACTERS)


def _fraction(value: Fraction) -> str:
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _repeating(match: re.Match[str]) -> str:
    whole = match[1]
    once = match[2]
    again = match[3] or match[4]
    return _fraction(Fraction(int(whole + once + again) - int(whole + once), 10 ** len(once) * (10 ** len(again) - 1)))


def _both_signs(text: str) -> str:
    r"""`x=\frac{1 \pm \sqrt{5}}{2}` as its two values: the grammar has `\pm` outside of braces alone."""
    signs = [text.count("{", 0, sign.start()) > text.count("}", 0, sign.start()) for sign in _SIGN.finditer(text)]
    if not any(signs) or "," in text or text.count("=") > 1:
        return text
    name, equals, value = text.rpartition("=")
    upper = value.replace(r"\pm", "+").replace(r"\mp", "-")
    lower = value.replace(r"\pm", "-").replace(r"\mp", "+")
    return f"{name}{equals}{upper},{lower}"
