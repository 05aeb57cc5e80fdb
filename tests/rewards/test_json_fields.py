"""`JSONFields`: which values count as right, where they stand, and JSON that is made to fool or to stop its reader."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given

from tests.rewards._text.test_json_text import JSON
from trl_grpo_ext.rewards.json_fields import JSONFields
from trl_grpo_ext.types import Parts

ORDER = '{"name": "Ada", "address": {"city": "Rome", "zip": null}, "items": [{"price":2.5}, {"price":4}], "paid": true}'


def scored(text: str, expected: Any = ORDER, **parameters: Any) -> Any:
    parameters.setdefault("extract", "whole")
    (score,) = JSONFields(**parameters)(completions=[text], fields=[expected])
    return score


def said(score: Any, text: str) -> dict[str, tuple[float | None, list[str]]]:
    """By name, each part's score and the text at its places."""
    return {part.name: (part.score, [text[place.start : place.end] for place in part.places]) for part in score.parts}


def test_json_fields_are_parts_by_path() -> None:
    text = f"Sure:\n```json\n{ORDER.replace('4}', '5}').replace('true', '1')}\n```"
    score = scored(text, extract="fence")
    assert score == pytest.approx(4 / 6)
    found = said(score, text)
    assert [*found] == ["name", "address.city", "address.zip", "items[0].price", "items[1].price", "paid"]
    assert [part for part, _ in found.values()] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert [place for _, (place,) in found.values()] == ['"Ada"', '"Rome"', "null", "2.5", "5", "1"]
    assert pickle.loads(pickle.dumps(score)).parts == score.parts


def test_a_missing_field_scores_0_without_a_place() -> None:
    text = '{"items": [{"price": 2.50}], "address": "Rome", "name": ["Ada"], "paid": "true"}'
    found = said(scored(text), text)
    assert [score for score, _ in found.values()] == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert [places for _, places in found.values()] == [['["Ada"]'], [], [], ["2.50"], [], ['"true"']]


SAME: list[tuple[str, Any, dict[str, Any]]] = [
    *(("1.0", 1, {}), ("1e0", 1, {}), ('"\\u0041da"', "Ada", {}), ("{}", {}, {}), ("null", None, {})),
    ("1.01", 1.0, {"absolute": 0.01}),  # in doubles the difference is more than 0.01
    ("-95", -100, {"relative": 0.05}),
    *(("9" * 1000, int("9" * 1000), {}), ("1e-999999999999999999999", 0, {})),
    ('" ada\\tB "', "Ada b", {"ignore_case": True, "ignore_space": True}),
]
OTHER: list[tuple[str, Any, dict[str, Any]]] = [
    *(('"1"', 1, {}), ("true", 1, {}), ("0", False, {}), ("[]", {}, {}), ('{"b": 1}', {}, {})),
    *(("1.0100001", 1.0, {"absolute": 0.01}), ("106", 100, {"relative": 0.05, "absolute": 1})),
    *(("10000000000000001", 10000000000000000, {}), ("9" * 999 + "8", int("9" * 1000), {})),
    ('" ada\\tB "', "Ada b", {"ignore_case": True}),
]
ROWS = [*((*row, True) for row in SAME), *((*row, False) for row in OTHER)]


@pytest.mark.parametrize(("written", "expected", "options", "right"), ROWS)
def test_values_that_count_as_right(written: str, expected: Any, options: dict[str, Any], right: bool) -> None:
    text = f'{{"a": {written}}}'
    score = scored(text, json.dumps({"a": expected}), **options)
    assert said(score, text) == {"a": (float(right), [written])}


def test_names_of_fields() -> None:
    text = '{"a.b": 1, "a": {"b": 2}, "": 3, "0": 4, "l": [[5]], "\\u00e9": 6}'
    assert list(said(scored(text, text), text)) == ['["a.b"]', "a.b", '[""]', '["0"]', "l[0][0]", "é"]
    text = '{"a": {"b": 1.5}, "c": 1}'  # a mapping is read without what it has of other rows
    assert said(scored(text, {"a": {"b": 1.5, "x": None}, "d": None}), text) == {"a.b": (1.0, ["1.5"])}


def test_extra_and_repeated_keys_take_off_what_is_asked() -> None:
    wanted = '{"a": 1, "l": [1, 2]}'
    text = '{"a": 1, "l": [1, 2, 3], "b": {"c": 0}}'
    assert scored(text, wanted) == 1.0
    score = scored(text, wanted, extra=0.5)
    assert score == pytest.approx((3 - 2 * 0.5) / 3)
    assert said(score, text)["extra"] == (-1.0, ['{"c": 0}', "3"])
    assert said(scored(wanted, wanted, extra=0.5), wanted)["extra"] == (0.0, ["}"])
    text = '{"a": 1, "a": 1, "l": [1, 2]}'
    found = said(scored(text, wanted, extra=0.5), text)
    assert (found["a"], found["l[0]"], found["extra"]) == ((0.0, ["1", "1"]), (1.0, ["1"]), (-0.5, ["1"]))
    text = '{"a": {"b": 1}, "a": {"c": 2}}'  # fields of a repeated object are wrong
    assert said(scored(text, '{"a": {"b": 1, "c": 2}}'), text) == {"a.b": (0.0, ["1"]), "a.c": (0.0, ["2"])}
    many = json.dumps({f"x{number}": 0 for number in range(1000)})
    score = scored(many, wanted, extra=0.5)
    assert (score, score.parts[-1].score) == (0.0, -1.5)
    (nothing,) = JSONFields(extra=0.5)(completions=["no"], fields=[wanted])
    assert [part.score for part in nothing.parts] == [0.0, 0.0, 0.0, None]


ANSWERS: dict[str, tuple[float | None, list[str]]] = {
    "no_answer": (-1.0, ["", "Ada", '{"a": NaN}', '{"a": 1', "{'a': 1}", '{"a": 1} end', "\ud800"]),
    "refused": (None, ["[" * 60 + "]" * 60, "[" * 90_000, '{"a": 1e999}', f'{{"a": {"9" * 1001}}}', " " * 200_000]),
    "scored": (0.0, ["[]", "3", '{"a": "\\ud800\\u0000"}', '{"a": 1, "a": 2}']),
    "right": (1.0, ['{"a": 1}', ' {"a": 1.0}\n', '{"a": 1, "b": 2}']),
}


@pytest.mark.parametrize("outcome", ANSWERS)
def test_outcomes_of_answers(outcome: str) -> None:
    reward = JSONFields(extract="whole", outcomes={"no_answer": -1.0, "refused": None})
    value, texts = ANSWERS[outcome]
    columns = {"completions": texts, "fields": ['{"a": 1}'] * len(texts)}
    assert {judged.outcome.value for judged in reward.judge(**columns)} == {outcome}
    for text, score in zip(texts, reward(**columns), strict=True):
        assert score == value
        if isinstance(score, Parts):
            ((name, part, _, places),) = score.parts
            assert (name, part) == ("a", value)
            assert bool(places) == ('"a"' in text and outcome != "no_answer")


UNREAD: list[Any] = [None, 3, [1], "", "Ada", "3", "{}", "[]", '{"a": NaN}', '{"a": 1, "a": 1}', "[" * 9000]
UNREAD += [{"a": {1, 2}}, {"a": None}, {"a": float("nan")}]


@pytest.mark.parametrize("expected", UNREAD)
def test_expected_values_that_cannot_be_read_give_none(expected: Any) -> None:
    with pytest.warns(UserWarning, match="row 1"):
        scores = JSONFields(extract="whole")(completions=['{"a": 1}'] * 2, fields=['{"a": 1}', expected])
    assert scores == [1.0, None]


@given(value=JSON.filter(lambda value: isinstance(value, dict | list) and value))
def test_json_fields_have_one_place_each(value: Any) -> None:
    score = scored(json.dumps(value), json.dumps(value))
    assert score == 1.0
    assert all(len(part.places) == 1 for part in score.parts)
