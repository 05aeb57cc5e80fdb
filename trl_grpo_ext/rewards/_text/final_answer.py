r"""The final number of a completion, however models write it: the last explicit answer, else the last number.

Text up to the last `</think>` is dropped if a number follows it, and so is what runs on after the answer. A number that
is only a part of an expression, or one of several, is not the answer, and one that the text denies is passed over.
Dates, times, ordinals and labels are read only where there is nothing else. In prose a range means its end. Every
function here is linear in the text and raises on no text.
"""

import re
from collections import deque
from collections.abc import Collection, Iterator
from fractions import Fraction
from typing import Any

from .numerals import Number, fold, number_at, numbers_from_end, words_at

_WINDOW = 2000  # characters of one sentence, line or box that are looked at

_BRACE = re.compile(r"[{}]")
_DIGIT = re.compile(r"[0-9]")
_THOUGHT_ENDS = ("</think>", "</thinking>", "</reasoning>")
_TURN_END = re.compile(
    r"<\|(?:im_end|im_start|eot_id|eom_id|end|end_of_text|endoftext|end_of_turn|user|start_header_id)\|>|</s>|<eos>"
    r"|<end_of_turn>|\[INST\]"
)
_NEXT_TASK = re.compile(
    r"^[ \t>*_#]{0,8}(?:(?:Next|New|Follow-up)\s)?(?:Question|Q|Problem|Exercise|Instruction|Human|User)"
    r"[ \t]?[0-9]{0,4}[*_]{0,3}[ \t]?:",
    re.MULTILINE | re.IGNORECASE,
)

# Literals only, so that the scan runs at the speed of a character-set search; what they are is decided afterwards.
_MARKER = re.compile(r"\\boxed|\\fbox|#####*|<answer>|<Answer>|<ANSWER>|answer|Answer|ANSWER|A:|A :|A\*\*:|Ans:|答案")
_STATED_BEFORE = re.compile(rf"(?:{_MARKER.pattern})[^0-9\n]*$")
_STATED_AFTER = re.compile(r"[^.\n]{0,40}\b(?:answer|solution|result|total|correct|right|wrong|incorrect|false)\b")
_ANSWER_LINK = re.compile(
    r"""[*_`"'})\]]{0,6}
    (?:\s{0,3}\([^()\n]{0,60}\))?
    (?:\s{0,3},?\s{0,3}(?:to|for|in|of|here|then|therefore|thus|hence|we|you)  # codespell:ignore hence
        \b[^\n.:=?!<>0-9]{0,80}?)?
    \s{0,3}[,]?\s{0,3}
    (?:(?P<colon>[:=→]|⇒) | 是 | 为
      | (?:is|are|was|equals|comes\sout\sto|becomes|(?:would|will|should|must|could|can)\s{1,3}be)\b
      | (?:'s|’s)\b )""",
    re.VERBOSE,
)
_HEADING_TAIL = re.compile(r"[*_:} \t]{0,8}(?:\n|$)")
_HEADING_START = re.compile(r"(?:\n|^)[ \t>*_#\-]*(?:\\text(?:bf)?\{)?(?:[Tt]he\s|[Mm]y\s)?(?:(?:[Ff]inal|FINAL)\s)?$")
_FINAL = re.compile(r"final\s$", re.IGNORECASE)
# Answers that the story is about: "each correct answer is 5 points", "the answer to the second question is 7".
_SEVERAL = r"\b(?:each|every|per|an?|any|one|no|wrong|incorrect|first|second|third|fourth|fifth)\s"
_STORY_BEFORE = re.compile(rf"{_SEVERAL}(?:(?!the\s)\w{{1,20}}\s)?$", re.IGNORECASE)
_STORY_AFTER = re.compile(rf"\b(?:to|for|of|in)\s(?:the\s|his\s|her\s|their\s)?{_SEVERAL}", re.IGNORECASE)
_LINE_START = re.compile(r"(?:\n|^)[ \t>*_#]*$")
_OTHER_CHOICE = re.compile(r"^[ \t>*_]{0,8}B[*_]{0,2}\s?:", re.MULTILINE)

_ORNAMENTS = re.compile(
    r"""(?:
      \n[ \t]*+[-•–]\s | [\s*_`$£€¥₹¢"'“”‘’(\[{<:=~≈≃→⇒|>•,] | \.{2,} | …
    | \\[()\[\]$,;:!>{ ]
    | \\(?:text|textbf|textit|mathbf|mathrm|mathit|bf|boldsymbol|bm|displaystyle|left|right|underline|large|Large|quad
        |approx|boxed|fbox|therefore|color\{\w{1,20}\})(?![A-Za-z])
    | (?:(?:that|it|is|be|equal|to|equals|about|approximately|approx\.|around|roughly|nearly|almost|exactly|indeed
        |simply|just|only|still|also|now|then|thus|therefore|given\ by|a\ total\ of|the\ number|at\ least|at\ most)
        (?=[\s,:*$]))
    | [A-Za-z][A-Za-z_]{0,19}\s?=(?!=)
    )*+""",
    re.VERBOSE | re.IGNORECASE,
)
_UNIT = (
    r"\s{0,2}(?:\\(?:text|mathrm)\s?\{[^{}\n]{0,40}\}|\\?[%$°)\]}]|\*\*"
    r"|(?!(?:[xX]|of|because|since|as|so|and|or|if|which|but|where|with)\b)[A-Za-z²³]{1,20})"
)
_SCRIPTED = re.compile(r"\\?[A-Za-z]{1,8}\s?[\^_]\s?\{?\s?-?[0-9]")
_EQUALS = re.compile(r"=>|=|≈|≃|⇒|→|\\approx(?![a-z])|\\implies(?![a-z])")
_OPERATOR = re.compile(
    rf"(?:[A-Za-z](?=\s?=))?(?:{_UNIT}){{0,4}}+\s{{0,3}}"
    r"(?:=>?|[≈≃⇒→+*/×÷·–-]|\\(?:times|cdot|div|approx)|[xX](?=\s?[$0-9])|of(?=\s[$0-9][^=\n]{0,40}=))"
    r"[\s($£€¥{*<]{0,8}(?:\\\$|\\d?frac|[-–]?[$£€]?\.?[0-9])"
)
_SENTENCE_END = re.compile(r"[.!?;](?=\s|$)|\n|$")
_BOLD = re.compile(r"\*\*([^*\n]{1,80})\*\*|\\(?:text|math)bf\{([^{}\n]{1,80})\}")

# Whether a number stands for itself, or is a part of an expression with another value, by the text right beside it.
_BESIDE = 120
_TEXT = "text textbf textit textrm textsf texttt textnormal textup textsuperscript mbox hbox"
_RELATIONS = """
approx sim simeq equiv cong le leq leqslant ge geq geqslant lt gt implies iff therefore because Rightarrow rightarrow
Longrightarrow longrightarrow to
"""
_FONTS_LAYOUT_UNITS = """
mathbf mathrm mathit mathsf mathtt mathnormal bf rm it boldsymbol bm operatorname unit si boxed fbox left right big Big
bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle large Large huge normalsize color textcolor underline ensuremath
quad qquad hspace hfill space newline par item hline begin end tag label qed square Box blacksquare checkmark ldots dots
circ degree celsius euro pounds pound cent textdollar textcent texteuro percent
"""
_TEXT_COMMANDS = set(_TEXT.split())
_NEUTRAL = set(f"{_TEXT} {_RELATIONS} {_FONTS_LAYOUT_UNITS}".split())

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


def extract_final_answer(text: str) -> Fraction | None:
    """Return the exact final number of `text`, or None if none can be read (see the module)."""
    number = final_number(text)
    return None if number is None else number.value


def final_number(text: str) -> Number | None:
    """Like `extract_final_answer`, with where the number stands (offsets of the folded answer part) and its face."""
    text = _answer_part(fold(text))
    denied: set[Fraction] = set()
    last = _last_number(text, 0, len(text), denied)
    if found := _explicit(text, last, denied):
        return found
    return _operand(last) if last and _is_one_of_several(text, last, 0, explicit=False) else last


def parse_reference(reference: Any) -> Fraction | None:
    """Return the value of a reference answer, or None where it has none.

    A string is GSM8K's solution, whose answer stands after the last `####`, or a plain number, with a currency or a
    unit if need be ("$18", "1/2", "18 dollars"). A float means what it prints: 0.1 is 1/10.
    """
    if isinstance(reference, bool):
        return None
    if not isinstance(reference, str):
        try:
            return Fraction(str(reference.item() if hasattr(reference, "item") else reference))
        except (ValueError, ZeroDivisionError, TypeError):
            return None
    number, _ = read_reference(reference)
    return None if number is None else number.value


def read_reference(reference: str) -> tuple[Number | None, str]:
    """The number of a reference in words, None where it has none or more, and what of its answer is not the number."""
    text = fold(reference).rpartition("####")[2].strip()
    text = f" {text}"  # as after a marker
    number = _direct(text, 0, is_box=True)  # `18!` and `18j` are mathematics here, not an exclamation and a unit
    if number is None or next(numbers_from_end(text, number.end, len(text)), None):
        return None, text.strip()
    if _is_one_of_several(text, number, 0):
        return None, text.strip()
    return number, f"{text[: number.start]} {text[number.end :]}".strip(" $€£¥.*")


def _answer_part(text: str) -> str:
    start = max(text.rfind(tag) + len(tag) if tag in text else 0 for tag in _THOUGHT_ENDS)
    if start and _last_number(text, start, len(text)):
        text = text[start:]
    digit = _DIGIT.search(text)
    turn_end = _TURN_END.search(text, digit.end()) if digit else None
    if turn_end:
        text = text[: turn_end.start()]
    for tried, task in enumerate(_NEXT_TASK.finditer(text)):
        before = text[: task.start()]
        if tried == 8:
            break
        if _explicit(before, _last_number(before, 0, len(before))):
            return before
    return text


def _explicit(text: str, last: Number | None, denied: Collection[Fraction] = ()) -> Number | None:
    """Return the number of the last explicit answer that is not `denied`. `last` is the last number of `text`."""
    for marker in reversed(deque(_MARKER.finditer(text), maxlen=64)):  # more without an answer is noise
        literal = marker[0].lower()
        if literal[0] == "\\":
            found = _block(text, marker.end(), _closing_brace(text, marker.end()), is_box=True)
        elif literal[0] == "#":
            found = _sentence(text, marker.end(), last)
        elif literal[0] == "<":
            close = text.find("</", marker.end())
            found = _block(text, marker.end(), close if close >= 0 else len(text))
        elif literal[0] == "a" and not literal.startswith("answer"):
            # `A: 18` at the start of a line, unless a `B:` makes it one of several choices.
            begins = _LINE_START.search(text, max(0, marker.start() - 20), marker.start())
            is_choice = _OTHER_CHOICE.search(text, marker.end(), marker.end() + _WINDOW)
            found = _header(text, marker.end(), last) if begins and not is_choice else None
        else:
            found = _after_word(text, marker, last)
        if found and found.value not in denied:
            return _operand(found) if _is_one_of_several(text, found, marker.end()) else found
    return None


def _block(text: str, start: int, end: int, *, is_box: bool = False) -> Number | None:
    found = _direct(text, start, end, is_box=is_box)
    if found is None or found.operand:
        return _last_number(text, max(start, end - _WINDOW), end, is_box=is_box) or found
    return _continued(text, start, found, end) or found


def _sentence(text: str, start: int, last: Number | None) -> Number | None:
    """The number right after a marker; if that only opens an expression, the expression's result."""
    found = _direct(text, start)
    return last if found and found.operand and last and last.start >= found.start else found


def _closing_brace(text: str, start: int) -> int:
    """Return where the group that opens at `start` closes; the end of the line where it never does."""
    depth = 0
    for brace in _BRACE.finditer(text, start, start + _WINDOW):
        depth += 1 if brace[0] == "{" else -1
        if depth <= 0:
            return brace.start()
    line_end = text.find("\n", start, start + _WINDOW)
    return line_end if line_end >= 0 else min(len(text), start + _WINDOW)


def _after_word(text: str, marker: re.Match[str], last: Number | None) -> Number | None:
    """`answer` as a heading ("**Answer:** 18", or alone on its line) or in a sentence ("the answer is 18")."""
    start, end = marker.span()
    before = text[max(0, start - 40) : start]
    if before[-1:].isalpha() or before.endswith("</"):
        return None
    link = _ANSWER_LINK.match(text, end)
    if link is None:
        if _FINAL.search(before) and number_at(text, end + 1):
            return _sentence(text, end, last)
        is_heading = _HEADING_START.search(before) and (tail := _HEADING_TAIL.match(text, end))
        return _header(text, tail.end(), last) if is_heading and tail else None
    colon = link["colon"] or text[link.end() : link.end() + 4].lstrip(" *_").startswith(":")
    if colon:
        return _header(text, link.end(), last)
    if _STORY_BEFORE.search(before) or _STORY_AFTER.search(link[0]):
        return None
    return _sentence(text, link.end(), last)


def _header(text: str, start: int, last: Number | None) -> Number | None:
    found = _direct(text, start)
    if found is None or found.operand:
        return last if last and last.start >= start else None
    paragraph_end = text.find("\n\n", found.end, found.end + _WINDOW)
    return _continued(text, start, found, paragraph_end if paragraph_end >= 0 else len(text)) or found


def _continued(text: str, start: int, found: Number, end: int) -> Number | None:
    """Where the answer is a chain of equations over several lines, return the number it ends in."""
    end = min(end, found.end + _WINDOW)
    chain = "=" in text[start : found.start][-_WINDOW:] and "=" in text[found.end : end]
    return _last_number(text, found.end, end) if chain else None


def _direct(text: str, start: int, end: int | None = None, *, is_box: bool = False) -> Number | None:
    """Read the number, equation or number word after `start` and ornaments; its value is None if it has no result."""
    end = len(text) if end is None else end
    ornaments = _ORNAMENTS.match(text, start, end)
    position = ornaments.end() if ornaments else start
    number = number_at(text, position)
    if number is None:
        words = words_at(text, position)
        if words is None:
            power = _SCRIPTED.match(text, position, end)
            return power and Number(position, power.end(), None, None, aside=False, operand=True)
        stop = _sentence_end(text, words.end, end)
        vague = text.startswith(" of", words.end) or next(numbers_from_end(text, words.end, stop), None)
        if vague:
            return None
        return _operand(words) if _is_operand(text, words, start, end, in_box=is_box) else words
    is_label = number.aside and number.value is not None and text[number.end : number.end + 1] in (".", ")")
    if number.start >= end or is_label:
        return None
    opens_equation = _OPERATOR.match(text, number.end, min(end, number.end + 200))
    if not opens_equation and not _is_operand(text, number, start, end, in_box=is_box):
        return number
    return _result(text, number, start, end, is_box) or _operand(number)


def _operand(number: Number) -> Number:
    return number._replace(value=None, face=None, operand=True)


def _result(text: str, left: Number, start: int, end: int, is_box: bool) -> Number | None:
    stop = _sentence_end(text, left.end, end)
    equals = list(_EQUALS.finditer(text, left.end, stop))
    for sign in reversed(equals):
        ornaments = _ORNAMENTS.match(text, sign.end(), stop)
        right = number_at(text, ornaments.end() if ornaments else sign.end())
        if not right or right.start >= stop or _OPERATOR.match(text, right.end, min(stop, right.end + 200)):
            continue
        if not _is_operand(text, right, sign.end(), stop, in_box=is_box):
            return right
    if not equals or _OPERATOR.match(text, left.end, equals[0].start() + 1):
        return None
    return None if _is_operand(text, left, start, equals[0].start(), in_box=is_box) else left


def _sentence_end(text: str, start: int, end: int) -> int:
    stop = min(end, start + _WINDOW)
    match = _SENTENCE_END.search(text, start, stop)
    return match.start() if match else stop


def _last_number(text: str, start: int, end: int, denied: Any = None, *, is_box: bool = False) -> Number | None:
    """The last number of `text[start:end]` that is a result (see `Number.aside`), else the last; fills `denied`."""
    denied = set() if denied is None else denied
    aside = None
    for _ in range(8):
        digit = max(text.rfind(char, start, end) for char in "0123456789½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞")
        if digit < 0:
            break
        # Back to the start of the number that begins the window: its tail would be another number.
        before = text[start : max(start, digit - _WINDOW)]
        whole = before.rstrip("0123456789")
        if len(whole) < len(before) and whole.endswith((".", ",")):
            whole = whole[:-1].rstrip("0123456789")
        window = start + len(whole)
        for number in numbers_from_end(text, window, min(end, digit + 60)):
            if number.aside:
                aside = aside or (None if _is_denied(text, number, start, end) else number)
            elif not _is_denied(text, number, start, end):
                if number.value not in denied:
                    is_part = _is_operand(text, number, start, end, in_box=is_box)
                    return _bold_on_line_of(text, number, start, end) or (_operand(number) if is_part else number)
            elif number.value is not None:
                before = text[max(0, number.start - 80) : number.start]
                after = text[number.end : number.end + 80]
                if _STATED_BEFORE.search(before) or _STATED_AFTER.match(after):
                    denied.add(number.value)
        end = window
    return aside


def _bold_on_line_of(text: str, number: Number, start: int, end: int) -> Number | None:
    first = max(start, number.start - _WINDOW)
    last = min(end, number.end + _WINDOW)
    line_start = text.rfind("\n", first, number.start) + 1 or first
    line_end = text.find("\n", number.end, last)
    equals = text.rfind("=", line_start, number.start)
    bold = None
    for match in _BOLD.finditer(text, line_start, line_end if line_end >= 0 else last):
        inside = 1 if match[1] is not None else 2
        found = _direct(text, match.start(inside), match.end(inside))
        if not found or found.aside or found.operand or found.end <= equals:
            continue
        if not _is_operand(text, found, start, end) and not _is_denied(text, found, start, end):
            bold = found
    return bold


def _is_operand(text: str, number: Number, start: int, end: int, *, in_box: bool = False) -> bool:
    """Whether `number` is only a part of an expression: "18!" in a box is a factorial, in prose an exclamation."""
    before = text[max(start, number.start - _BESIDE) : number.start]
    after = text[number.end : min(end, number.end + _BESIDE)]
    commands = list(_commands_around(before))
    if any(command and command not in _NEUTRAL for command in commands):
        return True
    in_math = in_box and not any(command in _TEXT_COMMANDS for command in commands)
    # `$18!$` and `\(18!\)` are mathematics wherever they stand.
    in_math_here = in_math or bool(re.match(r"[^\s$]{1,20}(?:\$(?!\\?[0-9])|\\[)\]])", after))
    return _left_operand(after, in_math_here) or _right_operand(before, text[number.start : number.end], in_math)


def _is_denied(text: str, number: Number, start: int, end: int) -> bool:
    before = _last_line(text[max(start, number.start - _BESIDE) : number.start])
    before = _OPENING.sub("", before) + " "
    return bool(_DENIED_BEFORE.search(before) or _DENIED_AFTER.match(text, number.end, min(end, number.end + _BESIDE)))


def _is_one_of_several(text: str, number: Number, start: int, *, explicit: bool = True) -> bool:
    """Whether `text` from `start` on says more than `number` with it; without `explicit` alternatives alone count."""
    before = "".join(text[max(start, number.start - _BESIDE) : number.start].rpartition("\n")[1:])
    after = text[number.end : number.end + _BESIDE].partition("\n")[0]
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
        if in_math or difference["chain"]:
            return True
        sides = (difference["left"], written)
        whole = [re.sub(r"[^0-9.]", "", side).partition(".")[0].lstrip("0") for side in sides]
        low, high = ((len(digits), digits) for digits in whole)
        return "/" not in "".join(sides) and low >= high  # what ascends may be a range
    outer += inner[:1] if inner[:1].isspace() else ""
    return bool(_BEFORE.search(outer) or (in_math and _BEFORE_IN_MATH.search(outer)))


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
