r"""Is the answer behind the reasoning mathematically equal to the reference?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError
from ._math.judge import MathReward


class ReasoningAccuracy(MathReward):
    """Score as `math_accuracy` does, but only what follows the reasoning; 0.0 where the reasoning does not end.

    Of `reasoning_delimiters` the first that occurs in the completion counts, and of its occurrences the last. As in
    TRL's `reasoning_accuracy_reward` a completion without any has no answer, which is 0.0 and not None even where the
    reference cannot be read: the reference is not looked at.

    Args:
        reasoning_delimiters: What ends the reasoning; None is `["</think>"]`.
        timeout: As for `math_accuracy`, and so are the others.
        budget: Seconds for a batch of up to 64 completions.
        workers: Number of processes.
        memory_mb: What a worker may use, in MiB.
        max_characters: The longest text behind the reasoning that is looked at.
        outcomes: What outcomes become, by name.
        cache: Number of verdicts kept over batches.

    Raises:
        ConfigurationError: A parameter cannot work.

    Departures from TRL's `reasoning_accuracy_reward`: those of `math_accuracy`.
    """

    __name__ = "reasoning_accuracy"

    def __init__(
        self,
        *,
        reasoning_delimiters: Sequence[str] | None = None,
        timeout: float = 2.0,
        budget: float = 4.0,
        workers: int | None = None,
        memory_mb: int | None = 512,
        max_characters: int = 200_000,
        outcomes: Mapping[str, Any] | None = None,
        cache: int = 10_000,
    ) -> None:
        delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
        listed = isinstance(delimiters, list | tuple) and len(delimiters) > 0
        if not listed or not all(isinstance(delimiter, str) and delimiter for delimiter in delimiters):
            raise ConfigurationError(
                "reasoning_accuracy: reasoning_delimiters must be a list of strings that are not empty, got "
                f"{reasoning_delimiters!r}"
            )
        self.reasoning_delimiters = tuple(delimiters)
        super().__init__(
            timeout=timeout,
            budget=budget,
            workers=workers,
            memory_mb=memory_mb,
            max_characters=max_characters,
            outcomes=outcomes,
            cache=cache,
        )

    def _answer_text(self, text: str) -> str | None:
        for delimiter in self.reasoning_delimiters:
            _, found, answer = text.rpartition(delimiter)
            if found:
                return answer
        return None


reasoning_accuracy = ReasoningAccuracy()
"""`ReasoningAccuracy` with its defaults, for places that take a function by its path."""
