"""Other weights for the thoughts than for the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from ..guard.parameters import checked_number
from .segments import around_markers, token_weights

if TYPE_CHECKING:
    import torch

    from ..types import Rollout


class SegmentWeights:
    """Weigh the parts of a completion: `A'_t = w(part of t) · A_t`.

    The parts are the thoughts between two markers, the answer behind them, the markers themselves, and what stands
    before the first. A closing marker without an opening one closes thoughts that began with the completion, as where
    the chat template has written `<think>`; thoughts that are never closed reach to the end; a completion without
    markers is all answer. Only the first pair counts: markers behind it are part of the answer.

    A token that lies across a boundary has the weight of the part in which it wrote most characters, and of the earlier
    one in a tie. A token that wrote nothing (end of sequence) has the weight of the part that it stands in.

    Source: none of its own; thoughts and answers are weighed apart in many recipes, without a common formula.

    Departures: none.

    Args:
        think: Weight of the thoughts.
        answer: Weight of the answer.
        tags: Weight of the two markers.
        other: Weight of what stands before the opening marker.
        open: The opening marker, found as it is (no regular expression).
        close: The closing marker.

    Raises:
        ConfigurationError: A weight is negative or no finite number, or a marker is empty, or both are the same.
    """

    __name__ = "segment_weights"
    needs = ("offsets",)

    def __init__(
        self,
        *,
        think: float = 1.0,
        answer: float = 1.0,
        tags: float = 1.0,
        other: float = 1.0,
        open: str = "<think>",
        close: str = "</think>",
    ) -> None:
        weights = {"think": think, "answer": answer, "tags": tags, "other": other}
        for kind, weight in weights.items():
            checked_number(f"segment_weights: {kind}", weight, "at least 0", lambda value: value >= 0)
        for name, marker in (("open", open), ("close", close)):
            if not isinstance(marker, str) or not marker:
                raise ConfigurationError(f"segment_weights: {name} must be a text that is not empty, got {marker!r}.")
        if open == close:
            raise ConfigurationError(f"segment_weights: close must not be the same as open, got {close!r}.")
        self.weights = weights
        self.open = open
        self.close = close

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        width = advantages_B_T.size(1)
        rows = []
        for row, counts in enumerate((rollout.lengths_B > 0).tolist()):
            weights: list[float] = []
            if counts:
                parts = around_markers(rollout.texts[row], self.open, self.close)
                weights = token_weights(rollout.offsets(row), parts, self.weights)
            rows.append([*weights, *[1.0] * (width - len(weights))])
        return advantages_B_T * advantages_B_T.new_tensor(rows).view_as(advantages_B_T)
