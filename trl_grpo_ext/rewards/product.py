"""The product of several rewards, as one reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ._nested import checked_children, in_range, scores_of


class Product:
    """Score the product of the rewards: each scales what the others give, and a zero of one is a zero of all.

    None where any of them says None: what is unknown scales to nothing known. That holds beside a zero too, so the
    product does not depend on which of them is asked first. Spans are dropped, because a product's value cannot be
    shared out between them.

    Args:
        rewards: The rewards. In a selection, selections; a `weight` is a factor.

    Raises:
        ConfigurationError: There is no reward, or one is not callable.
    """

    __name__ = "product"
    takes_rewards = ("rewards",)
    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"rewards": ["gsm8k_accuracy", "think_format"]}}

    def __init__(self, rewards: Sequence[Callable[..., Any]]) -> None:
        self.rewards = checked_children("product", "rewards", rewards)
        self.factor = math.prod(getattr(rewards, "weights", [1.0]))

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """Score `B` completions.

        Args:
            completions: `B` completions.
            **kwargs: The other columns; all rewards get them.

        Returns:
            `B` products, or None where a reward said None.

        Raises:
            PluginOutputError: A reward broke its contract, or the product is too large for a float.
        """
        count = len(completions)
        scores = [scores_of(reward, {"completions": completions, **kwargs}, count) for reward in self.rewards]
        return [self._product([column[row] for column in scores], row) for row in range(count)]

    def _product(self, scores: Sequence[float | None], row: int) -> float | None:
        numbers = [float(score) for score in scores if score is not None]
        if len(numbers) < len(scores):
            return None
        return 0.0 if 0.0 in numbers else in_range("product", math.prod(numbers, start=self.factor), row)
