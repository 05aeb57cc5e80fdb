"""Grade-school word problems in GSM8K's format, from a seed: the data of the recipe when there is no network.

A row has GSM8K's two columns: `question`, and `answer` with a calculator annotation (`<<3+4=7>>`) and a last line
`#### 7`. So rewards, prompts and evaluation written for GSM8K work on it unchanged.

Train and held-out are disjoint by construction. What makes a problem a problem, its template and its two numbers (in
either order for an addition), is hashed, and the hash alone decides the split: no choice of sizes or seeds can put one
problem on both sides, not even under another name or with other objects. What the two splits do share is arithmetic:
8 + 5 of one template may be in train while 8 + 5 of another is held out. A model is measured on new stories about
sums that it can know, which is what a one-step problem tests.

    python recipes/embedded/word_problems.py 500 > problems.jsonl

prints as many of the first problems of the training split, as JSON Lines.
"""

import hashlib
import json
import random
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

Split = Literal["train", "heldout"]

HELDOUT_SHARE = 0.2
"""Share of the (template, numbers) pairs that is held out."""

NAMES = ("Mia", "Tom", "Ana", "Ben", "Zoe", "Sam", "Eva", "Max", "Lily", "Noah", "Ruth", "Omar")
FRIENDS = ("Kai", "Amy", "Leo", "Ivy", "Dan", "Joy", "Raj")
OBJECTS = ("apples", "pens", "books", "coins", "cards", "shells", "stamps", "eggs", "toys", "beads")


@dataclass(frozen=True)
class Template:
    """One story: the question, the start of its one-sentence solution, and the operation that answers it."""

    operation: Literal["+", "-"]
    question: str
    solution: str

    def number_pairs(self) -> list[tuple[int, int]]:
        """The operand pairs that the story allows: results stay between 2 and 24, and never below zero."""
        if self.operation == "+":
            return [(a, b) for a in range(2, 13) for b in range(2, 13)]
        return [(a, b) for a in range(4, 21) for b in range(2, a - 1)]


# The hash that decides the split reads the question's text: editing one template moves no other template's problems.
# Every question uses the name and the objects, so that no two problems read the same.
TEMPLATES = (
    Template("+", "{name} has {a} {objects} and buys {b} more. How many does {name} have now?", "{name} has"),
    Template("+", "{name} finds {a} {objects}, then {b} more. How many is that in all?", "{name} finds"),
    Template("+", "{name} has {a} {objects} and {friend} has {b}. How many do they have?", "They have"),
    Template("+", "{name} has {a} old and {b} new {objects}. How many is that together?", "That makes"),
    Template("-", "{name} had {a} {objects} and lost {b}. How many are left?", "{name} has"),
    Template("-", "{name} has {a} {objects} and gives {friend} {b}. How many does {name} keep?", "{name} keeps"),
    Template("-", "There were {a} {objects}. {name} took {b}. How many are left?", "That leaves"),
    Template("-", "{name} has {a} {objects}. {friend} has {b} fewer. How many has {friend}?", "{friend} has"),
)


@dataclass(frozen=True)
class Problem:
    """A word problem before it becomes text, for code that needs its parts (the pre-training of the tiny model)."""

    template: Template
    a: int
    b: int
    name: str
    friend: str
    objects: str

    @property
    def result(self) -> int:
        """The right answer."""
        return self.a + self.b if self.template.operation == "+" else self.a - self.b

    @property
    def question(self) -> str:
        """The story with its question."""
        return self._fill(self.template.question)

    @property
    def subject(self) -> str:
        """How a solution begins: "Mia has"."""
        return self._fill(self.template.solution)

    def solution(self, operation: str | None = None, result: int | None = None) -> str:
        """The solution in GSM8K's format. The arguments write one with a slip in it: a wrong operation or result."""
        operation = self.template.operation if operation is None else operation
        result = self.result if result is None else result
        sum_ = f"{self.a}{operation}{self.b}"
        return f"{self.subject} {sum_} = <<{sum_}={result}>>{result} {self.objects}.\n#### {result}"

    def row(self) -> dict[str, str]:
        """The problem as a GSM8K row."""
        return {"question": self.question, "answer": self.solution()}

    def _fill(self, text: str) -> str:
        return text.format(a=self.a, b=self.b, name=self.name, friend=self.friend, objects=self.objects)


def split_of(template: Template, a: int, b: int) -> Split:
    """The split that a template with these numbers belongs to, in every process, on every machine, for ever."""
    numbers = sorted((a, b)) if template.operation == "+" else [a, b]
    digest = hashlib.sha256(f"{template.question}|{numbers}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64 else "train"


@cache
def _cells(split: Split) -> tuple[tuple[Template, int, int], ...]:
    """All (template, a, b) of a split, in a fixed order."""
    return tuple((t, a, b) for t in TEMPLATES for a, b in t.number_pairs() if split_of(t, a, b) == split)


def problem_count(split: Split) -> int:
    """How many distinct problems a split has."""
    return len(_cells(split)) * len(NAMES) * len(OBJECTS)


def draw_problems(split: Split, size: int, seed: int) -> list[Problem]:
    """Draw `size` distinct problems of a split, the same ones for the same seed. See `make_problems`."""
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {', '.join(get_args(Split))}, not {split!r}")
    if not 0 <= size <= problem_count(split):
        raise ValueError(f"the {split} split has {problem_count(split)} distinct problems; {size} were asked for")
    # A string seed is hashed with SHA-512: independent of PYTHONHASHSEED, and different for the two splits.
    indices = random.Random(f"{split}/{seed}").sample(range(problem_count(split)), size)
    return [_problem(split, index) for index in indices]


def _problem(split: Split, index: int) -> Problem:
    index, object_index = divmod(index, len(OBJECTS))
    cell_index, name_index = divmod(index, len(NAMES))
    template, a, b = _cells(split)[cell_index]
    # The friend follows from the rest, so that stories with a friend are not eleven times as frequent as the others.
    friend = FRIENDS[(a + 3 * b + object_index + name_index) % len(FRIENDS)]
    return Problem(template, a, b, NAMES[name_index], friend, OBJECTS[object_index])


def make_problems(split: Split, size: int, seed: int) -> list[dict[str, str]]:
    """Make `size` distinct GSM8K rows of a split."""
    return [problem.row() for problem in draw_problems(split, size, seed)]


if __name__ == "__main__":
    for problem in make_problems("train", int(sys.argv[1]) if len(sys.argv) > 1 else 100, seed=0):
        print(json.dumps(problem))
