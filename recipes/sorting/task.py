"""The task: prompts of numbers, their split, and a model that has never seen any of it.

A prompt of three numbers is `7 2 5 =`, the right completion `2 5 7` and an end. A number is one token. Which split a
prompt belongs to follows from its sorted numbers alone: the answer to a held-out prompt is never the answer to a
training prompt, in whatever order the numbers come.
"""

import hashlib
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from common.errors import RecipeError

import torch
from embedded.make_model import make_untrained_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sorting.rewards import sort_distance

Split = Literal["train", "held out"]
Row = dict[str, Any]

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
EQUALS = "="
HELD_OUT_SHARE = 0.2
"""Share of the sorted lists that is held out."""


def split_of(numbers: Sequence[int]) -> Split:
    """The split that a list of numbers belongs to, the same in any order."""
    text = " ".join(map(str, sorted(numbers)))
    return "held out" if hashlib.sha256(text.encode()).digest()[0] < 256 * HELD_OUT_SHARE else "train"


def prompts(split: Split, size: int, *, numbers: int, largest: int, seed: int) -> list[Row]:
    """Draw different prompts of one split, rows of `prompt` and `numbers`; the same ones for the same seed."""
    rng = random.Random(f"{split}/{seed}")
    total = (largest + 1) ** numbers
    places = range(total) if total <= 100_000 else (rng.randrange(total) for _ in range(20 * size))
    drawn = {place: None for place in places if split_of(_numbers(place, numbers, largest)) == split}
    chosen = rng.sample(list(drawn), min(size, len(drawn)))
    if not chosen:
        raise RecipeError(
            f"There are no {split} prompts of {numbers} number(s) from 0 to {largest}: raise --numbers or --largest."
        )
    lists = [_numbers(place, numbers, largest) for place in chosen]
    return [{"prompt": f"{' '.join(map(str, row))} {EQUALS}", "numbers": row} for row in lists]


def _numbers(place: int, numbers: int, largest: int) -> list[int]:
    """The digits of `place` in base `largest + 1`."""
    return [place // (largest + 1) ** i % (largest + 1) for i in range(numbers)]


def exactly_sorted(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1.0 where the numbers of the answer are those of the prompt in order, whatever stands between or after them."""
    scores = sort_distance(completions, normalise=True, **columns)
    return [None if score is None else float(math.isclose(score, 1.0)) for score in scores]


def make_tokenizer(largest: int, words: Sequence[str] = (EQUALS,)) -> PreTrainedTokenizerFast:
    """One token per number from 0 to `largest`, and one for each of the words. Anything else becomes `<unk>`."""
    known = (*SPECIAL_TOKENS.values(), *words, *map(str, range(largest + 1)))
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # without a decoder, tokens are joined by spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, padding_side="left", clean_up_tokenization_spaces=False, **SPECIAL_TOKENS
    )


def save_untrained_model(folder: Path, *, largest: int, seed: int, **shape: int) -> None:
    """Write a Llama with random weights, and its tokenizer, as a folder to train from; the same for the same seed."""
    tokenizer = make_tokenizer(largest)
    shape = {"intermediate_size": 3 * shape.get("hidden_size", 64), **shape}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_untrained_model(tokenizer, **shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_vocabulary(model: str, rows: Sequence[Row]) -> None:
    """Make sure that the model's tokenizer knows what the prompts are made of."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row in rows:
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokenizer(row["prompt"])["input_ids"]:
            raise RecipeError(
                f"The tokenizer of {model!r} does not know all of the prompt {row['prompt']!r}: lower --largest."
            )
