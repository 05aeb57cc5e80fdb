"""Fields out of a short text as JSON: problems from a seed.

A row has `prompt` (messages), `schema` (the JSON Schema of a right answer) and `fields` (its values), both as JSON
text. Held-out problems have sentences of their own, and names, things and cities that no training problem has.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "heldout"]
Row = dict[str, Any]

REWARD = {"name": "json_fields", "extract": "whole", "ignore_case": True, "ignore_space": True}
"""The share of right fields, of a completion that is JSON and nothing else."""

# Short, since each prompt is computed at every step. Without an answered example the model writes no JSON at all.
OPENING = [
    {"role": "system", "content": "Answer with one JSON object."},
    {"role": "user", "content": "Uma ran nine miles in 71.5 minutes.\nrunner (string), miles (integer), time (number)"},
    {"role": "assistant", "content": '{"runner": "Uma", "miles": 9, "time": 71.5}'},
]

NAMES = {
    "train": ["Mia", "Tom", "Ana", "Ben", "Zoe", "Sam", "Eva", "Max", "Lily", "Noah", "Ruth", "Omar", "Kai", "Amy"],
    "heldout": ["Clara", "Felix", "Nina", "Oscar", "Paula", "Hugo", "Vera", "Jonas"],
}
THINGS = {
    "train": ["lamps", "chairs", "desks", "mugs", "books", "pens", "clocks", "bags", "hats", "plates", "oak shelves"],
    "heldout": ["mirrors", "candles", "jackets", "spoons", "tents", "garden tools", "blankets", "keyboards"],
}
CITIES = {
    "train": ["Rome", "Oslo", "Paris", "Berlin", "Madrid", "Dublin", "Vienna", "Athens", "Lisbon", "Boston"],
    "heldout": ["Prague", "Denver", "Milan", "Zurich", "Helsinki", "Seattle"],
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


@dataclass(frozen=True)
class Kind:
    """A kind of text: its fields with their types, and the sentences of the splits.

    A sentence may come with two wordings for its place `{state}`, the first if the boolean field is true.
    """

    fields: Mapping[str, str]
    train: tuple[tuple[str, ...], ...]
    heldout: tuple[tuple[str, ...], ...]


KINDS = (
    Kind(
        {"item": "string", "quantity": "integer", "total": "number"},
        (
            ("{name} ordered {quantity} {item} for ${total} in all.",),
            ("We sold {quantity} {item} to {name}. The bill came to ${total}.",),
            ("Please send {quantity} {item} to {name}; ${total} were paid on {day}.",),
            ("Order of {day}: {item}, {quantity} pieces, together ${total}.",),
        ),
        (
            ("On {day} {name} bought {quantity} {item} and paid ${total}.",),
            ("For ${total} we can offer {name} a set of {quantity} {item}.",),
        ),
    ),
    Kind(
        {"name": "string", "day": "string", "hour": "integer"},
        (
            ("{name} has an appointment on {day} at {hour} o'clock.",),
            ("Can we move the meeting with {name} to {day}, {hour}:00?",),
            ("{day} at {hour} suits {name} well.",),
            ("The dentist in {city} sees {name} next {day} at {hour} o'clock.",),
        ),
        (
            ("At {hour} o'clock on {day} you are meeting {name} in {city}.",),
            ("Reminder for {name}: haircut, {day}, {hour}:00.",),
        ),
    ),
    Kind(
        {"number": "integer", "amount": "number", "paid": "boolean"},
        (
            ("Invoice {number} over ${amount} {state}.", "was paid on {day}", "is still open"),
            ("{name} {state} invoice {number}. It is about ${amount}.", "has paid", "has not paid"),
            ("${amount} for invoice number {number} {state}.", "arrived on {day}", "are overdue"),
            ("Invoice no. {number}, ${amount}: {state}.", "settled by {name}", "we are waiting for {name} to pay"),
        ),
        (
            ("{name} got invoice {number}. The ${amount} {state}.", "were settled on {day}", "are unpaid"),
            ("The ${amount} of invoice {number} {state} {name}.", "came in from", "never came in from"),
        ),
    ),
    Kind(
        {"city": "string", "boxes": "integer", "weight": "number", "fragile": "boolean"},
        (
            (
                "{boxes} boxes go to {city}, {weight} kg in all, {state}.",
                "handle with care",
                "nothing in them can break",
            ),
            ("Ship {boxes} boxes to {city}. They weigh {weight} kg and {state}.", "are fragile", "are not fragile"),
            ("To {city}: {weight} kg in {boxes} boxes, {state}.", "fragile", "not fragile"),
            ("{name} in {city} waits for {boxes} {state} boxes with a weight of {weight} kg.", "fragile", "sturdy"),
        ),
        (
            ("The truck brings {boxes} boxes ({weight} kg, {state}) to {city}.", "fragile", "not fragile"),
            ("{city} gets {boxes} boxes of {weight} kg. Their content {state}.", "breaks easily", "does not break"),
        ),
    ),
    Kind(
        {"city": "string", "hour": "integer"},
        (
            ("The train to {city} leaves at {hour} o'clock.",),
            ("{name} flies to {city} on {day}, at {hour}:00.",),
            ("There is a bus at {hour} for those who go to {city}.",),
        ),
        (("{name} takes the {hour} o'clock ferry to {city}.",), ("Departure for {city}: {day}, {hour}:00.",)),
    ),
)


def make_problems(split: Split, size: int, seed: int) -> list[Row]:
    """Draw problems; the same ones for the same seed."""
    rng = random.Random(f"{split}/{seed}")
    return [_problem(rng.choice(KINDS), split, rng) for _ in range(size)]


def _problem(kind: Kind, split: Split, rng: random.Random) -> Row:
    sentence, *wordings = rng.choice(kind.train if split == "train" else kind.heldout)
    cents = rng.choice([0.0, 0.5, 0.25, 0.99])
    values: dict[str, Any] = {
        "name": rng.choice(NAMES[split]),
        "item": rng.choice(THINGS[split]),
        "city": rng.choice(CITIES[split]),
        "day": rng.choice(DAYS),
        "hour": rng.randint(7, 20),
        "number": rng.randint(100, 999),
        "quantity": rng.randint(2, 12),
        "boxes": rng.randint(2, 12),
        "total": rng.randint(10, 300) + cents,
        "amount": rng.randint(10, 900) + cents,
        "weight": rng.randint(2, 90) + rng.choice([0.0, 0.5]),
        "paid": rng.random() < 0.5,
        "fragile": rng.random() < 0.5,
    }
    in_words = rng.random() < 0.3
    shown = {name: f"{value:g}" if name == "weight" else _shown(value, in_words) for name, value in values.items()}
    truth = next((values[name] for name, of_type in kind.fields.items() if of_type == "boolean"), False)
    state = wordings[0 if truth else 1].format_map(shown) if wordings else ""
    text = sentence.format_map({**shown, "state": state})
    text = text[0].upper() + text[1:]
    asked = ", ".join(f"{name} ({of_type})" for name, of_type in kind.fields.items())
    schema = {
        "type": "object",
        "properties": {name: {"type": of_type} for name, of_type in kind.fields.items()},
        "required": list(kind.fields),
        "additionalProperties": False,
    }
    return {
        "prompt": [*OPENING, {"role": "user", "content": f"{text}\n{asked}"}],
        "schema": json.dumps(schema),
        "fields": json.dumps({name: values[name] for name in kind.fields}),
    }


def _shown(value: object, in_words: bool) -> str:
    """A value as a sentence has it: small numbers in words or in digits, sums with cents."""
    if isinstance(value, float):
        return f"{value:.2f}"
    if in_words and isinstance(value, int) and 2 <= value <= 12:
        return NUMBERS[value - 2]
    return str(value)
