"""A task of the study: sort the digits of the prompt. Problems, rewards with spans, and a tiny model that half can.

A prompt is four to nine digits and an arrow, `5290312>`; the right completion is the digits in order, `0122359`, and an
end. Which split a problem belongs to follows from its sorted digits alone, so no answer of the test split is ever seen
in training, in whatever order its digits come.
"""

import hashlib
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from trl_grpo_ext.types import Part, Parts, Span

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from embedded.make_model import IGNORE, collate, make_tokenizer, make_untrained_model

Split = Literal["train", "validation", "test"]

DIGITS = "0123456789"
LENGTHS = (4, 5, 6, 7, 8, 9)
LONGEST_COMPLETION = max(LENGTHS) + 4
"""Tokens; room for the end and for answers that are too long."""
SHAPE = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 64}
"""Of the model: 0.24 million parameters."""


def split_of(answer: str) -> Split:
    """The split that a sorted answer belongs to: six tenths train, two tenths each of the others."""
    share = hashlib.sha256(answer.encode()).digest()[0] / 256
    return "train" if share < 0.6 else "validation" if share < 0.8 else "test"


def problems(split: Split, size: int, seed: int) -> list[dict[str, str]]:
    """Draw problems, rows of `prompt` and `answer`; the same ones for the same seed."""
    rng = random.Random(f"{split}/{seed}")
    rows: list[dict[str, str]] = []
    while len(rows) < size:
        digits = "".join(rng.choices(DIGITS, k=rng.choice(LENGTHS)))
        answer = "".join(sorted(digits))
        if split_of(answer) == split:
            rows.append({"prompt": f"{digits}>", "answer": answer})
    return rows


# ---------------------------------------------------------------------------------------------------------- rewards


def position_spans(text: str, answer: str) -> list[Span]:
    """Each place is a step, worth its share of the longer of text and answer: above zero if it holds the right digit.

    A wrong digit, or one too many, is worth as much below zero.
    """
    worth = 1 / max(len(text), len(answer))
    return [(i, i + 1, worth if text[i : i + 1] == answer[i : i + 1] else -worth) for i in range(len(text))]


def inclusion_pair_spans(text: str, answer: str) -> list[Span]:
    """Each digit of the prompt that is there, and each digit that is not below the one before it.

    Both count as shares, so the spans of a right answer sum to 2 and those of any other text to less. Digits count as
    often as the prompt has them.
    """
    longest = max(len(text), len(answer))
    left = Counter(answer)
    spans = []
    for i, digit in enumerate(text):
        worth = 0.0
        if left[digit] > 0:
            left[digit] -= 1
            worth += 1 / longest
        if i > 0 and text[i - 1] <= digit:
            worth += 1 / (longest - 1)
        if worth:
            spans.append((i, i + 1, worth))
    return spans


def steps_of(spans: Sequence[Span], value: float) -> Parts:
    """A reward whose parts are steps."""
    return Parts([Part(f"step {n}", worth, places=(start, end)) for n, (start, end, worth) in enumerate(spans)], value)


def positions(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[Parts]:
    """The share of places that hold the right digit, 1 for the right answer alone. The parts say which do."""
    steps = [position_spans(*pair) for pair in zip(completions, answer, strict=True)]
    return [steps_of(spans, math.fsum(max(value, 0.0) for *_, value in spans)) for spans in steps]


def inclusion_pairs(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[Parts]:
    """The share of digits included plus the share of adjacent pairs in order; 2 for the right answer alone.

    After the sorting example of Stanford's CS336 (lecture 17). There the shares are counts, and a digit may count more
    often than the prompt has it.
    """
    steps = [inclusion_pair_spans(*pair) for pair in zip(completions, answer, strict=True)]
    return [steps_of(spans, math.fsum(value for *_, value in spans)) for spans in steps]


def exact(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1.0 for the right answer."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


# ------------------------------------------------------------------------------------------------------------ model


def with_slips(answer: str, share: float, rng: random.Random) -> str:
    """An answer where each digit has made way for a random one with this probability."""
    return "".join(rng.choice(DIGITS) if rng.random() < share else digit for digit in answer)


def warm_up(folder: Path, *, steps: int, slips: float, batch_size: int, learning_rate: float, seed: int) -> Path:
    """Save a model that knows how to sort but rarely shows it: what reinforcement learning is for.

    It is trained on problems of the train split, in the first half of the steps on right answers, then on answers with
    slips. Nothing is done where the folder holds a model already.
    """
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_untrained_model(tokenizer, **SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    rows = problems("train", steps * batch_size, seed)
    rng = random.Random(seed)
    for step in range(steps):
        examples = []
        for row in rows[step * batch_size : (step + 1) * batch_size]:
            written = with_slips(row["answer"], slips if 2 * step >= steps else 0.0, rng)
            prompt = tokenizer(row["prompt"]).input_ids
            answer = [*tokenizer(written).input_ids, tokenizer.eos_token_id]
            examples.append((prompt + answer, [IGNORE] * len(prompt) + answer))
        model(**collate(tokenizer, examples)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
