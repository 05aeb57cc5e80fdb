r"""What is too large or too deep to be parsed as mathematics, found in linear time before anything is parsed.

Only what would surely be parsed is measured: a whole reference, or the content of a completion's only box. A completion
may have any nonsense beside its box; whether that matters is for math-verify to say.
"""

from __future__ import annotations

import re

DEEPEST = 100
"""Brackets within brackets. math-verify's parser needs a dozen Python frames for each, so it never gets this far."""

MOST_DIGITS = 2_000
"""Digits in a row. Python itself refuses to read an integer of more than 4300."""

LONGEST_ANSWER = 20_000
"""Characters in a box."""

_DIGITS = re.compile(rf"[0-9]{{{MOST_DIGITS + 1}}}")
_BRACKETS = re.compile(r"\\?[{}()\[\]]")
_OPENING, _CLOSING = frozenset("{(["), frozenset("})]")


def excess_of_reference(reference: str, max_characters: int) -> str | None:
    """Say why a reference is too much to be parsed, or None where it is not."""
    if len(reference) > max_characters:
        return f"{len(reference)} characters, more than max_characters, {max_characters}"
    return _excess(reference)


def excess_of_completion(text: str, max_characters: int) -> str | None:
    """Say why a completion is too much to be parsed, or None where it is not."""
    if len(text) > max_characters:
        return f"{len(text)} characters, more than max_characters, {max_characters}"
    box = only_box(text)
    if box is None:
        return None
    start, end = box
    if end - start > LONGEST_ANSWER:
        return f"a box with {end - start} characters, more than {LONGEST_ANSWER}"
    return _excess(text[start:end])


def only_box(text: str) -> tuple[int, int] | None:
    r"""Where the content of the only `\boxed{...}` begins and ends; None where math-verify might read something else.

    A box that is not closed has no end, and an expression between "final answer is" and "I hope" goes before boxes.
    """
    start = text.find("\\boxed{")
    if start < 0 or text.count("\\boxed") > 1 or "\\fbox" in text or "I hope" in text:
        return None
    start += len("\\boxed{")
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start, start + brace.start()
    return None


def _excess(expression: str) -> str | None:
    if _DIGITS.search(expression):
        return f"more than {MOST_DIGITS} digits in a row"
    depth = deepest = 0
    for bracket in _BRACKETS.finditer(expression):
        if bracket[0][-1] in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth = max(0, depth - 1)
    return f"brackets {deepest} deep, more than {DEEPEST}" if deepest > DEEPEST else None
