"""A correctness reward that pays more for short right answers, and punishes long wrong ones less."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import ConfigurationError
from ..guard.calls import call, reward_name
from ..guard.parameters import checked_number, checked_whole, lengths
from ..guard.validation import checked_scores


class CosineLength:
    r"""Scale right and wrong by the completion's length along half a cosine.

    With `p = min(tokens / max_length, 1)`, a completion scores

        long + (short - long) / 2 · (1 + cos(π p))

    where `short` and `long` are `max_value_correct` and `min_value_correct` for a right completion, and
    `min_value_wrong` and `max_value_wrong` for a wrong one: short right answers earn most, short wrong answers lose
    most. A completion is right where another reward, `reward`, scores it `threshold` or more; where that reward says
    None, so does this one.

    Source: Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373), appendix C.1. It is
    TRL's `get_cosine_scaled_reward(max_len=max_length, ...)` over any correctness reward instead of
    `accuracy_reward`. The other four parameters have TRL's names and defaults.

    Departures from the paper: its penalty for running into the length limit is off unless `exceeded_value` is given.

    Args:
        max_length: `L_max`, in tokens: where the cosine ends.
        reward: Any other reward function. In a selection, its name or mapping:
            `{name: cosine_length, max_length: 1024, reward: gsm8k_accuracy}`.
        threshold: From which score on a completion is right.
        min_value_wrong: Score of a wrong completion of no length.
        max_value_wrong: Score of a wrong completion of `max_length` tokens.
        min_value_correct: Score of a right completion of `max_length` tokens.
        max_value_correct: Score of a right completion of no length.
        exceeded_value: The paper's `r_e`: score of every completion of `max_length` tokens or more, right or wrong.
            None: they score as those of `max_length` tokens do.

    Raises:
        ConfigurationError: A parameter is of the wrong kind, or not finite.
    """

    __name__ = "cosine_length"
    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"max_length": 32, "reward": "gsm8k_accuracy"}}

    takes_rewards = ("reward",)
    """Parameters that are rewards themselves: a selection in their place is resolved first."""

    def __init__(
        self,
        max_length: int,
        reward: Callable[..., Any],
        *,
        threshold: float = 0.5,
        min_value_wrong: float = -1.0,
        max_value_wrong: float = -0.5,
        min_value_correct: float = 0.5,
        max_value_correct: float = 1.0,
        exceeded_value: float | None = None,
    ) -> None:
        def number(name: str, value: object) -> float:
            return checked_number(f"cosine_length: {name}", value, "a finite number")

        self.max_length = checked_whole("cosine_length: max_length", max_length, 1)
        if not callable(reward):
            raise ConfigurationError(f"cosine_length: reward must be a reward function, got {reward!r}.")
        self.reward = reward
        self.threshold = number("threshold", threshold)
        self.min_value_wrong = number("min_value_wrong", min_value_wrong)
        self.max_value_wrong = number("max_value_wrong", max_value_wrong)
        self.min_value_correct = number("min_value_correct", min_value_correct)
        self.max_value_correct = number("max_value_correct", max_value_correct)
        self.exceeded_value = None if exceeded_value is None else number("exceeded_value", exceeded_value)

    def __repr__(self) -> str:
        return f"CosineLength(max_length={self.max_length}, reward={reward_name(self.reward)})"

    def __call__(self, completion_ids: Sequence[Sequence[int]] | None = None, **columns: Any) -> list[float | None]:
        """Score `B` completions.

        Args:
            completion_ids: `B` lists of token ids, without padding.
            **columns: The other columns, which go to `reward` together with the tokens.

        Returns:
            `B` scores, None where `reward` gave None or NaN.

        Raises:
            RewardError: `completion_ids` is missing, or has not one entry per completion.
            PluginOutputError: `reward` returned something else than one number or None per completion.
        """
        tokens = lengths("cosine_length", completion_ids, columns)
        returned = call(self.reward, {"completion_ids": completion_ids, **columns})
        scores = checked_scores(returned, len(tokens), reward_name(self.reward))
        return [self._scaled(score, length) for score, length in zip(scores, tokens, strict=True)]

    def _scaled(self, score: float | None, length: int) -> float | None:
        if score is None or math.isnan(score):
            return None
        if self.exceeded_value is not None and length >= self.max_length:
            return self.exceeded_value
        if score >= self.threshold:
            low, high = self.min_value_correct, self.max_value_correct
        else:
            low, high = self.max_value_wrong, self.min_value_wrong
        progress = min(length / self.max_length, 1.0)
        return low + 0.5 * (high - low) * (1.0 + math.cos(progress * math.pi))
