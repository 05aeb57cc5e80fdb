r"""One written number, read exactly: `1,234.50`, `\frac{1}{2}`, `1½`, `１８`, `-$5`, `2 \times 10^3`, "eighteen".

Linear in the text; never raises. A number of more than `MAX_DIGITS` digits is recognised but not evaluated.
"""

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

MAX_DIGITS = 600  # longest number that is evaluated, in significant digits; also the bound on powers of ten

_FOLDED = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full-width ASCII
    **dict.fromkeys((0x2212, 0xFE63, 0x2010, 0x2011), "-"),
    **dict.fromkeys((0x2007, 0x2008, 0x2009, 0x200A, 0x202F, 0x205F), "\u00a0"),  # spaces that group digits
    **dict.fromkeys((0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF, 0x00AD), ""),  # characters without width
    **dict.fromkeys((0x2044, 0x2215), "/"),
    0x066B: ".",
    0x066C: ",",
    0x2015: "—",
    0x3000: " ",
    0x3002: ".",
    0x3001: ",",
    0xFFE1: "£",
    0xFFE5: "¥",
}

_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "k": 1000}

_CURRENCY = r"(?:\\?\$|[£€¥₹₩₱¢]|(?<![A-Za-z])(?:USD|EUR|GBP|INR|CAD|AUD|(?:US|CA|NT|HK|[ACS])\\?\$|R[sM]\.?))\s?"
# A minus is a sign unless it stands after an operand. With a space after it, it must stand after `=`, `:`, `#`, `{`.
_SIGN = (
    r"(?:(?<=[=:#{][ ])-\s|(?<=[=:#{])-\s|(?<![A-Za-z])[Nn]egative\s|(?:(?<=is[ ])|(?<=[=:#{(]))[Mm]inus\s"
    r"|(?<![A-Za-z0-9)\]%\-–—])(?<![0-9)\]%][ \u00a0])[-–—+])"
)
_GROUP = r"(?:,|\{,\}|\\[,!;: ]|,\\!|[\u00a0~'’_])[0-9]{3}(?![0-9])"
_PLAIN = (
    r"(?:[0-9]{1,2}(?:,[0-9]{2}(?![0-9])){1,5}+,[0-9]{3}(?![0-9])"  # 1,00,000
    rf"|[0-9]++(?:{_GROUP})*+"
    r"|(?<![.])(?=\.[0-9]))"
    r"(?:\.[0-9]++)?"
)
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z0-9]) (?<!\^) (?<!\^\{{) (?<![A-Za-z0-9)\]}}]_) (?<!_\{{)
    (?P<sign>{_SIGN})?+ (?P<currency>{_CURRENCY})?+ (?P<inner_sign>(?<=[$£€¥₹₩₱¢])[-–])?+
    (?:
      (?P<date>[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}} | [0-9]{{1,2}}/[0-9]{{1,2}}/[0-9]{{2,4}})(?![0-9/])
    | (?P<hours>[0-9]{{1,2}}):(?P<minutes>[0-5][0-9])(?![0-9:])
    | (?:(?P<frac_whole>[0-9]{{1,9}})\s?)?\\[dtc]?frac\s?
      (?:\{{\s?(?P<frac_top>-?{_PLAIN})\s?\}}|(?P<frac_top_digit>[0-9]))\s?
      (?:\{{\s?(?P<frac_bottom>{_PLAIN})\s?\}}|(?P<frac_bottom_digit>[0-9]))
    | (?P<vulgar_whole>[0-9]{{1,9}})?[ \u00a0]?(?P<vulgar>[{_VULGAR}])
    | (?P<mixed_whole>[0-9]{{1,9}})(?:[ \u00a0]|-|[ ]and[ ])(?P<mixed_top>[0-9]{{1,3}})/(?P<mixed_bottom>[0-9]{{1,3}})
      (?![0-9/]|\.[0-9])
    | (?P<comma_decimal>(?<![0-9],)[0-9]++,[0-9]{{1,2}})(?![0-9]|,[0-9])
    | (?P<spaced> (?<=[$£€¥₹])[1-9][0-9]{{0,2}}(?:[ ][0-9]{{3}}){{1,5}}+
                | [1-9][0-9]{{0,2}}(?:[ ][0-9]{{3}}){{0,3}}?(?:[ ]000){{1,5}}+)(?![0-9]|[ ][0-9]{{3}}(?![0-9]))
    | (?P<plain>{_PLAIN})
      (?: /(?P<bottom>{_PLAIN})(?![0-9/])
        | [eE](?P<exponent>[+-]?[0-9]++)(?![A-Za-z])
        | \s?(?:\\times|\\cdot|[x×*·⋅])\s?10\s?(?:\^\s?\{{?\s?|\*\*)(?P<ten_power>[+-]?[0-9]++)\s?\}}?
        | (?:\^|\*\*(?=[0-9]))\{{?(?P<power>[0-9]++)\}}?
      )?
    )
    (?: (?P<ordinal>(?:st|nd|rd|th)(?![A-Za-z]))
      | (?:[ \u00a0-]|\\text\{{\s?)(?P<scale>hundred|thousand|million|billion|trillion)(?![A-Za-z])
      | (?P<kilo>[kK])(?![A-Za-z0-9])
      | [ ]dollars?,?[ ](?:and[ ])?(?P<cents>[0-9]{{1,2}})[ ]cents?(?![A-Za-z])
      | (?P<half>[ ]and[ ]a[ ]half(?![A-Za-z]))
    )?
    """,
    re.VERBOSE,
)
_LABEL_AFTER = re.compile(r"[.)][*_]{0,3}[ \t]+[^\s\d]")
_LABEL_BEFORE = re.compile(r"(?:\n|^)[ \t>*_#]*$")
_LABELLED = "step|part|question|problem|case|option|example|equation|figure|table|phase|method|note"
_CAPTION = re.compile(rf"(?:{_LABELLED})\s?#?$", re.IGNORECASE)


class Number(NamedTuple):
    """One number as written in a text, from `start` (sign and currency included) to `end`."""

    start: int
    end: int
    value: Fraction | None  # None if it is no plain quantity (a date, 12:30, a division by zero) or has too many digits
    face: Fraction | None  # the value without the word after it: 60 for "60 million"
    aside: bool  # it counts something other than a result: an ordinal, a date, a time, the label of a list item or step
    operand: bool = False  # it is only a part of an expression, which is worth something else; it has no value then


def fold(text: str) -> str:
    """Rewrite digits of all scripts, full-width signs, minus signs and spaces as the one form that is read here."""
    if text.isascii():
        return text
    # A table for this text's own characters: linear, unlike `unicodedata.normalize`, and no table of all Unicode.
    table = {}
    for char in set(text):
        code = ord(char)
        if code in _FOLDED:
            table[code] = _FOLDED[code]
        elif code > 127 and char.isdecimal():
            table[code] = str(unicodedata.decimal(char))
    return text.translate(table)


def number_at(text: str, position: int) -> Number | None:
    match = _NUMBER.match(text, position)
    return _number(match) if match else None


def numbers_from_end(text: str, start: int, end: int) -> Iterator[Number]:
    return map(_number, reversed(list(_NUMBER.finditer(text, start, end))))


def _number(match: re.Match[str]) -> Number:
    text = match.string
    face = _magnitude(match)
    if face is not None and (match["inner_sign"] or (match["sign"] or "+")[0] in "-–—nNmM"):
        face = -face
    value = face
    scale = match["scale"]
    if match["kilo"] and (match["currency"] or text[match.start() - 1 : match.start()] in tuple("$£€¥₹")):
        scale = "k"  # `$70k`; without a currency it may be anything (18k gold)
    if face is not None and scale:
        value = face * _SCALES[scale]
    start, end = match.span()
    short = match["plain"] is not None and len(match["plain"]) <= 2
    is_label = short and _LABEL_AFTER.match(text, end) and _LABEL_BEFORE.search(text, max(0, start - 20), start)
    is_caption = _CAPTION.search(text, max(0, start - 12), start)
    # `7 - 1 = 6th place` is a result all the same.
    is_ordinal = match["ordinal"] and not text[max(0, start - 2) : start].rstrip().endswith("=")
    aside = any((is_label, is_caption, is_ordinal, match["date"], match["hours"]))
    return Number(start, end, value, face, aside)


def _magnitude(match: re.Match[str]) -> Fraction | None:
    group = match.groupdict()
    if group["date"] or group["hours"]:
        return Fraction(int(group["hours"])) if group["minutes"] == "00" else None
    if group["vulgar"]:
        part = Fraction(unicodedata.numeric(group["vulgar"])).limit_denominator(10)
        return int(group["vulgar_whole"] or 0) + part
    if group["mixed_whole"]:
        return _mixed(group["mixed_whole"], group["mixed_top"], group["mixed_bottom"])
    top = group["frac_top"] or group["frac_top_digit"]
    if top:
        return _mixed(group["frac_whole"] or "0", top, group["frac_bottom"] or group["frac_bottom_digit"])
    if group["comma_decimal"]:
        return _decimal(group["comma_decimal"].replace(",", "."))
    value = _decimal(group["spaced"] or group["plain"])
    if value is None:
        return None
    if group["bottom"]:
        return _mixed("0", group["plain"], group["bottom"])
    if exponent := group["exponent"] or group["ten_power"]:
        digits = exponent.lstrip("+-").lstrip("0") or "0"
        if len(digits) > 3 or int(digits) > MAX_DIGITS:
            return None
        power = Fraction(10 ** int(digits))
        return value / power if exponent.startswith("-") else value * power
    if group["power"]:
        small = len(group["power"]) <= 2 and len(group["plain"]) <= 6
        return value ** int(group["power"]) if small else None
    if group["half"]:
        return value + Fraction(1, 2)
    if group["cents"]:
        return value + Fraction(int(group["cents"]), 100)
    return value


def _decimal(written: str) -> Fraction | None:
    whole, _, part = written.partition(".")
    whole = re.sub(r"[^0-9]+", "", whole).lstrip("0")
    part = part.rstrip("0")
    if len(whole) + len(part) > MAX_DIGITS:
        return None
    return Fraction(int(whole + part or "0"), 10 ** len(part))


def _mixed(whole: str, top: str, bottom: str) -> Fraction | None:
    base = _decimal(whole)
    upper = _decimal(top.lstrip("-"))
    lower = _decimal(bottom)
    if base is None or upper is None or not lower:
        return None
    return base - upper / lower if top.startswith("-") else base + upper / lower


_ONES = "zero one two three four five six seven eight nine ten eleven twelve"
_TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_AND_A_HALF = " and a half"
_WORDS = {word: value for value, word in enumerate(f"{_ONES} {_TEENS}".split())}
_WORDS |= {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
_WORD = "(?:" + "|".join(sorted([*_WORDS, *_SCALES.keys() - {"k"}], key=len, reverse=True)) + ")(?![A-Za-z])"
_JOINED = rf"(?:[\s-]|,\s|\sand\s){_WORD}"
_WORDED = re.compile(rf"(?P<minus>(?:minus|negative)\s)?(?P<words>{_WORD}(?:{_JOINED}){{0,30}}+)", re.IGNORECASE)


def words_at(text: str, position: int) -> Number | None:
    """Read the English number word ("twenty-one", "one hundred and five") that starts at `position`, or None."""
    match = _WORDED.match(text, position)
    if not match:
        return None
    total = 0
    current = 0
    for word in re.findall(r"[a-z]+", match["words"].lower()):
        if word in _WORDS:
            current += _WORDS[word]
        elif word == "hundred":
            current = (current or 1) * 100
        elif word in _SCALES:
            total = total + (current or 1) * _SCALES[word]
            current = 0
    value = Fraction(total + current)
    end = match.end()
    if text.startswith(_AND_A_HALF, end):
        value = value + Fraction(1, 2)
        end = end + len(_AND_A_HALF)
    value = -value if match["minus"] else value
    return Number(match.start(), end, value, value, False)
