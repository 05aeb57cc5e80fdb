"""Build a `Rollout` from rows: texts, tokens, rewards and groups. It needs no trainer, so any process can do it."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..completions import turn_numbers
from ..types import NEEDS, Rollout, Totals, Turn
from .alignment import token_offsets
from .groups import group_mean, weighted_rewards
from .parts import Rows, with_parts
from .turns import read_turns

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class ScoredRows:
    """The rows of this rank as reward functions saw them; the rewards are those of all ranks."""

    rows: Sequence[Mapping[str, Any]]  # of the data set
    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    rewards_N_K: torch.Tensor
    parts: Mapping[str, Rows] = field(default_factory=dict)
    part_names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of all ranks
    outcomes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tool_masks: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class RowTensors:
    """The tokens of the rows of this rank as tensors."""

    prompt_ids_B_P: torch.Tensor  # padded on the left
    prompt_mask_B_P: torch.Tensor
    completion_ids_B_T: torch.Tensor  # padded on the right
    mask_B_T: torch.Tensor  # the loss mask, a float tensor
    tool_mask_B_T: torch.Tensor | None = None
    # Log-probabilities and entropies by their name in `NEEDS`, and those of teachers by the teacher's name.
    logps_B_T: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt_ids: Arrays, completion_ids: Arrays, masks: Arrays, pad_id: int, **logps: Arrays) -> Self:
        """Pad rows of tokens; a mask is 1 where the model wrote a token, which counts in the loss, and 0 for a tool."""
        by_tools = any((mask == 0).any() for mask in masks)
        return cls(
            prompt_ids_B_P=padded(prompt_ids, pad_id, "left"),
            prompt_mask_B_P=padded([np.ones_like(ids) for ids in prompt_ids], 0, "left"),
            completion_ids_B_T=padded(completion_ids, pad_id),
            mask_B_T=padded(masks).float(),
            tool_mask_B_T=padded(masks, 1).float() if by_tools else None,
            logps_B_T={name: padded(values) for name, values in logps.items()},
        )


def padded(rows: Arrays, value: float = 0, side: str = "right") -> torch.Tensor:
    """Arrays of different lengths as a tensor, `(B, T)`."""
    tensors = [torch.as_tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


@dataclass(frozen=True, kw_only=True)
class RolloutFacts:
    """What a `Rollout` is made with, the same for all batches of a run."""

    tokenizer: Any
    end_ids: Collection[int]  # tokens that end a completion, padding among them
    reward_names: Sequence[str]
    reward_weights_K: torch.Tensor
    group_size: int
    rank: int = 0
    async_tools: frozenset[str] = frozenset()


def build_rollout(
    scored: ScoredRows,
    tensors: RowTensors,
    facts: RolloutFacts,
    totals: Totals,
    gather: Callable[[torch.Tensor], torch.Tensor],
    *,
    row_numbers: Sequence[int] | None = None,
    step: int = 0,
    training: bool = True,
) -> Rollout:
    """The context of one batch; `totals` counts the batch that weights span, on all ranks."""
    rows = len(scored.prompts)
    sequences = scored.rewards_N_K.size(0)
    local = slice(facts.rank * rows, (facts.rank + 1) * rows)
    mask_B_T = tensors.mask_B_T
    weights_K = facts.reward_weights_K.to(scored.rewards_N_K.device)
    rewards_N = weighted_rewards(scored.rewards_N_K, weights_K)
    groups_N = torch.arange(sequences, device=rewards_N.device) // facts.group_size
    texts = [  # which are decoded already unless the completion is a list of messages
        completion if isinstance(completion, str) else str(facts.tokenizer.decode(ids, skip_special_tokens=True))
        for completion, ids in zip(scored.completions, scored.completion_ids, strict=True)
    ]
    written_B = torch.tensor([len(ids) for ids in scored.completion_ids], device=mask_B_T.device)
    is_token_B_T = torch.arange(mask_B_T.size(1), device=mask_B_T.device) < written_B.unsqueeze(1)
    by_model_B_T = tensors.tool_mask_B_T
    masks = scored.tool_masks  # before truncated completions were masked
    if masks is not None and [len(mask) for mask in masks] == [len(ids) for ids in scored.completion_ids]:
        by_model_B_W = padded([np.asarray(mask) for mask in masks])
        by_model_B_T = pad(by_model_B_W, (0, is_token_B_T.size(1) - by_model_B_W.size(1))).to(is_token_B_T.device)
    turns_B_T = turn_numbers(is_token_B_T if by_model_B_T is None else is_token_B_T & (by_model_B_T > 0))
    offsets = functools.cache(lambda row: token_offsets(facts.tokenizer, scored.completion_ids[row], texts[row]))

    @functools.cache
    def turns(row: int) -> Sequence[Turn]:
        by_model = [number >= 0 for number in turns_B_T[row, : len(scored.completion_ids[row])].tolist()]
        return read_turns(by_model, scored.completions[row], texts[row], offsets(row), facts.async_tools)

    ends = [ids[-1] not in facts.end_ids for ids in scored.completion_ids]
    logps = dict(tensors.logps_B_T)
    rollout = Rollout(
        prompts=scored.prompts,
        completions=scored.completions,
        columns={key: [row[key] for row in scored.rows] for key in scored.rows[0] if key != "prompt"},
        row_numbers=row_numbers,
        texts=texts,
        prompt_ids_B_P=tensors.prompt_ids_B_P,
        prompt_mask_B_P=tensors.prompt_mask_B_P.to(mask_B_T.dtype),
        completion_ids_B_T=tensors.completion_ids_B_T,
        mask_B_T=mask_B_T,
        completion_mask_B_T=is_token_B_T.to(mask_B_T.dtype),
        tool_mask_B_T=None if tensors.tool_mask_B_T is None else tensors.tool_mask_B_T.to(mask_B_T.dtype),
        turns_B_T=turns_B_T,
        turns=turns,
        truncated_B=torch.tensor(ends, device=mask_B_T.device),
        rewards_B_K=scored.rewards_N_K[local],
        reward_names=tuple(facts.reward_names),
        reward_weights_K=weights_K,
        rewards_B=rewards_N[local],
        group_ids_B=groups_N[local],
        group_baselines_B=group_mean(rewards_N, groups_N)[local],
        num_generations=facts.group_size,
        totals=totals,
        old_logps_B_T=logps.get("old_logps"),
        old_entropies_B_T=logps.get("old_entropies"),
        ref_logps_B_T=logps.get("ref_logps"),
        sampling_logps_B_T=logps.get("sampling_logps"),
        teacher_logps_B_T={name: values_B_T for name, values_B_T in logps.items() if name not in NEEDS},
        step=step,
        training=training,
        tokenizer=facts.tokenizer,
        gather=gather,
        local_rows=local,
        offsets=offsets,
    )
    return with_parts(rollout, scored.parts, scored.part_names)
