"""Credit the characters of correct equations, and debit those of wrong ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.types import HookDeclaration

from .equations import find_equations

if TYPE_CHECKING:
    import torch
    from trl_grpo_ext import Rollout

Span = tuple[int, int, float]


class EquationCredit:
    """Add `right` to the advantages of the tokens of each equation that holds, `wrong` to those of each that doesn't.

    A reward for the final answer penalises a whole solution for one slip, and rewards a slip that cancels out. Here the
    arithmetic itself is checked (`equations.find_equations`: exactly, in fractions), and each token gets the credit of
    the equation that it is part of, added to the advantage that other hooks computed. So groups without signal get
    credit too. In units of the advantage.

    An equation that holds counts once in a completion, where it first occurs, and at most `most` of them count;
    otherwise a policy could write "1+1=2" for ever. One that doesn't hold costs every time.

    Source: no paper describes this hook. That steps of arithmetic can be checked without a model is the idea of GSM8K's
    calculator annotations (Cobbe et al., 2021, arXiv:2110.14168).

    Args:
        right: For the tokens of an equation that holds.
        wrong: For the tokens of one that doesn't.
        pay: "equation" credits all its tokens, "result" those to the right of the `=`.
        most: How many equations that hold count in one completion.

    Raises:
        ConfigurationError: A parameter is of the wrong kind.
    """

    __name__ = "equation_credit"
    declares = HookDeclaration(
        role="transform",
        needs=("offsets",),
        conformance={"completions": ["3+4=7", "so 3+4=8 and 1+1=2", "no sums", "9-4 = <<9-4=5>>5"]},
    )

    def __init__(self, *, right: float = 0.5, wrong: float = -0.5, pay: str = "equation", most: int = 8) -> None:
        for name, value in (("right", right), ("wrong", wrong)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigurationError(f"equation_credit: {name} must be a finite number, got {value!r}.")
        if pay not in ("equation", "result"):
            raise ConfigurationError(f"equation_credit: pay must be 'equation' or 'result', got {pay!r}.")
        if isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise ConfigurationError(f"equation_credit: most must be a whole number, 0 or more, got {most!r}.")
        self.right, self.wrong, self.pay, self.most = float(right), float(wrong), pay, most

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> list[list[Span]]:
        """Return the spans of each of the `B` completions; their values are added to the advantages."""
        return [self.spans(text) for text in rollout.texts]

    def spans(self, text: str) -> list[Span]:
        """What the equations of one completion are worth, `(start, end, value)` each."""
        spans: list[Span] = []
        paid: set[tuple[str, str]] = set()
        for equation in find_equations(text):
            if equation.holds and (equation.sides in paid or len(paid) >= self.most):
                continue
            if equation.holds:
                paid.add(equation.sides)
            start = equation.start if self.pay == "equation" else equation.result
            spans.append((start, equation.end, self.right if equation.holds else self.wrong))
        return spans
