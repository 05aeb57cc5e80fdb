"""Shapers act between TRL's rewards and TRL's advantages: what they see, and how TRL sees what they add.

TRL makes advantages from what its `_calculate_rewards` returns, inside the method that also makes the batch. So shapers
run there, and each gives TRL one more column of rewards, of weight 1: TRL's own estimator, with its `scale_rewards` and
`multi_objective_aggregation`, then works on the shaped rewards, and TRL logs the column beside those of the reward
functions. At that point the batch does not exist yet. It is put together here from what TRL's `_generate` returned and
from the log-probabilities computed so far, and compared later with TRL's own batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import ConfigurationError, UpstreamError
from ..types import Rollout
from .facts import RunFacts
from .upstream import BatchShape, pad_rows

_COMPARED = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "num_items_in_batch",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
)
"""Entries of TRL's batch that a `Rollout` is made of; ours must equal them."""


class Shaping:
    """One generation batch at a time, from its tokens to the rollout with shaped rewards.

    Args:
        facts: Of the run.
        shape: How TRL makes tensors of tokens.

    Attributes:
        rollout: Of the batch at hand, after the shapers; None before they ran.
    """

    def __init__(self, facts: RunFacts, shape: BatchShape) -> None:
        self._facts, self._shape = facts, shape
        self._generated: Sequence[Any] | None = None
        self._passes: list[torch.Tensor] = []
        self._listening = False
        self._made: dict[str, Any] = {}
        self.rollout: Rollout | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A context in which TRL makes one generation batch."""
        self._generated, self._passes, self._made, self.rollout = None, [], {}, None
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def record_generated(self, generated: Sequence[Any]) -> None:
        """Record what TRL's `_generate` returned."""
        self._generated, self._passes = generated, []

    def record_logps(self, logps_B_T: torch.Tensor) -> None:
        """Record the log-probabilities of a pass without a gradient: the old policy's, then the reference's."""
        if self._listening and not self._made:
            self._passes.append(logps_B_T)

    def batch(self, has_reference: bool) -> dict[str, Any]:
        """The batch that TRL will make of what was generated, as far as a `Rollout` needs it.

        Args:
            has_reference: Whether TRL computes the reference's log-probabilities.

        Raises:
            UpstreamError: What was generated is unknown.
        """
        if not self._listening or self._generated is None:
            raise UpstreamError(
                f"Rewards of {self._facts.trainer} were computed for completions that were never seen: a base class "
                "calls _calculate_rewards outside of _generate_and_score_completions, or does not generate with "
                "_generate. Hooks that shape rewards need to see both."
            )
        prompt_ids, completion_ids, tool_mask, _, sampling_logps = self._generated[:5]
        device, shape = self._facts.device, self._shape
        made: dict[str, Any] = {
            "prompt_ids": pad_rows(prompt_ids, shape, shape.pad_id, "left", device),
            "prompt_mask": pad_rows([[1] * len(ids) for ids in prompt_ids], shape, 0, "left", device),
            "completion_ids": pad_rows(completion_ids, shape, shape.pad_id, "right", device),
            "completion_mask": pad_rows([[1] * len(ids) for ids in completion_ids], shape, 0, "right", device),
        }
        if tool_mask is not None:
            made["tool_mask"] = pad_rows(tool_mask, shape, 1, "right", device)
        if sampling_logps is not None:
            numbers = [[torch.nan if logp is None else logp for logp in row] for row in sampling_logps]
            made["sampling_per_token_logps"] = pad_rows(numbers, shape, 0.0, "right", device)
        if shape.masks_truncated:
            whole_B = torch.tensor([ids[-1] in self._facts.end_ids for ids in completion_ids], device=device)
            for key in ("completion_mask", "tool_mask"):
                if key in made:
                    made[key] = made[key] * whole_B.unsqueeze(1).int()
        counting_B_T = made["completion_mask"] * made.get("tool_mask", 1)
        made["num_items_in_batch"] = self._facts.gather(counting_B_T.sum()).sum()
        if len(self._passes) > has_reference:
            made["old_per_token_logps"] = self._passes[0]
        if has_reference and self._passes:
            made["ref_per_token_logps"] = self._passes[-1]
        self._made = made
        return made

    def refuse_images(self, rows: Sequence[dict[str, Any]], missing: Sequence[str]) -> None:
        """Refuse log-probabilities that need a pass with images, which has not run yet.

        Args:
            rows: The dataset's rows of this batch.
            missing: Log-probabilities that hooks need and TRL has not computed.

        Raises:
            ConfigurationError: Some are needed, and the batch has images.
        """
        assert self._generated is not None  # `batch` has checked it
        made = self._generated[6] if len(self._generated) > 6 else None
        if missing and (made is not None or any(rows[0].get(key) for key in ("image", "images"))):
            raise ConfigurationError(
                f"A hook that shapes rewards is selected. For a batch with images it needs {' and '.join(missing)}, "
                "which only TRL can compute at that point: the old policy's with num_iterations above 1, the "
                "reference's with beta above 0. Set these, or remove the hook that needs them."
            )

    def check(self, batch: dict[str, Any]) -> Rollout:
        """Check that TRL made the batch that the shapers saw, and return the rollout after the shapers.

        Raises:
            UpstreamError: It made a different one.
        """
        for key in _COMPARED:
            seen, is_there = self._made.get(key), batch.get(key)
            if seen is not is_there and (seen is None or is_there is None or not _same(seen, is_there)):
                raise UpstreamError(
                    f"Hooks that shape rewards saw a different {key!r} than is in the batch that {self._facts.trainer} "
                    f"made. A base class changes the batch after the rewards, or this TRL is untested."
                )
        assert self.rollout is not None
        return self.rollout


def _same(seen: torch.Tensor, is_there: torch.Tensor) -> bool:
    if seen.shape != is_there.shape:
        return False
    return bool(((seen == is_there) | ((seen != seen) & (is_there != is_there))).all())
