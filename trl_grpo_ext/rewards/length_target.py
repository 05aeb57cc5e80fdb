"""How near is the completion's length to the one that was asked for?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..errors import ConfigurationError, RewardError
from ..guard.outcomes import shown
from ..guard.parameters import checked_choice, checked_number, checked_whole, column, lengths


class LengthTarget:
    r"""Score a completion by its length `n` in tokens against a target `t`.

        exact   -alpha · |t - n|
        max     clip(alpha · (t - n) + delta, 0, 1)

    "exact" wants the very length. "max" wants no more than it, and leaves some slope around it instead of a cliff.

    Source: L1, Aggarwal and Welleck, "L1: Controlling How Long A Reasoning Model Thinks With Reinforcement Learning"
    (arXiv:2503.04697), section 3: the length terms of L1-Exact and L1-Max, with its defaults.

    Departures: only the length term is here. The paper adds the first to correctness and multiplies the second with
    it: select a correctness reward beside this one, or `product` of the two. `tolerance` is ours.

    Args:
        target: `t`, in tokens. None: each completion's own, from a column of the dataset.
        column: The column with the targets, where `target` is None. An entry of None or NaN gives None.
        mode: "exact" or "max".
        alpha: What a token of difference costs; positive.
        delta: For "max": the score at `n = t`.
        tolerance: For "exact": tokens of difference that cost nothing.

    Raises:
        ConfigurationError: A parameter is of the wrong kind or out of its range, or `tolerance` is set for "max".
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
        if not isinstance(column, str) or not column:
            raise ConfigurationError(f"length_target: column must be the name of a column, got {column!r}.")
        self.column = column
        self.mode = checked_choice("length_target: mode", mode, ("exact", "max"))
        self.alpha = checked_number("length_target: alpha", alpha, "a positive number", lambda x: x > 0)
        self.delta = checked_number("length_target: delta", delta, "a number from 0 to 1", lambda x: 0 <= x <= 1)
        self.tolerance = checked_whole("length_target: tolerance", tolerance, 0)
        if tolerance and mode == "max":
            raise ConfigurationError(
                f"length_target: tolerance is for mode 'exact', got {tolerance!r} with mode 'max'. Lower alpha instead."
            )

    def __repr__(self) -> str:
        where = f"column={self.column!r}" if self.target is None else f"target={self.target}"
        return f"LengthTarget({where}, mode={self.mode!r}, alpha={self.alpha})"

    def __call__(self, completion_ids: Sequence[Sequence[int]] | None = None, **columns: Any) -> list[float | None]:
        """Score `B` completions by their number of tokens.

        Args:
            completion_ids: `B` lists of token ids, without padding.
            **columns: The other columns; the one with the targets is read where no target is fixed.

        Returns:
            `B` scores; at most 0 in mode "exact", from 0 to 1 in mode "max"; None where the target is None.

        Raises:
            RewardError: `completion_ids` or the column is missing, has not one entry per completion, or a target is no
                whole number of tokens.
        """
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
