"""The weighted sum of several rewards, as one reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import ConfigurationError
from ..guard.parameters import checked_number
from ..types import Span, SpanScore
from ._nested import checked_children, in_range, scaled_spans, scores_of


class Weighted:
    """Score the sum of weight times score over the rewards that said something.

    A reward that says None of a completion is left out there, as in TRL's own sum over its reward functions; None where
    all say None. Useful inside another reward: `gated`, `clip`, `per_column`. At the top level, TRL's own sum gives the
    same, and a metric for each.

    The spans of a `SpanScore` are kept, their values times the reward's weight.

    Args:
        rewards: The rewards. In a selection, selections, whose `weight` counts here.
        weights: One per reward, where they are no selections; None takes those of the selections, 1 where there are
            none.

    Raises:
        ConfigurationError: There is no reward, or one is not callable; the weights are not one finite number per
            reward; weights are given both here and in the selections.
    """

    __name__ = "weighted"
    takes_rewards = ("rewards",)
    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"rewards": ["gsm8k_accuracy", "think_format"]}}

    def __init__(self, rewards: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        self.rewards = checked_children("weighted", "rewards", rewards)
        selected = list(getattr(rewards, "weights", [1.0] * len(rewards)))
        if weights is None:
            weights = selected
        elif any(weight != 1 for weight in selected):
            raise ConfigurationError(
                f"weighted: the rewards have the weights {selected}, and weights={weights!r} is given too; write them "
                "in one place"
            )
        if not isinstance(weights, list | tuple) or len(weights) != len(self.rewards):
            raise ConfigurationError(
                f"weighted: weights must be a list of one number for each of the {len(self.rewards)} rewards, got "
                f"{weights!r}"
            )
        self.weights = [
            checked_number(f"weighted: weights[{index}]", w, "a finite number") for index, w in enumerate(weights)
        ]

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """Score `B` completions.

        Args:
            completions: `B` completions.
            **kwargs: The other columns; all rewards get them.

        Returns:
            `B` sums, or None where no reward said anything.

        Raises:
            PluginOutputError: A reward broke its contract, or the sum is too large for a float.
        """
        count = len(completions)
        scores = [scores_of(reward, {"completions": completions, **kwargs}, count) for reward in self.rewards]
        return [self._sum([column[row] for column in scores], row) for row in range(count)]

    def _sum(self, scores: Sequence[float | None], row: int) -> float | None:
        said = [(w, score) for w, score in zip(self.weights, scores, strict=True) if score is not None]
        if not said:
            return None
        try:
            total = math.fsum(weight * score for weight, score in said)
        except (OverflowError, ValueError):  # the sum of infinite parts, and of infinite parts of both signs
            total = math.inf
        total = in_range("weighted", total, row)
        if not any(isinstance(score, SpanScore) for _, score in said):
            return total
        spans: list[Span] = [span for weight, score in said for span in scaled_spans(weight, score)]
        return SpanScore(total, spans)
