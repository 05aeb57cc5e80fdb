"""Which fields of the completion's JSON hold the expected values?"""

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..guard.outcomes import Judgement, Outcome, shown
from ..guard.parameters import amount, choice, text, whole
from ..types import Part, Parts, RewardDeclaration
from ._judged import Comparing
from ._text.json_text import EXTRACTS, AmbiguousError, Located, RefusedError, find_short_json, read_located

_DEEPEST = 200


class JSONFields(Comparing):
    """Score the share of expected fields that hold the right value, each field a part.

    The fields are the values of the expected JSON that are not objects or arrays themselves (or are empty ones). Their
    names are paths such as `address.city` and `items[0].price`; a key that is no word is written as `["a.b"]`. The
    place of a part is its value in the completion. A field that is missing, repeated, or in a repeated object scores 0.

    Values must be of the same JSON type: the text "18" is not the number 18. Numbers are compared as decimals, so 1.0
    is 1, and a tolerance of 0.01 includes exactly 0.01. JSON is read strictly: `NaN` is invalid.

    Args:
        column: The dataset's column of expected values: JSON text, or a mapping. Of a mapping, entries that are None
            are left out, since `datasets` gives every row the keys of all rows; to expect null, give text.
        extract: Where the JSON is, "fence", "whole" or "last", as in `json_schema`.
        absolute: How far a number may be away from the right one.
        relative: The same, as a share of the right one. The larger of the two counts.
        ignore_case: Compare texts without regard to case.
        ignore_space: Compare texts without white space at their ends, and with each run of it inside as one space.
        extra: What each key or item that is not expected, and each repetition of a key, takes off the sum of the
            fields, at most as often as there are fields; the reward is never below 0. The part `extra` stands at these
            values, or at the JSON's last character where there are none.
        max_characters: Longer JSON is refused, and so is a completion more than ten times as long.
        max_depth: JSON with deeper nesting is refused.
        outcomes: Values of the outcomes `right` (all of it), `no_answer` (no JSON), `unparseable_reference` (the
            expected values cannot be read, or there are none) and `refused` (too long, too deep, a number too large).
    """

    __name__ = "json_fields"
    can = (Outcome.RIGHT, Outcome.SCORED, Outcome.NO_ANSWER, Outcome.UNPARSEABLE, Outcome.REFUSED)
    reads = "the expected fields"
    advice = "It has the expected values as JSON text; `column` names another."
    declares = RewardDeclaration(
        reference_column="fields",
        conformance={
            "columns": {"fields": ['{"answer": 18, "unit": "eggs"}']},
            "completions": ['```json\n{"answer": 18, "unit": "eggs"}\n```', '```json\n{"answer": 17}\n```', "18"],
        },
    )

    column: str = text("fields")
    extract: str = choice(*EXTRACTS)
    extra: float = amount(0.0)
    max_characters: int = whole(100_000, lowest=1)
    max_depth: int = whole(50, lowest=1)

    def _judged(self, text: str, expected: Any) -> Judgement:
        try:
            if not isinstance(expected, str | Mapping):
                raise TypeError("neither JSON text nor a mapping")
            is_text = isinstance(expected, str)
            right = _reference(expected if is_text else json.dumps(_without_none(expected, _DEEPEST), allow_nan=False))
        except (ValueError, TypeError, RecursionError, AmbiguousError, RefusedError) as error:
            return Judgement(Outcome.UNPARSEABLE, f"{shown(expected)[:60]}: {shown(str(error))}")
        absent = self._parts(right, None)
        try:
            where = find_short_json(text, self.extract, self.max_characters)
            if where is None:
                return Judgement(Outcome.NO_ANSWER, "no JSON", absent)
            said = read_located(text, *where, self.max_depth, unique=False)
        except RefusedError as error:
            return Judgement(Outcome.REFUSED, str(error), absent)
        except ValueError as error:
            return Judgement(Outcome.NO_ANSWER, f"no JSON: {shown(str(error))}", absent)
        parts = self._parts(right, said)
        return Judgement(Outcome.RIGHT if parts == 1.0 else Outcome.SCORED, score=parts)

    def _parts(self, right: Located, said: Located | None) -> Parts:
        strays: list[tuple[int, int]] = []
        parts = []
        for path, wanted, found, once in _fields(right, [] if said is None else [said], strays):
            is_right = once and len(found) == 1 and self.same_values(found[0], wanted)
            parts.append(Part(path, float(is_right), 1.0, [(one.start, one.end) for one in found]))
        count = len(parts)
        total = sum(part.score or 0.0 for part in parts)
        if self.extra:
            taken = -self.extra * min(len(strays), count)
            total += taken
            places = strays or (said and (said.end - 1, said.end))
            parts.append(Part("extra", None if said is None else taken, 1.0, places))
        return Parts(parts, max(total / count, 0.0))


_Field = tuple[str, Located, list[Located], bool]


def _fields(right: Located, said: list[Located], strays: list[tuple[int, int]]) -> Iterator[_Field]:
    """Each expected field: path, value, what the completion has there, and whether no key around is repeated."""
    waiting = [("", right, said, True)]
    while waiting:
        path, wanted, found, once = waiting.pop()
        there: dict[str | int, list[Located]] = {key: [] for key, _ in wanted.members}
        for key, value in (member for one in found if one.kind == wanted.kind for member in one.members):
            if there.get(key) != []:
                strays.append((value.start, value.end))
            if key in there:
                there[key].append(value)
        if not wanted.members:
            yield path, wanted, found, once
        inner = [(_path(path, key), value, there[key], once and len(there[key]) <= 1) for key, value in wanted.members]
        waiting += reversed(inner)


def _path(path: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    if not key.isidentifier():
        return f"{path}[{json.dumps(key)}]"
    return f"{path}.{key}" if path else key


def _without_none(value: Any, depth: int) -> Any:
    if depth == 0:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    if isinstance(value, Mapping):
        return {key: _without_none(inner, depth - 1) for key, inner in value.items() if inner is not None}
    return [_without_none(inner, depth - 1) for inner in value] if isinstance(value, list | tuple) else value


@functools.lru_cache(maxsize=1024)
def _reference(text: str) -> Located:
    if len(text) > 1_000_000:
        raise ValueError(f"{len(text)} characters, more than a million")
    read = read_located(text, 0, len(text), _DEEPEST)
    if not read.members:
        raise ValueError("no object or array with anything in it")
    return read
