"""The turns of a completion with tools or an environment: their tokens, tool calls and answers.

A turn is a run of tokens that the model wrote. Messages are matched with these runs one by one, or not at all.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
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


def read_turns(
    by_model: Sequence[bool],
    completion: Any,
    text: str,
    offsets: Sequence[tuple[int, int]],
    async_tools: Collection[str] = (),
) -> list[Turn]:
    """The turns of one completion."""
    runs = true_runs(by_model)
    pairs = exchanges(completion)
    if len(pairs) != len(runs) and len(pairs) > 1:
        raise AlignmentError(
            f"The completion has {len(pairs)} assistant messages, but its tokens have {len(runs)} turns (runs that the "
            "model wrote). Return messages and a mask (env_mask) of the same turns."
        )
    turns = []
    for number, run in enumerate(runs):
        after = runs[number + 1][0] if number + 1 < len(runs) else len(offsets)
        start, end = _characters(offsets, run)
        turn = Turn(
            number=number,
            tokens=run,
            text=text[start:end],
            characters=(start, end),
            observation=text[slice(*_characters(offsets, (run[1], after)))],
        )
        if len(pairs) == len(runs):
            message, answers = pairs[number]
            content = message.get("content")
            place = only_place(content, turn.text, start) if isinstance(content, str) else None
            turn = replace(turn, content=place, calls=_calls(message, answers, async_tools))
        turns.append(turn)
    return turns


def only_place(content: str, text: str, shift: int) -> tuple[int, int] | None:
    """Where a content stands in a text: if it is empty at its beginning, else if it occurs exactly once."""
    place = text.find(content)
    if place < 0 or (content and place != text.rfind(content)):
        return None
    return shift + place, shift + place + len(content)


def _characters(offsets: Sequence[tuple[int, int]], run: tuple[int, int]) -> tuple[int, int]:
    """The characters that a run of tokens wrote."""
    written = [pair for pair in offsets[slice(*run)] if pair[1] > pair[0]]
    if written:
        return written[0][0], written[-1][1]
    place = max((end for _, end in offsets[: run[0]]), default=0)
    return place, place


def _calls(
    message: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], async_tools: Collection[str]
) -> list[ToolCall]:
    """A message's calls with their results: named, in the order of the calls, those of asynchronous tools last."""
    calls = [ToolCall(name=str(one.get("name", "")), arguments=one.get("arguments")) for one in tool_calls(message)]
    if not answers:
        return [replace(call, outcome="unanswered") for call in calls]
    waiting: dict[str, deque[Any]] = defaultdict(deque)
    for answer in answers:
        waiting[str(answer.get("name", ""))].append(answer.get("content"))
    if Counter(call.name for call in calls) != {name: len(contents) for name, contents in waiting.items()}:
        return [replace(call, outcome="unknown") for call in calls]
    # An asynchronous tool that is called with wrong arguments raises at once, before what others of its calls return.
    mixed = {n for n, contents in waiting.items() if n in async_tools and len({*map(is_tool_error, contents)}) > 1}
    answered = []
    for call in calls:
        content = waiting[call.name].popleft()
        outcome = "raised" if is_tool_error(content) else "returned"
        new = {"outcome": "unknown"} if call.name in mixed else {"outcome": outcome, "result": str(content)}
        answered.append(replace(call, **new))
    return answered
