"""A reward kept within bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import ConfigurationError
from ..guard.parameters import checked_number
from ._nested import checked_child, scores_of


class Clip:
    """Score `reward`, raised to `low` where it is below and lowered to `high` where it is above.

    None stays None. A score within the bounds stays as it is, with its spans; one that is changed has none, because
    they say what another number was earned with.

    Args:
        reward: What to score. In a selection, a selection.
        low: The least score; None for no bound.
        high: The greatest score; None for no bound.

    Raises:
        ConfigurationError: `reward` is not callable, neither bound is given, one is not finite, or `low > high`.
    """

    __name__ = "clip"
    takes_rewards = ("reward",)
    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"reward": "tag_format", "high": 0.3}}

    def __init__(self, reward: Callable[..., Any], *, low: float | None = None, high: float | None = None) -> None:
        self.reward = checked_child("clip", "reward", reward)
        self.low = None if low is None else checked_number("clip: low", low, "a finite number")
        self.high = None if high is None else checked_number("clip: high", high, "a finite number")
        if self.low is None and self.high is None:
            raise ConfigurationError("clip: give low, high or both; without either it does nothing")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigurationError(f"clip: low must not be above high, got low={low!r} and high={high!r}")

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """Score `B` completions.

        Args:
            completions: `B` completions.
            **kwargs: The other columns; the reward gets them.

        Returns:
            `B` scores within the bounds, or None where the reward said None.

        Raises:
            PluginOutputError: The reward broke its contract.
        """
        scores = scores_of(self.reward, {"completions": completions, **kwargs}, len(completions))
        return [None if score is None else self._within(score) for score in scores]

    def _within(self, score: float) -> float:
        if self.low is not None and score < self.low:
            return self.low
        return self.high if self.high is not None and score > self.high else score
