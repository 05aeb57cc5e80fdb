"""`JSONSchema`: where the JSON is found, what is valid, and JSON that is made to hang or crash its reader."""

import json
from typing import Any

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.json_schema import JSONSchema, verdict
from trl_grpo_ext.types import Parts

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def outcomes(schema: Any, completions: list[Any], extract: str = "whole", **parameters: Any) -> list[str]:
    judged = JSONSchema(schema, extract=extract, **parameters).judge(completions)
    return [judgement.outcome.value for judgement in judged]


def test_with_partial_each_property_is_a_part() -> None:
    reward = JSONSchema(PERSON, extract="last", partial=0.2)
    # Of two objects the last one counts.
    texts = ['So {"name": "Ada", "age": -1}', '{"age": 3} {"age": 3}', '{"name": "a", "name": "b"}', "Ada"]
    scores = reward(completions=[[{"role": "assistant", "content": text}] for text in texts])
    assert scores == [0.2, 0.2, 0.2, 0.0]
    assert [[(part.name, part.score, part.places) for part in score.parts] for score in scores] == [
        [("name", 1.0, ((12, 17, None),)), ("age", 0.0, ((26, 28, None),))],
        [("name", 0.0, ()), ("age", 1.0, ((19, 20, None),))],
        [("name", 0.0, ()), ("age", None, ())],
        [("name", 0.0, ()), ("age", None, ())],
    ]
    changed = JSONSchema(PERSON, extract="whole", partial=0.2, outcomes={"no_answer": -1.0, "refused": None})
    none, refused = changed(completions=["Ada", "[" * 60])
    assert (none, none.parts[0].score, refused) == (-1.0, -1.0, None)
    assert not isinstance(JSONSchema(PERSON, extract="whole")(completions=['{"name": "Ada"}'])[0], Parts)


def test_outcomes_are_told_apart_and_changed() -> None:
    reward = JSONSchema(PERSON, extract="whole", partial=0.5, outcomes={"no_answer": -1.0, "wrong": 0.25})
    completions = ['{"name": "Ada"}', "[]", "Ada", '{"name": "' + "x" * 200_000 + '"}', '{"name": "a", "age": -1}']
    assert reward(completions=completions) == [1.0, 0.25, -1.0, 0.0, 0.25]
    judged = reward.judge(completions)
    assert [one.outcome.value for one in judged] == ["right", "wrong", "no_answer", "refused", "wrong"]
    assert "'$.age'" in judged[-1].detail


def test_the_draft_is_2020_12_unless_the_schema_says_otherwise() -> None:
    tuple_of_old = {"items": [{"type": "integer"}]}
    assert outcomes({"$schema": "http://json-schema.org/draft-07/schema#", **tuple_of_old}, ['["a"]']) == ["wrong"]
    with pytest.raises(ConfigurationError, match=r"\$.items"):
        JSONSchema(tuple_of_old)
    # References inside the schema and to the standard work.
    tree = {"type": "array", "items": {"$ref": "#"}}
    assert outcomes(tree, ["[[], [[]]]", "[[], [1]]"]) == ["right", "wrong"]
    named = {"$id": "https://example.org/s", "$defs": {"n": {"$id": "n", "type": "number"}}, "items": {"$ref": "n"}}
    assert outcomes(named, ["[1, 2.5]"]) == ["right"]
    assert outcomes({"$ref": "https://json-schema.org/draft/2020-12/schema"}, ['{"type": "object"}']) == ["right"]


def test_multiples_are_those_of_decimals() -> None:
    cents = [f"{count // 100}.{count % 100:02}" for count in range(2001)]
    for schema in ({"multipleOf": 0.01}, {"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 0.01}):
        assert set(outcomes(schema, [*cents, "-0.07", "1e2", '"0.005"'])) == {"right"}
        assert set(outcomes(schema, ["0.075", "19.991", "1e-7"])) == {"wrong"}
    # Where the schema names its draft, a reference to all of it goes by decimals, too.
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", "multipleOf": 0.01, "items": {"$ref": "#"}}
    assert outcomes(whole, ["[19.99]", "[19.995]", "[[0.07]]"]) == ["right", "wrong", "right"]


def test_each_row_may_have_its_own_schema() -> None:
    number, text = '{"type": "integer"}', '{"type": "string"}'
    reward = JSONSchema(extract="whole", column="wanted")
    completions = ["1", '"a"', "1", "1", "x" * 2_000_000]
    assert reward(completions=completions, wanted=[number, text, text, "true", number]) == [1.0, 1.0, 0.0, 1.0, 0.0]
    bad = ['{"type": "objekt"}', "{", '"schema.json"', "[" * 9000, '{"$ref": "#/$defs/a"}', None]
    with pytest.warns(UserWarning, match=r"row 1 .*\$.type"):
        assert reward(["1"] * 7, wanted=[number, *bad]) == [1.0, *[None] * 6]
    assert JSONSchema(True, extract="whole")(["1"], schema=["not looked at"]) == [1.0]


HOSTILE: dict[str, list[Any]] = {
    "refused": [
        *("[" * 100_000, "[" * 45_000 + "]" * 45_000, '{"a":' * 10_000 + "1" + "}" * 10_000, "[" * 51 + "]" * 51),
        *("9" * 5000, "-" + "9" * 99_000, "1e999", "x" * 1_000_001),
    ],
    "right": ["[" * 50 + "]" * 50, "9" * 1000, "1e-999", '"\\ud800"', '"\ud800"', "[" + "1," * 49_000 + "1]"],
    "wrong": ['{"a": 1, "a": 2}', '{"a": {"b": 1, "\\u0062": 2}}'],
    "no_answer": [
        *("NaN", '{"a": -Infinity}', '"\x00"', "\ufeff1", '"' + '\\"' * 45_000, "{}{}", "", " \n", None, []),
        [{"role": "assistant", "content": None}],
    ],
}


def test_hostile_json_has_an_outcome() -> None:
    for outcome, texts in HOSTILE.items():
        found = outcomes(True, texts)
        assert [repr(text)[:80] for text, seen in zip(texts, found, strict=True) if seen != outcome] == []


def test_json_schema_that_never_ends_or_raises() -> None:
    texts = ['"' + "a" * 50 + '!"', '"aaa"', '"' + "a" * 60 + '!"', '"b"']
    assert outcomes({"pattern": "^(a+)+$"}, texts, timeout=0.5) == ["timeout", "right", "timeout", "wrong"]
    assert outcomes({"uniqueItems": True}, ["[" + "{}," * 30_000 + "1]"], timeout=20) == ["wrong"]
    huge = "1" * 401
    assert outcomes({"type": "number", "multipleOf": 0.01}, [huge, "12.34", "0.001"]) == ["right", "right", "wrong"]
    assert outcomes(True, ["[" * 30_000 + "]" * 30_000], max_depth=10**6) == ["refused"]


def test_json_schema_refuses_broken_schemas() -> None:
    with pytest.raises(ConfigurationError, match=r"\$.properties.a.pattern"):
        JSONSchema({"properties": {"a": {"pattern": "("}}})
    for schema in ({"pattern": "a{99999999999}"}, {"const": float("nan")}, {"const": {1, 2}}, 3, "missing.json"):
        with pytest.raises(ConfigurationError):
            JSONSchema(schema)  # type: ignore[arg-type]


UNFOLLOWED: list[Any] = [
    *({"$ref": "https://example.org/other.json"}, {"properties": {"a": {"$ref": "#/$defs/missing"}}}, {"$ref": "#"}),
    *({"$ref": "#/x", "x": {"type": "objekt"}}, {"$ref": "#/const", "const": 5}),
    {"patternProperties": {"a": True, "(?i)b": True}, "additionalProperties": False},
]


@pytest.mark.parametrize("schema", UNFOLLOWED)
def test_a_schema_that_cannot_be_followed_blames_no_answer(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", None)
    job = (json.dumps(JSONSchema(schema).schema), '{"a": {"b": 1}}')
    assert verdict("whole", 10**6, 50, False, job)[0] == "unparseable_reference"
