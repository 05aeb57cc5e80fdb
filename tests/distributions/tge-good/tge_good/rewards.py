"""Rewards: a factory with a parameter, a function, and a function with a parameter."""

from typing import Any


class TargetLength:
    """Minus the distance, in characters, to the length wished for."""

    def __init__(self, target: int = 20) -> None:
        if target < 0:
            raise ValueError(f"target is {target}; it must not be negative")
        self.target = target

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [-float(abs(len(text) - self.target)) for text in completions]


def has_digit(completions: list[str], **columns: Any) -> list[float]:
    """1 for a completion with a digit in it."""
    return [float(any(character.isdigit() for character in text)) for text in completions]


def count_word(completions: list[str], word: str = "the", **columns: Any) -> list[float]:
    """How often a word occurs."""
    return [float(text.split().count(word)) for text in completions]
