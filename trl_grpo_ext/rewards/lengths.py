"""Rewards by the completion's number of tokens, read from `completion_ids`: `soft_overlong` and `length_target`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any

from ..errors import ConfigurationError, RewardError
from ..guard import parameters
from ..guard.outcomes import shown
from ..guard.parameters import Checked, choice, number, text, whole
from ..types import RewardDeclaration


class SoftOverlong(Checked, kw_only=False):
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
    declares = RewardDeclaration(conformance={"parameters": {"max_completion_length": 16, "cache": 8}})

    max_completion_length: int = whole(lowest=1)
    cache: int = whole(lowest=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache > self.max_completion_length:
            raise ConfigurationError(f"soft_overlong: cache must be at most max_completion_length, got {self.cache}.")

    def __call__(self, completion_ids: Sequence[Sequence[int]] | None = None, **columns: Any) -> list[float | None]:
        """`B` scores from -1.0 to 0.0, by the number of tokens alone."""
        free = self.max_completion_length - self.cache
        slope = max(self.cache, 1)
        tokens = _lengths("soft_overlong", completion_ids, columns)
        return [max(min((free - length) / slope, 0.0), -1.0) for length in tokens]


class LengthTarget(Checked, kw_only=False):
    r"""Score a completion by its length `n` in tokens against a target `t`.

        exact   -alpha · |t - n|
        max     clip(alpha · (t - n) + delta, 0, 1)

    "exact" asks for exactly that length, "max" for at most that length, with a slope around it instead of a cliff.

    Source: Aggarwal and Welleck, "L1" (arXiv:2503.04697), section 3: L1-Exact and L1-Max, with its defaults.

    Departures: the paper adds the first to correctness and multiplies the second by it: also select a correctness
    reward, or the `product` of the two.

    Args:
        target: `t`, in tokens. None means each row's own, from a column of the dataset.
        column: The column with the targets if `target` is None. An entry of None or NaN gives None.
        mode: "exact" or "max".
        alpha: The cost of one token of difference; positive.
        delta: For "max": the score at `n = t`.
    """

    __name__ = "length_target"
    declares = RewardDeclaration(conformance={"parameters": {"target": 8}})

    target: int | None = whole(None, lowest=0)
    _: KW_ONLY
    column: str = text("target_length")
    mode: str = choice("exact", "max")
    alpha: float = number(0.0003, "a positive number", lambda value: value > 0)
    delta: float = number(0.5, "a number from 0 to 1", lambda value: 0 <= value <= 1)

    def __call__(self, completion_ids: Sequence[Sequence[int]] | None = None, **columns: Any) -> list[float | None]:
        """`B` scores; at most 0 in mode "exact", from 0 to 1 in mode "max"; None where the target is None."""
        tokens = _lengths("length_target", completion_ids, columns)
        if self.target is not None:
            return [self._score(self.target, length) for length in tokens]
        advice = "Set the parameter target, or column to the name of the column with the targets."
        targets = parameters.column("length_target", self.column, columns, len(tokens), advice)
        for row, target in enumerate(targets):
            whole = isinstance(target, int) or (isinstance(target, float) and target.is_integer())
            absent = target is None or target != target
            if not absent and (isinstance(target, bool) or not whole or target < 0):
                said = f"{self.column!r} at row {row} is no number of tokens: {shown(target)}"
                raise RewardError(f"length_target: {said}.")
        return [self._score(target, length) for target, length in zip(targets, tokens, strict=True)]

    def _score(self, target: float | None, length: int) -> float | None:
        if target is None or math.isnan(target):
            return None
        if self.mode == "max":
            return min(max(self.alpha * (target - length) + self.delta, 0.0), 1.0)
        return -self.alpha * abs(target - length)


def _lengths(reward: str, completion_ids: Sequence[Sequence[int]] | None, columns: Mapping[str, Any]) -> list[int]:
    count = len(columns.get("completions", completion_ids or ()))
    ids = parameters.column(reward, "completion_ids", {**columns, "completion_ids": completion_ids}, count)
    return [len(tokens) for tokens in ids]
