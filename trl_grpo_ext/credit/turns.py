"""The turns of a completion with tools or an environment: their tokens, tool calls and answers.

A turn is a run of tokens that the model wrote, by the tool mask. Messages are matched with these runs one by one, or
not at all if their numbers differ. Within a turn, the tokenizer's `response_template` locates content and calls.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import AlignmentError
from ..types import ToolCall, Turn

_ERROR = re.compile(r"\{'error': (?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")\}", re.DOTALL)

Exchange = tuple[Mapping[str, Any], list[Mapping[str, Any]]]
"""An assistant message and the messages that answer it."""


def is_tool_error(content: Any) -> bool:
    """Whether a tool message reports an error: TRL writes `{'error': '...'}` if the tool raised."""
    return isinstance(content, str) and _ERROR.fullmatch(content) is not None


def exchanges(completion: Any) -> list[Exchange]:
    """The assistant messages of a completion, each with the messages that answer it; empty for a string."""
    pairs: list[Exchange] = []
    for message in [] if isinstance(completion, str) else completion:
        if message.get("role", "assistant") == "assistant":
            pairs.append((message, []))
        elif pairs:
            pairs[-1][1].append(message)
    return pairs


def tool_calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tool calls of an assistant message, each as its function: `name` and `arguments`; others are left out."""
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list | tuple) else []
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    return [function for function in functions if isinstance(function, Mapping)]


def true_runs(by_model: Sequence[bool]) -> list[tuple[int, int]]:
    """The runs of True, as `(first, end)`."""
    padded = [False, *by_model, False]
    edges = [place for place in range(len(padded) - 1) if padded[place] != padded[place + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True)
class Parsing:
    """The parser for messages, from Transformers: the loaded `response_template`, and how a field's text is read."""

    template: Any
    value: Callable[[str, Any, dict[str, str]], Any]


def read_turns(
    tokenizer: Any,
    ids: Sequence[int],
    by_model: Sequence[bool],
    completion: Any,
    text: str,
    offsets: Sequence[tuple[int, int]],
    prompt_ids: Sequence[int] = (),
    async_tools: Collection[str] = (),
    parsing: Parsing | None = None,
) -> list[Turn]:
    """The turns of one completion."""
    runs, pairs = true_runs(by_model), exchanges(completion)
    if len(pairs) != len(runs) and len(pairs) > 1:
        raise AlignmentError(
            f"The completion has {len(pairs)} assistant messages, but its tokens have {len(runs)} turns (runs that the "
            "model wrote). Return messages and a mask (env_mask) of the same turns."
        )
    matched: Sequence[Exchange | None] = pairs if len(pairs) == len(runs) else [None] * len(runs)
    spoken = _Spoken.of(tokenizer, ids, text, offsets)
    turns = []
    for number, (run, pair) in enumerate(zip(runs, matched, strict=True)):
        after = runs[number + 1][0] if number + 1 < len(runs) else len(ids)
        start, end = spoken.characters(run)
        fields = [] if parsing is None else _fields_of(parsing.template, tokenizer, spoken, run, prompt_ids)
        turns.append(
            Turn(
                number=number,
                tokens=run,
                text=text[start:end],
                characters=(start, end),
                content=None if pair is None else _content(pair[0], text, (start, end), fields),
                calls=_calls(pair, fields, run, async_tools, parsing),
                observation=text[slice(*spoken.characters((run[1], after)))],
            )
        )
    return turns


def only_place(content: str, text: str, shift: int) -> tuple[int, int] | None:
    """Where a content stands in a text, if it occurs exactly once."""
    if text.count(content) != 1 or text.find(content) != text.rfind(content):  # `count` passes over what overlaps
        return None
    place = shift + text.index(content)
    return place, place + len(content)


@dataclass(frozen=True)
class _Spoken:
    """A completion's text including special tokens, and each token's characters in it."""

    ids: Sequence[int]
    raw: str
    ranges: Sequence[tuple[int, int]]
    plain: Sequence[int]
    offsets: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, tokenizer: Any, ids: Sequence[int], text: str, offsets: Sequence[tuple[int, int]]) -> _Spoken:
        special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        pieces: list[str] = []
        ranges: list[tuple[int, int]] = []
        plain: list[int] = []
        reached = size = 0
        for token, (start, end) in zip(ids, offsets, strict=True):
            word = special.get(int(token)) if start == end else None
            piece = text[reached : max(reached, end)] if word is None else word
            shared = max(0, min(reached, end) - start)  # a character whose bytes are cut over several tokens
            ranges.append((size - shared, size + len(piece)))
            plain += range(reached, reached + len(piece)) if word is None else [reached] * len(piece)
            pieces.append(piece)
            size, reached = size + len(piece), max(reached, end)
        return cls(ids, "".join(pieces), ranges, [*plain, reached], offsets)

    def characters(self, run: tuple[int, int]) -> tuple[int, int]:
        """The characters in the text without special tokens that a run of tokens wrote."""
        written = [pair for pair in self.offsets[slice(*run)] if pair[1] > pair[0]]
        if written:
            return written[0][0], written[-1][1]
        place = max((end for _, end in self.offsets[: run[0]]), default=0)
        return place, place

    def tokens(self, start: int, end: int, run: tuple[int, int]) -> tuple[int, int]:
        """The tokens of a turn that wrote some characters of `raw`."""
        inside = [token for token in range(*run) if self.ranges[token][0] < end and self.ranges[token][1] > start]
        return (inside[0], inside[-1] + 1) if inside else (run[0], run[0])


@dataclass(frozen=True)
class _Field:
    """A field of the message, as a response template finds it in a turn."""

    spec: Any
    text: str
    captures: Mapping[str, str]
    tokens: tuple[int, int]
    characters: tuple[int, int]


def _fields_of(
    template: Any, tokenizer: Any, spoken: _Spoken, run: tuple[int, int], prompt_ids: Sequence[int]
) -> list[_Field]:
    """The fields of a turn's message, in order."""
    # What the chat template has written of the message before the model went on, such as `<think>`.
    begun = template.truncate_past_last_anchor(tokenizer.decode([*prompt_ids, *spoken.ids[: run[0]]])) or ""
    first = spoken.ranges[run[0]][0]
    raw = begun + spoken.raw[first : spoken.ranges[run[1] - 1][1]]
    fields = []
    for spec, (outer, outer_end), (inner, inner_end), captures in _found(template, raw):
        if outer_end <= len(begun) < len(raw):
            continue
        outer, outer_end, start, end = (max(0, p - len(begun)) + first for p in (outer, outer_end, inner, inner_end))
        while start < end and spoken.raw[start].isspace():
            start += 1
        while start < end and spoken.raw[end - 1].isspace():
            end -= 1
        tokens, characters = spoken.tokens(outer, outer_end, run), (spoken.plain[start], spoken.plain[end])
        fields.append(_Field(spec, raw[inner:inner_end], captures, tokens, characters))
    return fields


_Place = tuple[int, int]


def _found(template: Any, raw: str) -> Iterator[tuple[Any, _Place, _Place, Mapping[str, str]]]:
    """Each field that a template finds: the field, its place with and without its markers, and named groups."""
    rest = template.fields[template.implicit] if template.implicit else None
    place = 0
    while True:
        watched = [(0, spec, spec.open_re) for spec in template.fields.values() if spec.open_re is not None]
        if rest is not None and rest.close_re is not None:
            watched.append((1, rest, rest.close_re))
        marks = [(closes, spec, mark) for closes, spec, pattern in watched if (mark := pattern.search(raw, place))]
        if not marks:
            break
        closes, spec, mark = min(marks, key=lambda one: (one[2].start(), -one[2].end(), one[0], one[1].name))
        if rest is not None and mark.start() > place:
            yield rest, (place, mark.end() if closes else mark.start()), (place, mark.start()), {}
        elif closes and mark.start() == mark.end():
            return
        place = mark.end()
        if not closes:
            close = None if spec.close_re is None else spec.close_re.search(raw, place)
            inner_end, outer_end = (len(raw), len(raw)) if close is None else close.span()
            captures = {name: value for name, value in mark.groupdict().items() if value is not None}
            yield spec, (mark.start(), outer_end), (place, inner_end), captures
            place = outer_end
    if rest is not None and place < len(raw):
        yield rest, (place, len(raw)), (place, len(raw)), {}


def _content(
    message: Mapping[str, Any], text: str, characters: tuple[int, int], fields: Sequence[_Field]
) -> tuple[int, int] | None:
    """Where a message's content stands in the text; None where it occurs twice or not at all."""
    content, (start, end) = message.get("content"), characters
    if not isinstance(content, str):
        return None
    if not content or content == text[start:end]:
        return start, start + len(content)
    for field in reversed(fields):
        if field.spec.name == "content" and content == text[slice(*field.characters)]:
            return field.characters
    return only_place(content, text[start:end], start)


def _calls(
    pair: Exchange | None,
    fields: Sequence[_Field],
    run: tuple[int, int],
    async_tools: Collection[str],
    parsing: Parsing | None,
) -> list[ToolCall]:
    """The calls of a turn: those of its message with their results, or else those that the template finds."""
    written = [field for field in fields if field.spec.name == "tool_calls"]
    made = [] if pair is None else tool_calls(pair[0])
    if pair is None or not made:
        return [call for field in written if parsing for call in _unanswered(field, parsing, seen=pair is not None)]
    places = [run] * len(made)
    if len(written) in (1, len(made)):  # one for each, or one list of all
        places = [field.tokens for field in written] * (len(made) // len(written))
    calls = [
        ToolCall(name=str(call.get("name", "")), arguments=call.get("arguments"), tokens=place)
        for call, place in zip(made, places, strict=True)
    ]
    return _answered(calls, pair[1], async_tools)


def _unanswered(field: _Field, parsing: Parsing, seen: bool) -> list[ToolCall]:
    """A call in the text but in no message: it cannot be read, was never run, or its fate is unknown."""
    try:
        values = parsing.value(field.text, field.spec, dict(field.captures))
        functions = tool_calls({"tool_calls": values if isinstance(values, list) else [values]})
        names = [function["name"] for function in functions]
        readable = all(isinstance(name, str) for name in names)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # as written by the model
        readable = False
    if not readable:
        return [ToolCall(name=field.captures.get("name", ""), outcome="unparsed", tokens=field.tokens)]
    outcome = "not_run" if seen else "unknown"
    return [
        ToolCall(name=function["name"], arguments=function.get("arguments"), outcome=outcome, tokens=field.tokens)
        for function in functions
    ]


def _answered(
    calls: Sequence[ToolCall], answers: Sequence[Mapping[str, Any]], async_tools: Collection[str]
) -> list[ToolCall]:
    """The calls with their results, which are named and come in the order of the calls, asynchronous ones last."""
    if not answers:
        return [replace(call, outcome="unanswered") for call in calls]
    waiting: dict[str, deque[Any]] = defaultdict(deque)
    for answer in answers:
        waiting[str(answer.get("name", ""))].append(answer.get("content"))
    counts = {name: sum(call.name == name for call in calls) for name in {*waiting, *(call.name for call in calls)}}
    if any(len(waiting[name]) != count for name, count in counts.items()):
        return [replace(call, outcome="unknown") for call in calls]
    # An asynchronous tool that is called with wrong arguments raises at once, before what others of its calls return.
    mixed = {n for n, contents in waiting.items() if n in async_tools and len({*map(is_tool_error, contents)}) > 1}
    answered = []
    for call in calls:
        content = waiting[call.name].popleft()
        if call.name in mixed:
            answered.append(replace(call, outcome="unknown"))
            continue
        outcome = "raised" if is_tool_error(content) else "returned"
        answered.append(replace(call, outcome=outcome, result=content if isinstance(content, str) else str(content)))
    return answered
