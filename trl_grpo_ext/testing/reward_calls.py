"""The calls that rewards are tried with, in TRL's form: completions of many kinds, each with its row of a data set."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

from ..guard.outcomes import shown
from ..types import RewardDeclaration

_ROWS_SHOWN = 3
_MOST_ITEMS = 16

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
"""Completions of several kinds, so that most rewards give different scores."""

PROMPTS = ("Janet has 20 eggs and breaks 2. How many are left?", "Add two numbers.", "Sort: 3 18 1")

COLUMNS: Mapping[str, Sequence[Any]] = {
    "answer": ["#### 18", "#### 18", "#### 9", "#### 3"],
    "solution": ["18", "18", "9", "3"],
    "numbers": [[3, 18, 1], [18, 3, 1], [2, 1]],
    "tests": [["assert add(1, 2) == 3"], ["assert add(1, 2) == 4"]],
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

_TOOL_CALL = {"type": "function", "function": {"name": "add", "arguments": {}}}
EMPTY: Mapping[str, Sequence[Any]] = {
    "the empty string": [""],
    "a message with empty text": [[{"role": "assistant", "content": ""}]],
    "a message that only calls a tool": [[{"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]}]],
}


@dataclass(frozen=True)
class Item:
    """One completion with its row of the data set."""

    prompt: Any
    completion: Any
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class RewardCall:
    """One call of a reward. `form` is the form in which string completions are passed."""

    items: tuple[Item, ...]
    form: Form = "text"

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments, fresh lists throughout, as TRL passes them."""
        # What a reward can sensibly read of transformers' `TrainerState`, early in a run.
        state = SimpleNamespace(global_step=3, max_steps=100, epoch=0.1, num_train_epochs=1, log_history=[])
        state.is_world_process_zero = state.is_local_process_zero = True
        return {
            "prompts": [self._in_form(item.prompt, "user") for item in self.items],
            "completions": [self._in_form(item.completion, "assistant") for item in self.items],
            "completion_ids": [_ids(item.completion) for item in self.items],
            **{name: [copy.deepcopy(item.columns.get(name)) for item in self.items] for name in self.columns},
            "trainer_state": state,
            "log_extra": lambda column, values: None,
            "log_metric": lambda name, value: None,
        }

    @property
    def columns(self) -> list[str]:
        """The columns' names."""
        return list(dict.fromkeys(name for item in self.items for name in item.columns))

    def __str__(self) -> str:
        first = self.items[:_ROWS_SHOWN]
        more = max(len(self.items) - _ROWS_SHOWN, 0)
        rest = f", and {more} more" if more else ""
        completions = ", ".join(shown(item.completion) for item in first) + rest
        parts = [f"completions=[{completions}]" + (" as messages" if self.form == "messages" else "")]
        for name in self.columns:
            parts.append(f"{name}=[{', '.join(shown(item.columns.get(name)) for item in first)}{rest}]")
        return ", ".join(parts)

    def with_items(self, items: Iterable[Item]) -> RewardCall:
        """The same with other rows."""
        return replace(self, items=tuple(items))

    def with_value(self, row: int, column: str, value: Any) -> RewardCall:
        """The same with another value in one row of a column."""
        items = list(self.items)
        items[row] = replace(items[row], columns={**items[row].columns, column: value})
        return self.with_items(items)

    def _in_form(self, text: Any, role: str) -> Any:
        if isinstance(text, str) and self.form == "messages":
            return [{"role": role, "content": text}]
        return copy.deepcopy(text)


def ordinary_call(
    reward: Any,
    completions: Sequence[Any] | None,
    prompts: Sequence[Any] | None,
    columns: Mapping[str, Sequence[Any]],
) -> RewardCall:
    """An ordinary call: the given completions, or `COMPLETIONS` and texts that say what stands in the column that the
    reward compares with. Prompts and columns are repeated."""
    asked = prompts or PROMPTS
    every = {**COLUMNS, **columns}
    items = [
        Item(asked[row % len(asked)], text, {name: values[row % len(values)] for name, values in every.items()})
        for row, text in enumerate(completions or COMPLETIONS)
    ]
    if completions is None:
        first = items[0]
        column = RewardDeclaration.of(reward).reference_column
        if column is not None and column in columns:
            value = str(first.columns[column])
            said = (value, rf"\boxed{{{value}}}", f"<answer>{value}</answer>", f"#### {value}")
            items += [replace(first, completion=text) for text in said]
    return RewardCall(tuple(items[:_MOST_ITEMS]))


def _ids(completion: Any) -> list[int]:
    """One token per four characters; rewards only read their number."""
    text = completion if isinstance(completion, str) else "".join(str(message.get("content")) for message in completion)
    return [1 + ord(character) % 500 for character in text[::4]]
