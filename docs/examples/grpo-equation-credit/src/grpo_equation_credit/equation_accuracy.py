"""How many of the equations in a completion hold?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_grpo_ext import Parts, completion_text

from .equations import find_equations


def equation_accuracy(completions: Sequence[Any], **columns: Any) -> list[Parts | None]:
    """Score the share of a completion's distinct equations that hold; None where it has none.

    Each equation is a part of the score, for hooks such as `process_rewards`. A completion without equations has no
    score: to ask for equations, use another reward.

    Args:
        completions: `B` completions, strings or lists of messages.
        **columns: The other columns; not used.

    Returns:
        `B` scores from 0 to 1, or None.
    """
    return [_scored(completion_text(completion)) for completion in completions]


def _scored(text: str) -> Parts | None:
    distinct = {equation.sides: equation for equation in reversed(find_equations(text))}
    equations = sorted(distinct.values(), key=lambda equation: equation.start)
    if not equations:
        return None
    return Parts({f"equation {n}": (float(one.holds), (one.start, one.end)) for n, one in enumerate(equations, 1)})
