"""TRL's batch, a dict of tensors: the entries that we add, the tokens that count, and how to join batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..types import Rollout


class BatchKeys:
    """Every entry that we put into TRL's batch. TRL shuffles, cuts and deals them with its own."""

    reward = "trl_grpo_ext_reward"  # `(B,)`, weighted, after the shapers
    raw_reward = "trl_grpo_ext_raw_reward"  # `(B,)`, weighted, before them
    baseline = "trl_grpo_ext_baseline"  # `(B,)`, mean reward of the group
    zero_variance = "trl_grpo_ext_zero_variance"  # `(B,)`, as `Forward.zero_variance_B`
    allowed_signs = "trl_grpo_ext_allowed_signs"  # `(B, T)`, those of advantages that masks let through later
    row_id = "trl_grpo_ext_row_id"  # `(B,)`, running number of the completion over all ranks and batches; or -1
    weights = "trl_grpo_ext_weights"  # `(B, T)`, of the selected aggregation
    batch_number = "trl_grpo_ext_batch_number"  # `(B,)`, of the generation batch whose weights they are
    totals = "trl_grpo_ext_totals"  # a `Totals`, once the rows are dealt
    carried = "trl_grpo_ext_carried"  # `(B, T)`, begins the entries that a token loss takes along
    masked_groups_factor = "trl_grpo_ext_masked_groups_factor"  # of a loss that counts masked groups as rows
    idle = "trl_grpo_ext_idle"  # whether a compact micro-step has placeholders only, on all ranks
    part_factor = "trl_grpo_ext_part_factor"  # `(B,)`, factor on the advantages of a compact micro-step


def row_entries(
    rollout: Rollout, zero_variance_B: torch.Tensor, allowed_signs_B_T: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """What losses read of each row, from a rollout after its hooks."""
    entries = {
        BatchKeys.reward: rollout.rewards_B,
        BatchKeys.raw_reward: rollout.raw_rewards_B,
        BatchKeys.baseline: rollout.group_baselines_B,
        BatchKeys.zero_variance: zero_variance_B,
    }
    return entries if allowed_signs_B_T is None else {**entries, BatchKeys.allowed_signs: allowed_signs_B_T}


PROMPT_TYPES = {name: f"trl_grpo_ext_prompt_{name}" for name in ("token_type_ids", "mm_token_type_ids")}
"""Entries `(B, P + T)` that say which tokens are of images, and the name of their part `(B, P)` while rows move."""

PROMPT_KEYS = frozenset({"prompt_ids", "prompt_mask", *PROMPT_TYPES.values()})
"""Entries `(B, P)`, padded on the left; all others are padded on the right."""


def counting_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """`(B, T)`, 1 where a token counts in the loss: written by the policy, and not by a tool."""
    mask_B_T: torch.Tensor = batch["completion_mask"]
    return mask_B_T if batch.get("tool_mask") is None else mask_B_T * batch["tool_mask"]


def scaled_for_masked_groups(values: Any, batch: Mapping[str, Any]) -> Any:
    """A loss, or weights in it, as if the groups that `resample` has masked were no rows."""
    factor = batch.get(BatchKeys.masked_groups_factor)
    return values if factor is None else values * factor


def whole_rows(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def same_tokens(ids: torch.Tensor, mask: torch.Tensor, others: torch.Tensor, others_mask: torch.Tensor) -> bool:
    """Whether rows have the same tokens, wherever their padding is."""
    live, other = mask != 0, others_mask != 0
    return torch.equal(live.sum(1), other.sum(1)) and torch.equal(ids[live], others[other])


def two_rows_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A micro-batch for trials; its row twice if it has only one, since with one there is nothing to mix up."""
    batch = dict(inputs)
    return batch if batch["completion_ids"].size(0) > 1 else join_batches([batch, batch])


def join_batches(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for key, value in batches[0].items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            rows[key] = torch.cat([batch[key] for batch in batches])
        elif isinstance(value, list | tuple):
            rows[key] = [entry for batch in batches for entry in batch[key]]
        else:
            rows[key] = value
    return rows
