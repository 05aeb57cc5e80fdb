"""Prompts in an order that does not depend on what came of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..types import PromptOutcome, PromptPool, SamplerDeclaration


class InOrder:
    """The prompts in the order of TRL's own sampler, in as many whole rounds as a pass over the data has.

    It is what runs without a prompt sampler, and equal to TRL's own batches.

    Source: TRL's `RepeatSampler`.

    Departures: a round of `resample` takes further prompts, so that the data is passed faster.
    """

    __name__ = "in_order"
    declares = SamplerDeclaration()

    def start(self, pool: PromptPool) -> None:
        """Take the prompts."""
        self._pool = pool

    def draw(self, count: int, round_number: int) -> Sequence[int] | None:
        """Return the next `count` row numbers."""
        rounds = len(self._pool.rows) // count
        done, place = divmod(round_number, rounds)
        return self._pool.order(done)[place * count : (place + 1) * count]

    def observe(self, outcomes: Sequence[PromptOutcome]) -> None:
        """The order does not depend on outcomes."""

    def state_dict(self) -> Mapping[str, Any]:
        """The round alone decides."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""
