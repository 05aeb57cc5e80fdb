"""Word problems of two steps, a calculator, the syntax of its calls, and a model that knows it but seldom uses it.

A completion with calls is a conversation of up to three turns: `<<calc sum=4*17>>`, answered by `=68`, then
`<<calc sum=23+68>>`, answered by `=91`, then `#### 91`. Train and held-out problems are divided by a hash of their
template and numbers, as in `embedded/word_problems.py`.

The supervised start goes on from the tiny model in `embedded/model`, which can read and copy. At first every answer
uses the calculator and is right. Then one in four does, and half of these have a broken call: a sum without its second
number, a tool that does not exist, a call that never closes. The others guess the answer at once.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.supervised import Conversation, Said, train_supervised

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

EMBEDDED = Path(__file__).resolve().parents[1] / "embedded" / "model"
HELDOUT_SHARE = 0.2
RIGHT_PHASE = 0.6  # of the steps: every answer by right calls
CALLING = 0.25  # of the answers of the second phase
BROKEN = 0.5  # of these calls
_SUM = re.compile(r"\d{1,6}(?:[+*-]\d{1,6}){1,4}")

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Question: {{ m.content }}\nAnswer:"
    "{% elif m.role == 'tool' %}={{ m.content }}\n"
    "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}<<{{ c.function.name }}"
    "{% for key, value in c.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}>>{% endfor %}<eos>"
    "{% endif %}{% endfor %}"
)
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\nAnswer:|=[^\n]*\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<<(?P<name>\w+) sum=",
            "close": ">>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": {"sum": "{content}"}}},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}

NAMES = ("Mia", "Tom", "Ana", "Ben", "Zoe", "Sam", "Eva", "Max")
OBJECTS = ("apples", "pens", "books", "coins", "cards", "eggs")
# The question, the first sum and the second, in which `r` is the result of the first.
TEMPLATES = (
    ("{name} has {a} {objects} and buys {b} boxes of {c}. How many is that?", "{b}*{c}", "{a}+{r}"),
    ("{name} has {a} {objects}, finds {b} and loses {c}. How many are left?", "{a}+{b}", "{r}-{c}"),
    ("{name} fills {b} boxes with {c} {objects} and {a} are over. How many are there?", "{b}*{c}", "{r}+{a}"),
)


def calc(sum: str) -> int:
    """Work out a sum.

    Args:
        sum: Whole numbers with +, - and * between them, such as 3*4+5.
    """
    if _SUM.fullmatch(sum) is None:
        raise ValueError(f"{sum!r} is not a sum")
    total = 0
    for sign, product in re.findall(r"([+-]?)([\d*]+)", sum):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return total


@dataclass(frozen=True)
class Problem:
    """A problem with its two sums and its answer."""

    question: str
    sums: tuple[str, str]
    answer: int

    def row(self) -> dict[str, Any]:
        """As a row of a dataset."""
        return {"prompt": [{"role": "user", "content": self.question}], "answer": f"#### {self.answer}"}


def draw_problem(split: str, rng: random.Random) -> Problem:
    """A problem of the split `train` or `heldout`."""
    while True:
        question, first, second = rng.choice(TEMPLATES)
        numbers = {"a": rng.randint(11, 69), "b": rng.randint(3, 9), "c": rng.randint(3, 9)}
        digest = hashlib.sha256(f"{question}|{sorted(numbers.items())}".encode()).digest()
        if (int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64) != (split == "heldout"):
            continue
        words = {**numbers, "name": rng.choice(NAMES), "objects": rng.choice(OBJECTS)}
        one = first.format(**words)
        other = second.format(**words, r=calc(one))
        return Problem(question.format(**words), (one, other), calc(other))


def draw_problems(split: str, size: int, seed: int) -> list[Problem]:
    """`size` problems, the same ones for the same seed."""
    rng = random.Random(f"{split}/{seed}")
    return [draw_problem(split, rng) for _ in range(size)]


def load_tokenizer(model: str | Path) -> Any:
    """A character-level tokenizer with the chat template and the response template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def right_calls(problem: Problem) -> Said:
    """Both sums by the calculator, and the answer."""
    said: list[tuple[str, bool]] = []
    for one in problem.sums:
        said += [(f"<<calc sum={one}>><eos>", True), (f"={calc(one)}\n", False)]
    return [*said, (f"#### {problem.answer}<eos>", True)]


def some_answer(problem: Problem, rng: random.Random) -> Said:
    """What the supervised model learns to write: mostly a guess, sometimes calls, and some of these broken."""
    if rng.random() >= CALLING:
        return [(f"#### {max(0, problem.answer + rng.choice((0, 0, -3, 7, 10, -12, 21)))}<eos>", True)]
    if rng.random() >= BROKEN:
        return right_calls(problem)
    one = problem.sums[0]
    broken = rng.choice((f"<<calc sum={one.rstrip('0123456789')}>>", f"<<calk sum={one}>>", f"<<calc sum={one}>"))
    if broken.endswith(">>"):
        error = f"'{one.rstrip('0123456789')}' is not a sum" if "calc" in broken else "Tool calk not found."
        shown = str({"error": error})
        return [(f"{broken}<eos>", True), (f"={shown}\n", False), (f"#### {rng.randint(9, 99)}<eos>", True)]
    return [(f"{broken}<eos>", True)]


def supervised_start(
    folder: Path, *, steps: int = 120, batch_size: int = 32, learning_rate: float = 1.5e-3, seed: int = 0
) -> None:
    """Train the embedded model to know the syntax but seldom use it, and save it with its tokenizer."""
    tokenizer = load_tokenizer(EMBEDDED)
    model = LlamaForCausalLM.from_pretrained(EMBEDDED)
    rng = random.Random(seed)
    torch.manual_seed(seed)

    def draw(step: int) -> list[Conversation]:
        problems = [draw_problem("train", rng) for _ in range(batch_size)]
        right = step <= RIGHT_PHASE * steps
        return [(one.row()["prompt"], right_calls(one) if right else some_answer(one, rng)) for one in problems]

    train_supervised(model, tokenizer, draw, steps=steps, learning_rate=learning_rate)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
