"""Places in a completion's text, and the tokens at them: steps, the parts around a pair of markers, ends of spans."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

Offsets = Sequence[tuple[int, int]]
"""For each token, the characters that it wrote; `start == end` for a token that wrote none."""


def split_steps(text: str, separator: str) -> list[tuple[int, int]]:
    r"""Cut a text into steps at a separator, which belongs to the step before it.

    White space alone is no step: it goes with the step before, or, at the beginning, with the first one. So a run of
    blank lines cuts once.

    Args:
        text: Any text.
        separator: What ends a step, such as `"\n\n"`.

    Returns:
        `(start, end)` of each step, in order. They are the whole text, without gaps; a blank text has no steps.
    """
    steps: list[tuple[int, int]] = []
    position = 0
    while position < len(text):
        found = text.find(separator, position)
        end = len(text) if found < 0 else found + len(separator)
        if text[position:end].replace(separator, "").strip():
            steps.append((steps[-1][1] if steps else 0, end))
        elif steps:
            steps[-1] = (steps[-1][0], end)
        position = end
    return steps


def last_tokens(offsets: Offsets, ends: Sequence[int]) -> list[int]:
    """For each end of a span, the token at which the characters before it are complete; -1 without tokens.

    Tokens right behind it that wrote nothing, such as an end-of-sequence token, go with it: the last of them counts.
    """
    wrote = [token for token, (start, end) in enumerate(offsets) if end > start]
    starts = [offsets[token][0] for token in wrote]
    behind = [*wrote[1:], len(offsets)]  # the token that is the next to write
    return [behind[bisect_left(starts, max(end, 1)) - 1] - 1 for end in ends]


def around_markers(text: str, opening: str, closing: str) -> list[tuple[int, int, str]]:
    """Cut a text into what stands before, between and behind the first pair of markers, and the markers themselves.

    Args:
        text: Any text.
        opening: The marker that opens the thoughts.
        closing: The marker that closes them.

    Returns:
        `(start, end, kind)`, which are the whole text without gaps, the last one possibly empty. The kinds are "other"
        (before the opening), "tags" (the markers), "think" (between them) and "answer" (behind the closing). A
        closing without an opening before it closes thoughts that began with the text, as where a chat template has
        opened them; thoughts that are never closed reach to the end; without markers everything is the answer.
    """
    closes = text.find(closing)
    opens = text.find(opening, 0, len(text) if closes < 0 else closes)
    if opens < 0 and closes < 0:
        return [(0, len(text), "answer")]
    parts = []
    thoughts = 0
    if opens >= 0:
        thoughts = opens + len(opening)
        parts += [(0, opens, "other"), (opens, thoughts, "tags")]
        closes = text.find(closing, thoughts)
    if closes < 0:
        return [*parts, (thoughts, len(text), "think")]
    answer = closes + len(closing)
    return [*parts, (thoughts, closes, "think"), (closes, answer, "tags"), (answer, len(text), "answer")]


def token_weights(offsets: Offsets, parts: Sequence[tuple[int, int, str]], weights: Mapping[str, float]) -> list[float]:
    """Each token's weight: that of the part in which it wrote most characters, and of the earlier one in a tie.

    A token that wrote nothing belongs to the part that its place is in, at the end of the text to the last part.

    Args:
        offsets: The tokens' characters, in order.
        parts: `(start, end, kind)`, in order and without gaps.
        weights: Weight of each kind.
    """
    result = []
    current = 0
    for start, end in offsets:
        while current + 1 < len(parts) and parts[current][1] <= start:
            current += 1
        best, most = current, 0
        for index in range(current, len(parts)):
            if parts[index][0] >= end:
                break
            inside = min(end, parts[index][1]) - max(start, parts[index][0])
            if inside > most:
                best, most = index, inside
        result.append(weights[parts[best][2]])
    return result
