r"""Does a number stand for itself, or is it part of an expression with another value? By the text right beside it."""

import re
from collections.abc import Iterator

from .numerals import Number

_WINDOW = 120

_TEXT = "text textbf textit textrm textsf texttt textnormal textup textsuperscript mbox hbox"
_FONTS = "mathbf mathrm mathit mathsf mathtt mathnormal bf rm it boldsymbol bm operatorname unit si"
_LAYOUT = (
    "boxed fbox left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle large Large huge normalsize "
    "color textcolor underline ensuremath quad qquad hspace hfill space newline par item hline begin end tag label qed "
    "square Box blacksquare checkmark ldots dots"
)
_RELATIONS = (
    "approx sim simeq equiv cong le leq leqslant ge geq geqslant lt gt implies iff therefore because Rightarrow "
    "rightarrow Longrightarrow longrightarrow to"
)
_UNITS = "circ degree celsius euro pounds pound cent textdollar textcent texteuro percent"
_TEXT_COMMANDS = frozenset(_TEXT.split())
_NEUTRAL = frozenset(f"{_TEXT} {_FONTS} {_LAYOUT} {_RELATIONS} {_UNITS}".split())

_COMMAND_OF_GROUP = re.compile(
    r"(?:\\(?P<name>[A-Za-z]+)|(?P<script>[\^_]))\s*(?:\[[^\[\]{}]*\]|\{(?:[^{}]|\{[^{}]*\})*\})*\s*$"
)
_DRESS = re.compile(
    r"\\(?:text)?color\s?\{\w*\}|\\[,;:!>()\[\] ]|\\?\$|~|&"
    rf"|\\(?:{'|'.join(sorted(_NEUTRAL - set(_RELATIONS.split()), key=len, reverse=True))})(?![A-Za-z])\*?"
)
_PLAIN_GROUP = re.compile(r"(?<![\w\\^}\]])\{([^{}]*)\}")  # not an argument of a command or a script
_OPEN_BRACE = re.compile(r"(?<![\w\\^}\]])\{")
_SPACES = re.compile(r"[^\S\n]+")
_SIGN_OF_GROUP = re.compile(r"(?<![\w)\]}\-–—])[-–—](?:[({\[$*}]|\\\$|\\left|\\text\w*\s?\{)+$")
_EMPHASIS = re.compile(r"(?<![0-9A-Za-z*])(\*{1,3})(?=[^\s*])([^*\n]+)(?<=\S)\1")
_OPENING = re.compile(r"(?:[\s({\[|\"'“‘`_]|(?<![\w)\]}*])(?<![\w)\]}] )\*{1,3}|(?<=[A-Za-z:] )\*{1,3}$)*$")
_COMMAND_LAST = re.compile(r"\\([A-Za-z]+)\s*(?:[_^](?:\w|\{[^{}]*\}))?$")
_LABEL = re.compile(r"(?<![\w)\]])\([A-Za-z0-9]\)$")
_CALL = re.compile(r"(?:(?<![A-Za-z])(?:[a-z]|sqrt|cbrt|log|ln|exp|sin|cos|tan|fact(?:orial)?|pow)|[0-9)}])\($")

_NUMERAL = r"(?:[0-9.]+/[0-9.]+|[0-9][0-9,]*(?:\.[0-9]+)?)"
_PARTS = r"(?:hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?)"
_DIFFERENCE = re.compile(rf"(?P<chain>[-–+*/×]\s?)?[£€¥]?(?P<left>{_NUMERAL})[)\]}}%]*\s?[-–—]\s?$")
_BEFORE = re.compile(
    rf"""(?:
      [+×÷⋅∙∗√∛±^] | (?<=\S)\s*· | (?:[0-9)\]}}%]|\s|\b[a-z])\s?/ | [0-9)\]}}²³]\s*\*{{1,2}} | \w\s+\* | \w\*
    | [0-9)\]}}]\s?[xX] | \s[xX](?=\s) | (?<![\w'’])[xyzn]\s?[-–]
    | \b(?:twice|doubled?|tripled?|half|plus|minus|modulo|mod|log|ln|sqrt|(?:multiplied|divided)\sby|percent\sof
        |(?:power|root|square|cube|factorial|reciprocal|inverse|logarithm|negative|opposite)\sof|{_PARTS}\sof)
    | (?:{_NUMERAL}|\))\s(?:times|over) | (?:%|[0-9]/[0-9]+|[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]|[0-9]\}})\s?of
    | \b(?:sum|product|difference|quotient|average|mean|ratio)\s(?:of|between)
      \s(?:{_NUMERAL}(?:,|,?\sand|\sto)\s?){{1,9}}
    )\s*$""",
    re.VERBOSE | re.IGNORECASE,
)
_BEFORE_IN_MATH = re.compile(r"(?:[*/}]|[\w)\]}%]\s*[-–]|(?<![A-Za-z])[A-Za-z])\s*$")

_CLOSING = re.compile(r"\A(?:[)\]}|]|\\right(?![a-z])|\$(?!\\?[0-9])|\\[)\]])+")
_DEGREE = re.compile(r"\^\s*\{?\s*\\(?:circ|degree)(?![a-z])\s*\}?")
_ORDINAL = r"\{?\s*(?:st|nd|rd|th)(?![A-Za-z])"
_AFTER = re.compile(
    rf"""
      \s*\^(?!\s*\{{?\s*(?:[°*'o}}]|\\prime)|\s*$|\s*{_ORDINAL}) | \s*\*\*?\s?(?:[0-9(√π\\]|[xyznab](?![A-Za-z*]))
    | [⁰¹²³⁴-⁹⁻ⁿ] | _[{{0-9] | :[0-9] | \.\\(?:over|dot|bar)
    | !(?=\s*[)}}\]]*\s*(?:[\^_/+×÷·=]|\*\s?[0-9]|\\(?:cdot|times|div|approx)))
    | \((?:\s?[-+]?[0-9]|[xyznabk](?![A-Za-z]))
    | (?:x(?!\s(?:as|more|less|fewer|the|[a-z]{{2,10}}er)\b)|[zni])(?![\w'’])
    | \s*/\s?(?:[(√π\\]|[xyzn](?![A-Za-z]))
    | \s*\+\s?(?:[A-Za-z](?![A-Za-z])|[(√π\\]) | \s*[-–]\s?(?:[(√π\\]|[xyzn](?![A-Za-z]))
    | \s*[√∛π∞×÷⋅·∗∙±αβγδεζηθκλνξρστφχψω]
    | [\s*"”-]*(?:
        (?:squared|cubed)\b(?!\s(?:[mck]?m|in|ft|feet|foot|inch|inches|yards?|yd|miles?|units?|\w{{0,5}}met(?:er|re)s?)\b)
      | factorial\b | (?:raised\s)?to\sthe\s(?:power|second|third|fourth|fifth|n?-?th\b|-?[0-9])
      | (?:choose|mod(?:ulo)?|over|times|plus|minus|(?:multiplied|divided)\sby|(?:more|less|fewer|greater)\sthan
          |(?:\\?%|percent)\s?of)\s[£€]?[({{]*[0-9]
      | (?:times|(?:multiplied|divided)\sby|plus|minus)\s
          (?:itself|pi|[xyzn]|one|two|three|four|five|six|seven|eight|nine|ten)\b
      | point\s(?:zero|oh|one|two|three|four|five|six|seven|eight|nine)\b
      | and\s(?:an?|one|two|three|four|five|six|seven|eight|nine)[\s-]{_PARTS}\b | (?:ten|hundred|thousand)ths\b)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_AFTER_IN_MATH = re.compile(
    r"!|(?:[yejabuvqrXYZ]|[xyz]{2,3})(?![A-Za-z])(?!\s[a-z])|\s*(?:[+*](?=\s*[\w(\\{])|[xyz](?!\w|\s(?:as|more)\b)|[-–](?=\s*[\w(\\]))"
)
_UNIT_POWER = re.compile(r"\s*(?:[A-Za-z]{2,}|[mlgshdtc](?![A-Za-z]))\s*(?:\^(?:-?[0-9]|\{-?[0-9]\}))?")
_UNIT_FRACTION = re.compile(r"\s*\\[dt]?frac\s?(?:\s*\{[\s{]*(?:[A-Za-z]{2,}|[mlgshdtc])[\s}]*\}){2}")
_COMMAND_NEXT = re.compile(r"\s*\\([A-Za-z]+)")
_LETTER_GROUP = re.compile(r"\\(?:math|text)[a-z]*\s?\{\s?[ixyzeπ]\s?\}")

_FILLER = r"(?:be|equals?|equal\sto|to|the|an?|actually|really|simply|in\sfact|exactly|necessarily|definitely)"
_DENIED_BEFORE = re.compile(
    rf"""(?: (?:\b(?:not|cannot|never)|n['’]t|≠|!=|=/=|<>|\\neq?(?![a-z])|\\not(?![a-z])\s?(?:=|\\equiv)?)
        (?:[\s:,]*\b{_FILLER}\b)*[\s:,]*
      | (?<!\bno\s)(?<!\bnot\s)(?<!n't\s)\b(?:more|less|fewer|other|rather|[a-z]{{2,12}}er)\sthan\s+
      | \b(?:instead\sof|unlike|(?:any|every)thing\s(?:but|except))\s+ )$""",
    re.VERBOSE | re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"""[\s)\]}$*%]*(?:[A-Za-z]{1,15}\s){0,2}?(?:is|was|are|were|can|could)\s?
    (?: (?:not|n['’]t|never)\s(?:be\s)?(?:(?:the|my|our|an?)\s)?(?:(?:right|correct|final|actual|true)\s)?
        (?:answer|solution|result|total|correct|right)\b
      | (?:wrong|incorrect|false)\b )""",
    re.VERBOSE | re.IGNORECASE,
)


_OPEN = r"(?:\\(?:boxed|text\w*|math\w*)\s?\{|[\s({\[*$£€¥]|\\\$|\\\(|[a-z]\s?=\s?)*[-–]?[$£€]?"
_WRITTEN = rf"{_OPEN}\.?[0-9]"
_MEASURE = (
    r"(?:\\(?:text|mathrm)\s?\{\s?)?(?:years?|months?|weeks?|days?|h|hours?|hrs?|minutes?|mins?|seconds?|secs?|f(?:ee|oo)?t"
    r"|inch(?:es)?|in|yards?|miles?|kilometers?|km|meters?|cm|m|pounds?|lbs?|ounces?|oz|kilograms?|kg|grams?|g|gallons?"
    r"|quarts?|pints?|cups?)(?![A-Za-z])\s?\}?"
)
_NOUN = r"(?!(?:or|and|to|vs|versus)\b)[A-Za-z]{1,20}+"
_COUNTED = rf"(?:\s{{0,2}}(?:\\(?:text|mathrm)\s?\{{[^{{}}\n]{{0,40}}\}}|\\?[%$°)\]}}]|\*\*|{_NOUN})){{0,4}}?"
_EITHER = r"(?<![A-Za-z])(?:or|vs\.?|versus)\s(?:maybe\s|perhaps\s|possibly\s)?"
_ALTERNATIVE_AFTER = re.compile(rf"{_COUNTED}(?:,?\s*\(?\[?{_EITHER}|\s?:\s?(?=[0-9])){_WRITTEN}", re.IGNORECASE)
_ALTERNATIVE_BEFORE = re.compile(
    rf"(?:[0-9]{_COUNTED}(?:,?\s*\(?\[?{_EITHER}|:|\s:\s)|[A-Za-z0-9)]\s[<>]\s|\b(?:between|ratio)\s[^\n]{{1,40}}\s(?:and|to)\s){_OPEN}$",
    re.IGNORECASE,
)
_MORE_AFTER = re.compile(
    rf"""
      {_COUNTED}\s*(?:[;&–—±]|-|,?\sand\s|\sthrough\s|\+/-){_WRITTEN}
    | {_COUNTED}\s(?:to|-|–)\s{_WRITTEN}[0-9,.]*[\s.)\]}}$%*]*(?:$|</)
    | {_COUNTED},\s?{_WRITTEN}[0-9.]*{_COUNTED}\s*(?:,|[.)\]}}$*]*\s*(?:$|</)|\s(?:and|or)\s)
    | \s?{_MEASURE}\s?(?:,|,?\sand\s)?\s?{_WRITTEN}[0-9.]*\s?{_MEASURE}
    | {_COUNTED}\s(?:or|and)\s(?:more|less|fewer|greater|higher|lower|above|below|up|over|under)\b
    | \s?[0-9] | \.[0-9] | \+(?!\s*[0-9A-Za-z$\\(]) | \s*(?:\\[lg]t(?![a-z])|(?<=\s)[<>]\s[A-Za-z0-9])""",
    re.VERBOSE | re.IGNORECASE,
)
_MORE_BEFORE = re.compile(
    rf"(?:(?:\A[ \t]*|[^\s<>=-][ \t]*)[<>](?!=)|\\[lg]t(?![a-z])|[0-9]\s?[-–—]|\bfrom\s[^\n]{{1,40}}\sto)\s*{_OPEN}$",
    re.IGNORECASE,
)


def is_operand(text: str, number: Number, start: int, end: int, *, in_box: bool = False) -> bool:
    """Whether `number` is only a part of an expression in `text[start:end]`, a box or the whole text.

    In a box "18!" is a factorial and "5-7" a difference; in prose they are an exclamation and a range.
    """
    before = text[max(start, number.start - _WINDOW) : number.start]
    after = text[number.end : min(end, number.end + _WINDOW)]
    commands = list(_commands_around(before))
    if any(command and command not in _NEUTRAL for command in commands):
        return True
    in_math = in_box and not any(command in _TEXT_COMMANDS for command in commands)
    # `$18!$` and `\(18!\)` are mathematics wherever they stand.
    in_math_here = in_math or bool(re.match(r"[^\s$]{1,20}(?:\$(?!\\?[0-9])|\\[)\]])", after))
    return _left_operand(after, in_math_here) or _right_operand(before, text[number.start : number.end], in_math)


def is_denied(text: str, number: Number, start: int, end: int) -> bool:
    """Whether `text[start:end]` says that it is not `number`."""
    before = _last_line(text[max(start, number.start - _WINDOW) : number.start])
    before = _OPENING.sub("", before) + " "
    return bool(_DENIED_BEFORE.search(before) or _DENIED_AFTER.match(text, number.end, min(end, number.end + _WINDOW)))


def is_one_of_several(text: str, number: Number, start: int, *, explicit: bool = True) -> bool:
    """Whether `text` from `start` on says more than `number` with it; without `explicit` alternatives alone count."""
    before = "".join(text[max(start, number.start - _WINDOW) : number.start].rpartition("\n")[1:])
    after = text[number.end : number.end + _WINDOW].partition("\n")[0]
    if _ALTERNATIVE_AFTER.match(after) or _ALTERNATIVE_BEFORE.search(before):
        return True
    return explicit and bool(_MORE_AFTER.match(after) or _MORE_BEFORE.search(before))


def _commands_around(before: str) -> Iterator[str]:
    """Name the commands whose groups are open at the end of `before`, innermost first; "" is a brace without one."""
    depth = 0
    for position in range(len(before) - 1, -1, -1):
        if before[position] not in "{}" or before[position - 1 : position] == "\\":
            continue
        if before[position] == "}":
            depth += 1
        elif depth:
            depth -= 1
        else:
            command = _COMMAND_OF_GROUP.search(before, 0, position)
            yield (command["name"] or command["script"]) if command else ""


def _last_line(before: str) -> str:
    """The last line without decoration: fonts, spacing, currency, markdown, `\\text{...}`."""
    line = _DRESS.sub(" ", before.rpartition("\n")[2])
    line = _PLAIN_GROUP.sub(r" \1 ", _PLAIN_GROUP.sub(r" \1 ", line))
    return _SPACES.sub(" ", _EMPHASIS.sub(r"\2", _OPEN_BRACE.sub(" ", line)))


def _right_operand(before: str, written: str, in_math: bool) -> bool:
    line = _last_line(before)
    if _SIGN_OF_GROUP.search(before) or (line.endswith(")") and not _LABEL.search(line)):
        return True
    opening = _OPENING.search(line)
    outer = line[: opening.start()] if opening else line
    inner = line[len(outer) :]
    if _CALL.search(outer + inner.lstrip()[:1]) and not inner[:1].isspace():
        return True
    command = _COMMAND_LAST.search(outer)
    if command and command[1] not in _NEUTRAL:
        return command[1] not in ("ne", "neq", "not")  # a denial
    if not outer.strip("+-–—*·•/ "):  # a bullet, or a sign
        return in_math and bool(outer.strip())
    difference = _DIFFERENCE.search(outer)
    if difference:
        return in_math or bool(difference["chain"]) or not _ascends(difference["left"], written)
    outer += inner[:1] if inner[:1].isspace() else ""
    return bool(_BEFORE.search(outer) or (in_math and _BEFORE_IN_MATH.search(outer)))


def _ascends(left: str, right: str) -> bool:
    """Whether two numbers with a dash between them may be a range."""
    values = [re.sub(r"[^0-9.]", "", written).partition(".")[0] for written in (left, right)]
    low, high = (digits.lstrip("0") for digits in values)
    return "/" in left + right or (len(low), low) < (len(high), high)


def _left_operand(after: str, in_math: bool) -> bool:
    if _LETTER_GROUP.match(after):
        return True
    rest = _CLOSING.sub("", _DEGREE.sub("°", after), count=1)
    touches = rest[:1] == "\\"  # what LaTeX puts between is no more of a gap than nothing
    rest = _SPACES.sub(" ", _PLAIN_GROUP.sub(r" \1 ", _DRESS.sub(" ", rest)))
    rest = rest.lstrip(" ") if touches and in_math else rest
    if _UNIT_FRACTION.match(rest):
        return False
    command = _COMMAND_NEXT.match(rest)
    if command and command[1] not in _NEUTRAL:
        return True
    if _AFTER.match(rest) or (in_math and _AFTER_IN_MATH.match(rest)):
        return True
    unit = _UNIT_POWER.match(rest)
    command = _COMMAND_NEXT.match(rest, unit.end()) if unit else None
    return bool(command and command[1] not in _NEUTRAL)
