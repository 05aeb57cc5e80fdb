"""Coins in a row: a text environment of several turns that pays for each, and a tiny model that plays at random.

A row of coins lies there, `4 7 2 9 1 8 0 3`. In each turn the player takes the coin at one end, `left` or `right`, and
is paid its value; the environment answers with the row that is left. After `TURNS` turns the game is over. Taking the
larger end is good but not always best: it may uncover a coin that was worth waiting for.

The start model learns first to take the larger end and then to take either, so it has what it needs and does not use
it. A row's split follows from its coins, read in either direction.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from common.supervised import Conversation, train_supervised

import torch
from embedded.make_model import make_untrained_model
from sorting.task import make_tokenizer
from transformers import AutoTokenizer

COINS = 8
TURNS = 6
LARGEST = 9
HELDOUT_SHARE = 0.2
GREEDY_PHASE = 0.6  # of the supervised steps: the larger end
SIDES = ("left", "right")
ROW_END = "?"
WORDS = (ROW_END, *SIDES)

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} "
    "{% for key, value in c.function.arguments.items() %}{{ key }}={{ value }} {% endfor %}{% endfor %}<eos> "
    "{% else %}{{ m.content }} ? {% endif %}{% endfor %}"
)
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ROW_END,
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?P<name>left|right)",
            "close": "<eos>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": {}}},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}


class Coins:
    """The environment, as `environment_factory` takes it; `reward` is what the last turn paid."""

    def reset(self, coins: Sequence[int], **columns: Any) -> None:
        self.row = list(coins)
        self.turns = 0
        self.reward = 0.0
        self.taken = 0.0

    def left(self) -> str:
        """Take the coin at the left end."""
        return self._take(0)

    def right(self) -> str:
        """Take the coin at the right end."""
        return self._take(-1)

    def _take(self, end: int) -> str:
        if self.turns == TURNS:
            raise ValueError("over")
        self.turns += 1
        self.reward = float(self.row.pop(end))
        self.taken += self.reward
        return shown(self.row)


def shown(row: Sequence[int]) -> str:
    """A row in words, as the model reads it."""
    return " ".join(map(str, row))


def value_of(coins: Sequence[int], play: Callable[[Sequence[float]], float]) -> float:
    """What a row is worth: `max` for the best play, `statistics.fmean` for either end by chance."""

    @cache
    def rest(first: int, last: int, turns: int) -> float:
        if turns == 0:
            return 0.0
        ends = (coins[first] + rest(first + 1, last, turns - 1), coins[last] + rest(first, last - 1, turns - 1))
        return play(ends)

    return rest(0, len(coins) - 1, TURNS)


def of_best(environments: Sequence[Any], coins: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """What was taken, as a share of what the best play takes."""
    best = [value_of(row, max) for row in coins]
    return [one.taken / most if most else 1.0 for one, most in zip(environments, best, strict=True)]


def row_of(coins: Sequence[int]) -> dict[str, Any]:
    """A row of coins as a row of a dataset."""
    return {"prompt": [{"role": "user", "content": shown(coins)}], "coins": list(coins)}


def draw_rows(split: str, size: int, rng: random.Random) -> list[list[int]]:
    """Rows of coins of the split `train` or `heldout`."""
    found: list[list[int]] = []
    while len(found) < size:
        coins = [rng.randint(0, LARGEST) for _ in range(COINS)]
        digest = hashlib.sha256(shown(min(coins, coins[::-1])).encode()).digest()
        if (digest[0] < 256 * HELDOUT_SHARE) == (split == "heldout"):
            found.append(coins)
    return found


def load_tokenizer(model: str | Path) -> Any:
    """A model's tokenizer with the chat template and the response template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def game(coins: list[int], rng: random.Random, greedy: bool) -> Conversation:
    """A game in which the larger end is taken, or any."""
    row = list(coins)
    said: list[tuple[str, bool]] = []
    for _ in range(TURNS):
        side = SIDES[row[-1] > row[0]] if greedy and row[-1] != row[0] else rng.choice(SIDES)
        row.pop(-SIDES.index(side))
        said += [(f"{side} <eos>", True), (f"{shown(row)} {ROW_END}", False)]
    return row_of(coins)["prompt"], [*said, ("<eos>", True)]


def supervised_start(folder: Path, *, steps: int = 400, batch_size: int = 32, seed: int = 0, **shape: int) -> None:
    """Train a model that knows the game and plays at random, and save it with its tokenizer."""
    tokenizer = make_tokenizer(LARGEST, WORDS)
    tokenizer.chat_template = CHAT_TEMPLATE
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = make_untrained_model(
        tokenizer, **{"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, **shape}
    )

    def draw(step: int) -> list[Conversation]:
        greedy = step <= GREEDY_PHASE * steps
        return [game(coins, rng, greedy) for coins in draw_rows("train", batch_size, rng)]

    train_supervised(model, tokenizer, draw, steps=steps, learning_rate=2e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
