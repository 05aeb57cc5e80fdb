"""How much does the completion repeat itself?"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

from ..guard.messages import completion_text
from ..guard.parameters import checked_choice, checked_number, checked_whole, column
from ..types import Span, SpanScore

_WORD = re.compile(r"\S+")


class Repetition:
    """Score `max_penalty · (1 - distinct n-grams / n-grams)`: 0 where no n-gram repeats.

    Source: Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373), appendix C.2, as
    TRL's `get_repetition_penalty_reward(ngram_size=n, max_penalty)` has it; over tokens the two are equal. Over words
    it is Open R1's reward of that name.

    Departures from the paper: one number for the completion. The advantage hook `repetition_penalty` puts the penalty
    on the tokens that repeat; so does `span_credit` with this reward over words, whose spans are the words that end a
    repeated n-gram. Words are separated by white space and compared without case, so use tokens for languages written
    without spaces.

    Args:
        n: Length of an n-gram.
        max_penalty: The limit for endless repetition; 0 or less.
        units: The units of n-grams, "tokens" or "words".
    """

    __name__ = "repetition"

    def __init__(self, n: int = 3, max_penalty: float = -1.0, *, units: str = "tokens") -> None:
        self.n = checked_whole("repetition: n", n, 1)
        wanted = "a number, 0 or less"
        self.max_penalty = checked_number("repetition: max_penalty", max_penalty, wanted, lambda x: x <= 0)
        self.units = checked_choice("repetition: units", units, ("tokens", "words"))

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """`B` scores from `max_penalty` to 0.0, in linear time. Over tokens, `completion_ids` is read.

        Over words they have spans: each word that ends a repeated n-gram, with its share of the penalty.
        """
        if self.units == "words":
            return [self._of_words(completion_text(completion)) for completion in completions]
        ids = column("repetition", "completion_ids", columns, len(completions), "Or set units: words.")
        return [self._penalty(repeats(row, self.n)) for row in ids]

    def _of_words(self, text: str) -> SpanScore:
        words = list(_WORD.finditer(text))
        again = repeats([word.group().lower() for word in words], self.n)
        share = self.max_penalty / max(len(again), 1)
        ends = words[self.n - 1 :]
        spans: list[Span] = [(*word.span(), share) for word, is_again in zip(ends, again, strict=True) if is_again]
        return SpanScore(self._penalty(again), spans)

    def _penalty(self, again: Sequence[bool]) -> float:
        return self.max_penalty * (1 - again.count(False) / len(again)) if any(again) else 0.0


def repeats(items: Sequence[Hashable], n: int) -> list[bool]:
    """For each n-gram, from first to last, whether it occurred earlier; exact, in O(T log n) time and O(T) memory.

    n-grams are numbered, those of twice the length by the pair of numbers of their halves.
    """
    table: dict[Hashable, int] = {}
    numbers = [table.setdefault(item, len(table)) for item in items]
    size = 1
    while size < n and numbers:
        step = min(size, n - size)  # the second half may overlap the first
        pairs: dict[tuple[int, int], int] = {}
        numbers = [pairs.setdefault(pair, len(pairs)) for pair in zip(numbers, numbers[step:], strict=False)]
        size += step
    again, highest = [], -1
    for number in numbers:  # numbers are given in the order of the first occurrences
        again.append(number <= highest)
        highest = max(highest, number)
    return again
