"""Does each line of the completion hold the expected answer?"""

import math
import re
from collections.abc import Sequence
from typing import Any

from ..guard.outcomes import Judgement, Outcome, shown
from ..guard.parameters import amount, choice, text, whole
from ..types import END, Part, Parts, RewardDeclaration
from ._judged import Comparing, too_long
from ._text.json_text import is_near, read_number, read_plain_number

_NUMBER = re.compile(r"(\d{1,6})(?:[.:](?P<decimal>(?=\d))|[.):]\s*+)", re.ASCII)


class Lines(Comparing):
    """Score the share of expected answers that stand in their lines, one answer a line, each a part.

    The k-th expected answer belongs to the k-th line that is not blank, or to the item with the number k. Its part is
    `line_k`, whose place is the line, or of a numbered item the text after the number, without white space around it. A
    line that is missing scores 0 and has no place; one whose number is repeated scores 0, with all of them as places.

    An expected text must be the whole line. An expected number is compared by value: `1,200.0` is 1200. None in the
    list is a line that is not judged.

    Args:
        column: The dataset's column of lists of texts and numbers.
        form: "plain": one answer a line. "numbered": items such as `1. Rome`, `2) 18` or `3: yes`, in any order; other
            lines do not matter. A line such as `2.5 km` is an item only if no other is number 2.
        absolute: How far a number may be away from the right one.
        relative: The same, as a share of the right one. The larger of the two counts.
        ignore_case: Compare texts without regard to case.
        ignore_space: Compare texts with each run of white space in them as one space.
        stop: The weight, beside 1 for each answer, of a part `stop`, placed at the completion's end: 1.0 if there are
            as many lines or items as answers and nothing but white space after the last, else 0.0.
        max_characters: Longer completions are refused.
        outcomes: Values of the outcomes `right`, `no_answer`, `unparseable_reference` (no such list) and `refused`.
    """

    __name__ = "lines"
    can = (Outcome.RIGHT, Outcome.SCORED, Outcome.NO_ANSWER, Outcome.UNPARSEABLE, Outcome.REFUSED)
    reads = "the expected lines"
    advice = "It has a list of answers for each row; `column` names another."
    declares = RewardDeclaration(
        reference_column="lines",
        conformance={"columns": {"lines": [["18", "eggs"]]}, "completions": ["18\neggs", "17\neggs", "17\n"]},
    )

    column: str = text("lines")
    form: str = choice("plain", "numbered")
    stop: float = amount(0.0)
    max_characters: int = whole(100_000, lowest=1)

    def _judged(self, text: str, expected: Any) -> Judgement:
        right = _answers(expected)
        if right is None:
            return Judgement(Outcome.UNPARSEABLE, shown(expected)[:200])
        if len(text) > self.max_characters:
            detail = too_long(len(text), self.max_characters)
            return Judgement(Outcome.REFUSED, detail, self._parts(text, right, []))
        found = _found(text, self.form)
        parts = self._parts(text, right, found)
        if not found:
            return Judgement(Outcome.NO_ANSWER, "no line", parts)
        return Judgement(Outcome.RIGHT if parts == 1.0 else Outcome.SCORED, score=parts)

    def _parts(self, text: str, right: Sequence[Any], found: Sequence[tuple[int, int, int]]) -> Parts:
        places: dict[int, list[tuple[int, int]]] = {number: [] for number in range(1, len(right) + 1)}
        for number, start, end in found:
            if number in places:
                places[number].append((start, end))
        parts = []
        for number, wanted in enumerate(right, 1):
            at = places[number]
            is_right = wanted is not None and len(at) == 1 and self._same(text[slice(*at[0])], wanted)
            parts.append(Part(f"line_{number}", None if wanted is None else float(is_right), 1.0, at))
        if self.stop:
            stopped = len(found) == len(right) and not text[found[-1][2] :].strip()
            parts.append(Part("stop", float(stopped), self.stop, END))
        return Parts(parts)

    def _same(self, said: str, wanted: Any) -> bool:
        if isinstance(wanted, str):
            return self.same_texts(said, wanted)
        number = read_plain_number(said)
        return number is not None and is_near(number, read_number(repr(wanted)), self.absolute, self.relative)


def _found(text: str, form: str) -> list[tuple[int, int, int]]:
    """The lines or items: number, beginning and end of the answer, without white space around it."""
    found: list[tuple[int, int, int]] = []
    decimals: list[tuple[int, int, int]] = []  # that may as well be prose: `2.5 km away`, `12:30 is noon`
    first = 0
    for line in text.split("\n"):
        answer = line.strip()
        start = first + len(line) - len(line.lstrip())
        end = start + len(answer)
        first += len(line) + 1
        number = len(found) + 1
        into = found
        if form == "numbered":
            mark = _NUMBER.match(answer)
            if mark is None:
                continue
            number = int(mark[1])
            start = start + mark.end()
            into = found if mark["decimal"] is None else decimals
        if start < end:
            into.append((number, start, end))
    numbers = {number for number, _, _ in found}
    found += [one for one in decimals if one[0] not in numbers]
    return sorted(found, key=lambda one: one[1])


def _answers(expected: Any) -> list[Any] | None:
    listed = expected.tolist() if hasattr(expected, "tolist") else expected
    if not isinstance(listed, list | tuple):
        return None
    answers: list[Any] = [one.strip() if isinstance(one, str) else one for one in listed]
    known = [one for one in answers if one is not None]
    for one in known:
        is_number = isinstance(one, int | float) and not isinstance(one, bool)
        if not (is_number and math.isfinite(one)) and not (isinstance(one, str) and one and "\n" not in one):
            return None
    return answers if known else None
