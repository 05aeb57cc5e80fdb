"""A reward that counts only where another one holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..guard.parameters import checked_flag, checked_number
from ._nested import SomeRows, checked_child, scores_of


class Gated:
    """Score `reward` where `gate` is at least `threshold`, and `otherwise` where it is not.

    Correctness that counts only where the format is right, for instance. Where the gate says None nothing is known, and
    the score is None. Where the gate holds the score is the reward's own, None and spans included.

    By default both are called with the whole batch, so a reward that compares completions with each other is what it
    would be alone, and what it logs is of the whole batch. `lazy` spares an expensive reward the rest.

    Args:
        reward: What to score. In a selection, a selection.
        gate: What must hold. In a selection, a selection.
        threshold: From which score of the gate on it holds.
        otherwise: The score where the gate does not hold; None says nothing of such completions.
        lazy: Call `reward` with those rows alone where the gate holds, and not at all where there are none.

    Raises:
        ConfigurationError: `reward` or `gate` is not callable, a number is not finite, or `lazy` is no bool.
    """

    __name__ = "gated"
    takes_rewards = ("reward", "gate")
    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"reward": "gsm8k_accuracy", "gate": "think_format"}}

    def __init__(
        self,
        reward: Callable[..., Any],
        gate: Callable[..., Any],
        *,
        threshold: float = 1.0,
        otherwise: float | None = 0.0,
        lazy: bool = False,
    ) -> None:
        self.reward = checked_child("gated", "reward", reward)
        self.gate = checked_child("gated", "gate", gate)
        self.threshold = checked_number("gated: threshold", threshold, "a finite number")
        self.otherwise = None if otherwise is None else checked_number("gated: otherwise", otherwise, "a finite number")
        self.lazy = checked_flag("gated: lazy", lazy)

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """Score `B` completions.

        Args:
            completions: `B` completions.
            **kwargs: The other columns; both rewards get them.

        Returns:
            `B` scores.

        Raises:
            PluginOutputError: One of the rewards broke its contract.
        """
        columns, count = {"completions": completions, **kwargs}, len(completions)
        gates = scores_of(self.gate, columns, count)
        scores = [None if gate is None else self.otherwise for gate in gates]
        rows = [row for row, gate in enumerate(gates) if gate is not None and gate >= self.threshold]
        if self.lazy:
            some = SomeRows(columns, count)
            held = dict(zip(rows, some.scores(self.reward, rows), strict=True))
            some.flush()
        else:
            held = dict(enumerate(scores_of(self.reward, columns, count)))
        for row in rows:
            scores[row] = held[row]
        return scores
