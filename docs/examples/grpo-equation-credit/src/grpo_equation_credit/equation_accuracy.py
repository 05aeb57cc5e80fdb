"""How many of the equations in a completion hold?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_grpo_ext import completion_text, span_reward

from .equations import find_equations


@span_reward
def equation_accuracy(completions: Sequence[Any], **columns: Any) -> list[list[tuple[int, int, float]] | None]:
    """Score the share of a completion's distinct equations that hold; None where it has none.

    Each equation that holds is a span, worth its part of the score, for hooks such as `span_credit`. A completion
    without equations has no score: to ask for equations, use another reward.

    Args:
        completions: `B` completions, strings or lists of messages.
        **columns: The other columns; not used.

    Returns:
        `B` scores from 0 to 1, or None.
    """
    return [_spans(completion_text(completion)) for completion in completions]


def _spans(text: str) -> list[tuple[int, int, float]] | None:
    distinct = {equation.sides: equation for equation in reversed(find_equations(text))}
    equations = sorted(distinct.values(), key=lambda equation: equation.start)
    if not equations:
        return None
    return [(found.start, found.end, found.holds / len(equations)) for found in equations]
