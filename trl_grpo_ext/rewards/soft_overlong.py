"""A penalty that grows over the last tokens before the length limit (DAPO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..errors import ConfigurationError, RewardError


class SoftOverlong:
    r"""Score 0 for completions that leave room, down to -1 for those at the length limit or beyond.

    Equation (13) of DAPO (arXiv:2503.14476), with `L` the completion's length in tokens:

        0                                          L <= max_completion_length - cache
        (max_completion_length - cache - L) / cache    up to max_completion_length
        -1                                         beyond

    The same as TRL's `get_soft_overlong_punishment(max_completion_length, cache)`, with its parameters checked.

    Args:
        max_completion_length: `L_max`, in tokens: the generation limit.
        cache: `L_cache`, in tokens: the last tokens over which the penalty grows; 0 for a step at the limit.

    Raises:
        ConfigurationError: A parameter is no integer, or not `1 <= max_completion_length` and `0 <= cache <=` it.
    """

    __name__ = "soft_overlong"
    conformance: ClassVar[Mapping[str, Any]] = {"parameters": {"max_completion_length": 16, "cache": 8}}

    def __init__(self, max_completion_length: int, cache: int) -> None:
        for name, value in (("max_completion_length", max_completion_length), ("cache", cache)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigurationError(f"soft_overlong: {name} must be an integer number of tokens, got {value!r}")
        if max_completion_length < 1:
            raise ConfigurationError(
                f"soft_overlong: max_completion_length must be at least 1, got {max_completion_length}"
            )
        if not 0 <= cache <= max_completion_length:
            raise ConfigurationError(
                f"soft_overlong: cache must be from 0 to max_completion_length ({max_completion_length}), got {cache}"
            )
        self.max_completion_length = max_completion_length
        self.cache = cache

    def __repr__(self) -> str:
        return f"SoftOverlong(max_completion_length={self.max_completion_length}, cache={self.cache})"

    def __call__(self, completion_ids: Sequence[Sequence[int]] | None = None, **kwargs: Any) -> list[float | None]:
        """Score `B` completions by their number of tokens.

        Args:
            completion_ids: `B` lists of token ids, without padding.
            **kwargs: The other columns; not used.

        Returns:
            `B` scores from -1.0 to 0.0.

        Raises:
            RewardError: `completion_ids` is missing, or has not one entry per completion.
        """
        if completion_ids is None:
            raise RewardError(f"soft_overlong needs 'completion_ids', the tokens; it was called with {sorted(kwargs)}")
        completions = kwargs.get("completions")
        if completions is not None and len(completions) != len(completion_ids):
            raise RewardError(
                f"soft_overlong got {len(completions)} completions but {len(completion_ids)} entries in "
                "'completion_ids'; it needs one per completion."
            )
        return [self._penalty(len(ids)) for ids in completion_ids]

    def _penalty(self, length: int) -> float:
        free = self.max_completion_length - self.cache
        if length <= free:
            return 0.0
        if length > self.max_completion_length:
            return -1.0
        return (free - length) / self.cache
