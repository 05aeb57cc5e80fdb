"""Worked examples of the rewards: a few completions, and what they earn."""

from collections.abc import Mapping, Sequence
from typing import Any

from trl_grpo_ext import load_rewards

from .worked import Worked, completions


def _example(
    selection: Any, texts: Sequence[Any], note: str = "", lengths: Sequence[int] | None = None, **columns: Any
) -> Worked:
    long = list(lengths or [max(len(text), 1) for text in texts])

    def run(chosen: Any) -> Mapping[str, Any]:
        (reward,) = load_rewards([chosen])
        try:
            scores = reward(
                prompts=["p"] * len(texts), completions=list(texts), completion_ids=[[1] * n for n in long], **columns
            )
        finally:
            if callable(close := getattr(reward, "close", None)):
                close()
        return {"reward": list(scores)}

    given: dict[str, Any] = {"completion": [text if isinstance(text, str) else _spoken(text) for text in texts]}
    if lengths is not None:
        given["tokens"] = long
    given |= {f"column `{name}`": [_written(value) for value in values] for name, values in columns.items()}
    return Worked(selection, completions(len(texts)), given, run, note)


def _spoken(messages: Sequence[Mapping[str, Any]]) -> str:
    calls = "calls `add`"
    return ", ".join(calls if one.get("tool_calls") else f"{one['role']}: `{one['content']}`" for one in messages)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else "; ".join(map(str, value)) if isinstance(value, list) else str(value)


_ANSWERS = ("So 9 * 2 = 18.\n#### 18", "The answer is $17.", "I do not know.")
_FORM = ("<think>9 * 2</think>18", "18", "<think>9 * 2")
_ADD = ("```python\ndef add(a, b):\n    return a + b\n```", "```python\ndef add(a, b):\n    return a\n```")
_TESTS = [["assert add(1, 2) == 3", "assert add(0, 0) == 0"]] * 2
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
_CALLS = (
    [{"role": "assistant", "content": "", "tool_calls": [_CALL]}, {"role": "tool", "name": "add", "content": "4"}],
    [
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "add", "content": "{'error': 'no b'}"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "add", "content": "4"},
    ],
    [{"role": "assistant", "content": "It is 4."}],
)

EXAMPLES: dict[str, Worked] = {
    "gsm8k_accuracy": _example("gsm8k_accuracy", _ANSWERS, answer=["#### 18"] * 3),
    "math_accuracy": _example("math_accuracy", (r"\boxed{18}", r"\boxed{18.0}", r"\boxed{19}"), solution=["$18$"] * 3),
    "python_tests": _example({"name": "python_tests", "partial": True}, _ADD, tests=_TESTS),
    "json_schema": _example(
        {
            "name": "json_schema",
            "schema": {"type": "object", "required": ["answer"]},
            "extract": "whole",
            "partial": 0.2,
        },
        ('{"answer": 18}', '{"sum": 18}', "18 it is"),
    ),
    "json_fields": _example(
        {"name": "json_fields", "extract": "whole", "extra": 0.5},
        ('{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1816}', '{"name": "Ada", "age": 36}', "Ada"),
        fields=['{"name": "Ada", "born": 1815}'] * 4,
    ),
    "lines": _example(
        {"name": "lines", "form": "numbered", "stop": 0.5},
        ("1. Rome\n2. 18", "1. Oslo\n2. 18", "1. Rome\n2. 18\n3. 7", "1. Rome"),
        lines=[["Rome", 18]] * 4,
    ),
    "regex_match": _example({"name": "regex_match", "pattern": "apples?"}, ("18 apples", "18 pears")),
    "think_format": _example("think_format", _FORM),
    "tag_format": _example("tag_format", ("<think>9 * 2</think><answer>18</answer>", "<think>9 * 2</think>18", "18")),
    "length_target": _example(
        {"name": "length_target", "target": 100, "mode": "max", "alpha": 0.01, "delta": 0.5},
        ("a", "b", "c"),
        lengths=(100, 80, 200),
    ),
    "soft_overlong": _example(
        {"name": "soft_overlong", "max_completion_length": 512, "cache": 64}, ("a", "b", "c"), lengths=(448, 480, 512)
    ),
    "weighted": _example(
        {"name": "weighted", "rewards": ["gsm8k_accuracy", "think_format"], "weights": [1.0, 0.2]},
        ("<think>9 * 2</think>#### 18", "#### 18", "<think>9 * 2</think>#### 17"),
        answer=["#### 18"] * 3,
    ),
    "gated": _example(
        {"name": "gated", "reward": "gsm8k_accuracy", "gate": "think_format"},
        ("<think>9 * 2</think>#### 18", "#### 18"),
        answer=["#### 18"] * 2,
    ),
    "product": _example(
        {"name": "product", "rewards": ["gsm8k_accuracy", "tag_format"]},
        ("<think>9 * 2</think><answer>18</answer>", "<answer>18</answer>", "<answer>17</answer>"),
        answer=["#### 18"] * 3,
    ),
    "tool_use": _example({"name": "tool_use", "returned": 0.1, "failed": -0.2}, _CALLS),
    "per_column": _example(
        {"name": "per_column", "column": "task", "rewards": {"math": "gsm8k_accuracy", "form": "think_format"}},
        ("#### 18", "#### 18", "<think>9 * 2</think>18"),
        answer=["#### 18"] * 3,
        task=["math", "form", "form"],
    ),
}
