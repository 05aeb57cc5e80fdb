"""Shapers act between TRL's rewards and TRL's advantages: what they see, and how TRL sees what they add.

TRL makes advantages from what its `_calculate_rewards` returns, inside the method that also makes the batch. So shapers
run there, and each gives TRL one more column of rewards, of weight 1: TRL's own estimator, with its `scale_rewards` and
`multi_objective_aggregation`, then works on the shaped rewards, and TRL logs the column beside those of the reward
functions. At that point the batch does not exist yet. It is put together here from what TRL's `_generate` returned and
from the log-probabilities computed so far, and compared later with TRL's own batch.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ConfigurationError, UpstreamError
from ..types import Rollout
from .facts import RunFacts
from .sampled_batch import Sampling
from .upstream.acting import pad_rows

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


def batch_before_trls(facts: RunFacts, sampling: Sampling, has_reference: bool) -> dict[str, Any]:
    """The batch that TRL will make of what was generated, as far as a `Rollout` needs it."""
    generated = sampling.generated
    if not generated.completion_ids:
        raise UpstreamError(
            f"Rewards of {facts.trainer} were computed for completions that were never seen: a base class "
            "calls _calculate_rewards outside of _generate_and_score_completions, or does not generate with "
            "_generate. Hooks that shape rewards need to see both."
        )

    padded = functools.partial(pad_rows, facts)
    made: dict[str, Any] = {
        "prompt_ids": padded(generated.prompt_ids, facts.pad_id, "left"),
        "prompt_mask": padded([[1] * len(ids) for ids in generated.prompt_ids], 0, "left"),
        "completion_ids": padded(generated.completion_ids, facts.pad_id),
        "completion_mask": padded([[1] * len(ids) for ids in generated.completion_ids], 0),
    }
    if generated.tool_masks is not None:
        made["tool_mask"] = padded(generated.tool_masks, 1)
    if generated.sampling_logps is not None:
        numbers = [[torch.nan if logp is None else logp for logp in row] for row in generated.sampling_logps]
        made["sampling_per_token_logps"] = padded(numbers, 0.0)
    if facts.masks_truncated:
        whole_B = torch.tensor([ids[-1] in facts.end_ids for ids in generated.completion_ids], device=facts.device)
        for key in {"completion_mask", "tool_mask"} & made.keys():
            made[key] = made[key] * whole_B.unsqueeze(1).int()
    counting_B_T = made["completion_mask"] * made.get("tool_mask", 1)
    made["num_items_in_batch"] = facts.gather(counting_B_T.sum()).sum()
    if len(sampling.passes) > has_reference:
        made["old_per_token_logps"] = sampling.passes[0]
    if has_reference and sampling.passes:
        made["ref_per_token_logps"] = sampling.passes[-1]
    return made


def refuse_images(has_images: bool, missing: Sequence[str]) -> None:
    """Refuse log-probabilities, `missing` in TRL's batch, that need a pass with images."""
    if missing and has_images:
        raise ConfigurationError(
            f"A hook that shapes rewards needs {' and '.join(missing)} of a batch with images, which TRL alone can "
            "compute there, where num_iterations is above 1 (old policy) or beta above 0 (reference). Set these, or "
            "remove the hook."
        )


def rollout_of_shapers(facts: RunFacts, sampling: Sampling, batch: dict[str, Any]) -> Rollout:
    """Check that TRL made the batch that the shapers saw, and return the rollout after the shapers."""
    before, rollout = sampling.shaped[-1]
    for key in _COMPARED:
        seen, made = before.get(key), batch.get(key)
        if seen is not made and (seen is None or made is None or not _same(seen, made)):
            raise UpstreamError(
                f"Hooks that shape rewards saw a different {key!r} than is in the batch that {facts.trainer} "
                f"made. A base class changes the batch after the rewards, or this TRL is untested."
            )
    return rollout


def _same(seen: torch.Tensor, made: torch.Tensor) -> bool:
    return seen.shape == made.shape and bool(((seen == made) | ((seen != seen) & (made != made))).all())
