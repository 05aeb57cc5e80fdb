"""Where JSON is found in a text, in linear time; how deep it is, and where each of its values stands."""

import json
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards._text.json_text import Located, depth_of, find_json, read_located

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.floats(-9, 9) | st.text('ab"\\{}[]\n` é', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"\\{}', max_size=3), inner, max_size=3),
    max_leaves=12,
)


def inside_of(text: str, extract: str) -> str | None:
    where = find_json(text, extract)
    return where and text[slice(*where)]


def test_find_json_finds_the_last_object() -> None:
    for text, found in (
        *(('so {"a": {"b": 2}} it is', '{"a": {"b": 2}}'), ('{"a": 1} and {"b": 2}.', '{"b": 2}'), ("{}", "{}")),
        ('a { brace, "a quote and {"b": "}{\\""} here', '{"b": "}{\\""}'),
        *(('{"a": 1} } and }', '{"a": 1}'), ('{"a": 1} or {not json}', '{"a": 1}'), ("[1]", None), ("{", None)),
        *(('The answer is: {"a": 1}', '{"a": 1}'), ('Here, {"a": 1}', '{"a": 1}'), ("}" * 100, None), ("", None)),
        ('{"a": {"b": 1}', None),  # part of an object that was cut off
        ('{"x": 0} {"a": [{"b": 1}, {"c": 2}', '{"x": 0}'),
        *((f'{{"items": [{item}, {{"a": 1}}]', None) for item in ("5", "true", "false", "null", '"x"', "{}", "[]")),
        *((f'{{"n": {bad}, "m": [null , {{"a": 1}}]}}', None) for bad in ("NaN", "01", "'x'", "...", '"\n"', '"\\x"')),
        *(('["{}"]', None), ('{"a": "{}", "b": 1, "c":', None), ('[1,%s{"a": 1}]' % (" " * 300), None)),
        *((f'{{"t": "x}}]", "n": {bad}, "y": {{"a": 1}}}}', None) for bad in ("NaN", "01", "oops", "[1,")),
        # A broken one beside it, a quotation mark in prose, a comma or a key that no bracket opens.
        *(('{"a: 1} or {"a": 1}', '{"a": 1}'), ('{"a": "x} or {"a": 1}', '{"a": 1}'), ('[see {"a": 1}]', '{"a": 1}')),
        *(('In 2024, {"a": 1}', '{"a": 1}'), ('The "answer": {"a": 1}', '{"a": 1}'), ('{}, {"a": 1}', '{"a": 1}')),
    ):
        assert inside_of(text, "last") == found, text
    for many in ({"rows": [{"id": number} for number in range(3000)]}, {"text": "{}" * 3000}):
        assert inside_of(f"So {json.dumps(many)}.", "last") == json.dumps(many)


def test_the_last_object_is_found_in_linear_time() -> None:
    shapes = ['{"a":', '{"a":[', "[", "[1,", '{"', '["', "{}", "{},", "[{}", '"a":{},', '{"a":[null,', '{"{":":1,{",']
    shapes += ['{"a":"{",', '{\\"', '{"a\\"', '{"\\u12', '{"a\x01', "{ ", '{"a":-', "[1e,", '{"a":1.', '{"a":1]']
    texts = [start + shape * (50_000 // len(shape)) for start in ("", "{x ") for shape in shapes]
    texts += ['{"a":[null,' * 300 + "1," * 100_000, '{"a":' + "9" * 200_000, '{"a":"' + "{}" * 100_000]
    texts += ["{" + " " * 200_000, ('{"a":"{"' + " " * 1000) * 200]
    start = time.process_time()
    for text in texts:
        find_json(text, "last")
    assert time.process_time() - start < 5  # about 1


@given(
    value=st.dictionaries(st.text('k"\\{', max_size=3), JSON, max_size=4), before=st.text('ab {"\\}[:,1', max_size=20)
)
def test_any_object_is_found_behind_any_prose(value: dict[str, Any], before: str) -> None:
    assert inside_of(f"{before} is {json.dumps(value)} so", "last") == json.dumps(value)


@given(value=JSON)
def test_depth_counts_brackets_outside_of_strings(value: Any) -> None:
    def depth(part: Any) -> int:
        inside = part.values() if isinstance(part, dict) else part
        return 1 + max(map(depth, inside), default=0) if isinstance(part, (dict, list)) else 0

    assert depth_of(json.dumps(value)) == depth(value)


def plain(value: Located) -> Any:
    if value.kind == "object":
        return {key: plain(inner) for key, inner in value.members}
    if value.kind == "array":
        return [plain(inner) for _, inner in value.members]
    return value.value if value.kind != "number" else float(value.value)


def everywhere(value: Located) -> list[Located]:
    return [value, *(one for _, inner in value.members for one in everywhere(inner))]


@given(value=JSON, before=st.text('a"{', max_size=3), indent=st.none() | st.integers(0, 2), ascii_only=st.booleans())
def test_each_value_stands_where_it_is_said_to(value: Any, before: str, indent: Any, ascii_only: bool) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    read = read_located(f"{before}{written}}}", len(before), len(before) + len(written), 50)
    assert plain(read) == value
    for one in everywhere(read):
        assert json.loads(f"{before}{written}"[one.start : one.end]) == plain(one)
