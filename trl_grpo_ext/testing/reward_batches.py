"""Batches to try rewards on, as TRL hands them over: texts or messages, with a row of every column."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..guard.outcomes import shown

Form = Literal["text", "messages"]

COMPLETIONS = (
    r"The answer is \boxed{18}.",
    "<think>20 - 2 = 18</think>\n<answer>\\boxed{18}</answer>",
    "nothing at all is to be seen here",
    "She sells 16 - 3 - 4 = 9 eggs a day, and so she has 9 * 2 = $18. #### 18",
    "```python\ndef add(a, b):\n    return a + b\n```",
    '```json\n{"answer": 18, "unit": "eggs"}\n```',
    "1 3 18",
    "<think>x</think><answer>3</answer>",
)
"""Completions of several kinds, so that most rewards have something to tell apart."""

PROMPTS = ("Janet has 20 eggs and breaks 2. How many are left?", "Add two numbers.", "Sort: 3 18 1")

COLUMNS: Mapping[str, Sequence[Any]] = {
    "answer": ["#### 18"],
    "solution": ["18"],
    "numbers": [[3, 18, 1]],
    "tests": [["assert add(1, 2) == 3"]],
    "task": ["math"],
}
"""Columns that many data sets have: a list of values, repeated as often as there are completions."""

HOSTILE = (
    "\x00\x01\x1b[31m\x7f",
    "\ud800 a lone surrogate",
    "\u202eright to left\u2066\u200b\ufeff",
    "١٨ ５ ² ½ Ⅷ 十八",
    "e\u0301\u0301\u0301" * 20,
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "9" * 5000,
    "1e999 -1e999 nan inf 1/0 0x1F 1_000",
    "(" * 2000 + "[" * 2000 + "{" * 2000,
    "<think>" * 500,
    "</answer></think><answer><think>",
    r"\boxed{" * 300,
    r"\boxed{\frac{1}{0}}",
    '```json\n{"a": NaN, "a": [[[[{}]]]]}\n```',
    "```python\nraise SystemExit(1)\n```",
    "%s %d {0} {x} ${y} \\1 \\",
    "a" * 20_000,
    "\n" * 3000,
    " ",
    "\r\n\t\v\f\x85\u2028",
    "'; DROP TABLE rewards; --",
    "None",
)
"""What a policy writes sooner or later."""

EMPTY: Sequence[tuple[str, Any]] = (
    ("the empty string", ""),
    ("a conversation without messages", []),
    ("a message with empty text", [{"role": "assistant", "content": ""}]),
    (
        "a message that only calls a tool",
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
            }
        ],
    ),
)


@dataclass(frozen=True)
class Item:
    """One completion with its row of the data set."""

    prompt: Any
    completion: Any
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Batch:
    """One call of a reward. `form` says how completions that are strings are handed over."""

    items: tuple[Item, ...]
    form: Form = "text"

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments, fresh lists throughout, as TRL passes them."""
        names = dict.fromkeys(name for item in self.items for name in item.columns)
        return {
            "prompts": [self._as_message(item.prompt, "user") for item in self.items],
            "completions": [self._as_message(item.completion, "assistant") for item in self.items],
            "completion_ids": [_ids(item.completion) for item in self.items],
            **{name: [copy.deepcopy(item.columns[name]) for item in self.items] for name in names},
            "trainer_state": TrainerState(),
            "log_extra": _log_extra,
            "log_metric": _take_metric,
        }

    def __str__(self) -> str:
        completions = ", ".join(shown(item.completion) for item in self.items)
        parts = [f"completions=[{completions}]" + (" as messages" if self.form == "messages" else "")]
        for name in self.items[0].columns if self.items else ():
            parts.append(f"{name}=[{', '.join(shown(item.columns[name]) for item in self.items)}]")
        return ", ".join(parts)

    def with_items(self, items: Iterable[Item]) -> Batch:
        """The same with other rows."""
        return replace(self, items=tuple(items))

    def with_column(self, row: int, name: str, value: Any) -> Batch:
        """The same with another value of a column in one row."""
        item = self.items[row]
        changed = replace(item, columns={**item.columns, name: value})
        return self.with_items((*self.items[:row], changed, *self.items[row + 1 :]))

    def smaller(self) -> Iterator[Batch]:
        """The batch with less in it, the greatest steps first: rows, then halves of texts, then characters of them."""
        count = len(self.items)
        if count > 2:
            yield self.with_items(self.items[: count // 2])
            yield self.with_items(self.items[count // 2 :])
        for row in range(count) if count > 1 else ():
            yield self.with_items(self.items[:row] + self.items[row + 1 :])
        for row, item in enumerate(self.items):
            for shorter in _shorter(item.completion):
                changed = replace(item, completion=shorter)
                yield self.with_items((*self.items[:row], changed, *self.items[row + 1 :]))

    def _as_message(self, text: Any, role: str) -> Any:
        if isinstance(text, str) and self.form == "messages":
            return [{"role": role, "content": text}]
        return copy.deepcopy(text)


class TrainerState:
    """The fields of transformers' `TrainerState` that a reward can sensibly read, early in a run."""

    def __init__(self) -> None:
        self.global_step, self.max_steps, self.epoch, self.num_train_epochs = 3, 100, 0.1, 1
        self.is_world_process_zero, self.is_local_process_zero = True, True
        self.log_history: list[dict[str, float]] = []


def ordinary_batch(
    completions: Sequence[Any] | None,
    prompts: Sequence[Any] | None,
    columns: Mapping[str, Sequence[Any]],
    form: Form,
) -> Batch:
    """A batch of completions as they come.

    Args:
        completions: The completions; `COMPLETIONS` by default.
        prompts: The prompts, repeated.
        columns: By name a list of values, repeated; more than `COLUMNS`, or instead.
        form: How strings are handed over.
    """
    texts = completions or COMPLETIONS
    asked = prompts or PROMPTS
    every = {**COLUMNS, **columns}
    return Batch(
        tuple(
            Item(asked[row % len(asked)], text, {name: values[row % len(values)] for name, values in every.items()})
            for row, text in enumerate(texts)
        ),
        form,
    )


def _shorter(text: Any) -> Iterator[str]:
    if not isinstance(text, str) or not text:
        return
    piece = len(text) // 2
    while piece:
        yield text[:-piece]
        yield text[piece:]
        piece //= 2
    for place in range(len(text)) if len(text) <= 40 else ():
        yield text[:place] + text[place + 1 :]


def _ids(completion: Any) -> list[int]:
    """A token for every four characters: their number is what rewards read."""
    text = completion if isinstance(completion, str) else "".join(str(message.get("content")) for message in completion)
    return [1 + ord(character) % 500 for character in text[::4]]


def _log_extra(column: str, values: list[Any]) -> None:
    """Take what TRL would put into its table of completions."""


def _take_metric(name: str, value: float) -> None:
    """Take what TRL would log."""
