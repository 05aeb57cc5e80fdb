"""Rewards by the completion's number of tokens: `soft_overlong`, `length_target` and `cosine_length`.

All read `completion_ids`, `B` lists of token ids without padding, and raise `RewardError` if it is missing or does not
have one entry per completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import ConfigurationError, RewardError
from ..guard.calls import call, check_scores, reward_name
from ..guard.outcomes import shown
from ..guard.parameters import checked_choice, checked_number, checked_text, checked_whole, column, lengths


class SoftOverlong:
    r"""Score 0 for completions well below the length limit, falling to -1 at the limit and beyond.

    Equation (13) of DAPO (arXiv:2503.14476), as TRL's `get_soft_overlong_punishment`; `L` is the length in tokens:

        0                                          L <= max_completion_length - cache
        (max_completion_length - cache - L) / cache    up to max_completion_length
        -1                                         beyond

    Args:
        max_completion_length: `L_max`, in tokens: the generation limit.
        cache: `L_cache`, in tokens: the last tokens over which the penalty grows; 0 for a step at the limit.
    """

    __name__ = "soft_overlong"
    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"max_completion_length": 16, "cache": 8}}

    def __init__(self, max_completion_length: int, cache: int) -> None:
        self.max_completion_length = checked_whole("soft_overlong: max_completion_length", max_completion_length, 1)
        self.cache = checked_whole("soft_overlong: cache", cache, 0)
        if cache > max_completion_length:
            raise ConfigurationError(
                f"soft_overlong: cache must be from 0 to max_completion_length ({max_completion_length}), got {cache}"
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]] | None = None, **columns: Any) -> list[float | None]:
        """`B` scores from -1.0 to 0.0, by the number of tokens alone."""
        tokens = lengths("soft_overlong", completion_ids, columns)
        return [overlong_penalty(length, self.max_completion_length, self.cache) for length in tokens]


def overlong_penalty(length: int, longest: int, cache: int) -> float:
    """Equation (13) of DAPO, of tokens or of characters."""
    if length <= longest - cache:
        return 0.0
    return -1.0 if length > longest else (longest - cache - length) / cache


class LengthTarget:
    r"""Score a completion by its length `n` in tokens against a target `t`.

        exact   -alpha · |t - n|
        max     clip(alpha · (t - n) + delta, 0, 1)

    "exact" asks for exactly that length. "max" asks for at most that length, with a slope around it instead of a cliff.

    Source: Aggarwal and Welleck, "L1" (arXiv:2503.04697), section 3: the length terms of L1-Exact and L1-Max, with its
    defaults.

    Departures: the paper adds the first to correctness and multiplies the second by it: also select a correctness
    reward, or the `product` of the two. `tolerance` is ours.

    Args:
        target: `t`, in tokens. None means each row's own, from a column of the dataset.
        column: The column with the targets if `target` is None. An entry of None or NaN gives None.
        mode: "exact" or "max".
        alpha: The cost of one token of difference; positive.
        delta: For "max": the score at `n = t`.
        tolerance: For "exact" alone: tokens of difference that cost nothing.
    """

    __name__ = "length_target"
    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"target": 8}}

    def __init__(
        self,
        target: int | None = None,
        *,
        column: str = "target_length",
        mode: str = "exact",
        alpha: float = 0.0003,
        delta: float = 0.5,
        tolerance: int = 0,
    ) -> None:
        self.target = None if target is None else checked_whole("length_target: target", target, 0)
        self.column = checked_text("length_target: column", column)
        self.mode = checked_choice("length_target: mode", mode, ("exact", "max"))
        self.alpha = checked_number("length_target: alpha", alpha, "a positive number", lambda x: x > 0)
        self.delta = checked_number("length_target: delta", delta, "a number from 0 to 1", lambda x: 0 <= x <= 1)
        self.tolerance = checked_whole("length_target: tolerance", tolerance, 0)
        if tolerance and mode == "max":
            raise ConfigurationError(
                f"length_target: tolerance is for mode 'exact', got {tolerance!r} with mode 'max'. Lower alpha instead."
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]] | None = None, **columns: Any) -> list[float | None]:
        """`B` scores; at most 0 in mode "exact", from 0 to 1 in mode "max"; None where the target is None."""
        tokens = lengths("length_target", completion_ids, columns)
        if self.target is not None:
            return [self._score(self.target, length) for length in tokens]
        advice = "Set the parameter target, or column to the name of the column with the targets."
        targets = column("length_target", self.column, columns, len(tokens), advice)
        return [self._score(self._target(row, t), n) for row, (t, n) in enumerate(zip(targets, tokens, strict=True))]

    def _target(self, row: int, entry: object) -> int | None:
        if entry is None or (isinstance(entry, float) and math.isnan(entry)):
            return None
        whole = isinstance(entry, int) or (isinstance(entry, float) and entry.is_integer())
        if isinstance(entry, bool) or not whole or entry < 0:  # type: ignore[operator]
            raise RewardError(
                f"length_target: the target in {self.column!r} at row {row} must be a whole number of tokens, got "
                f"{shown(entry)}."
            )
        return int(entry)  # type: ignore[call-overload, no-any-return]

    def _score(self, target: int | None, length: int) -> float | None:
        if target is None:
            return None
        if self.mode == "max":
            return min(max(self.alpha * (target - length) + self.delta, 0.0), 1.0)
        excess = max(abs(target - length) - self.tolerance, 0)
        return -self.alpha * excess if excess else 0.0


class CosineLength:
    r"""Scale the reward of right and wrong completions by their length, along half a cosine.

    With `p = min(tokens / max_length, 1)`, a completion scores

        long + (short - long) / 2 · (1 + cos(π p))

    where `short` and `long` are `max_value_correct` and `min_value_correct` for a right completion, and
    `min_value_wrong` and `max_value_wrong` for a wrong one: short right answers earn most, short wrong answers lose
    most. A completion is right if another reward, `reward`, scores it `threshold` or more; None stays None.

    Source: Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373), appendix C.1: TRL's
    `get_cosine_scaled_reward`, with its names and defaults, over any correctness reward.

    Departures from the paper: its penalty for running into the length limit is off unless `exceeded_value` is given.

    Args:
        max_length: `L_max`, in tokens: where the cosine ends.
        reward: Any other reward function. In a selection, its name or mapping:
            `{name: cosine_length, max_length: 1024, reward: gsm8k_accuracy}`.
        threshold: The least score of a right completion.
        min_value_wrong: Score of a wrong completion of length 0.
        max_value_wrong: Score of a wrong completion of `max_length` tokens.
        min_value_correct: Score of a right completion of `max_length` tokens.
        max_value_correct: Score of a right completion of length 0.
        exceeded_value: The paper's `r_e`: score of every completion of `max_length` tokens or more, right or wrong.
            None means that they score like those of `max_length` tokens.
    """

    __name__ = "cosine_length"
    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"max_length": 32, "reward": "gsm8k_accuracy"}}

    takes_rewards = ("reward",)

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
            return checked_number(f"cosine_length: {name}", value, "finite")

        self.max_length = checked_whole("cosine_length: max_length", max_length, 1)
        if not callable(reward):
            raise ConfigurationError(f"cosine_length: reward must be a reward function, got {reward!r}.")
        self.reward = reward
        self.threshold = number("threshold", threshold)
        self.wrong = number("min_value_wrong", min_value_wrong), number("max_value_wrong", max_value_wrong)
        self.correct = number("max_value_correct", max_value_correct), number("min_value_correct", min_value_correct)
        self.exceeded_value = None if exceeded_value is None else number("exceeded_value", exceeded_value)

    def __call__(self, completion_ids: Sequence[Sequence[int]] | None = None, **columns: Any) -> list[float | None]:
        """`B` scores, None where `reward`, which gets all columns, gave None or NaN."""
        tokens = lengths("cosine_length", completion_ids, columns)
        returned = call(self.reward, {"completion_ids": completion_ids, **columns})
        scores = check_scores(returned, len(tokens), reward_name(self.reward))
        return [self._scaled(score, length) for score, length in zip(scores, tokens, strict=True)]

    def _scaled(self, score: float | None, length: int) -> float | None:
        if score is None or math.isnan(score):
            return None
        if self.exceeded_value is not None and length >= self.max_length:
            return self.exceeded_value
        short, long = self.correct if score >= self.threshold else self.wrong
        progress = min(length / self.max_length, 1.0)
        return long + 0.5 * (short - long) * (1.0 + math.cos(progress * math.pi))
