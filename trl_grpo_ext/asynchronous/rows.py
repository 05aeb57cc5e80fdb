"""A completion with all that is known of it when it is scored, and how it travels from the scoring process to the loss.

TRL's queue carries six fields of a sample. One of them, the advantage, is a number of ours that holds the `Row` and
pickles with it. On rank 0 the rows of each rank are packed into bytes, since TRL deals tensors alone to the ranks.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..credit.parts import agreed_names
from ..credit.rollouts import RolloutFacts, RowTensors, ScoredRows, build_rollout
from ..trainer.upstream.releases import parsing_of
from ..types import Part, Rollout, Totals


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scored completion. Arrays have an entry for each of its tokens, those of tools included."""

    columns: Mapping[str, Any]  # of the data set
    prompt: Any
    completion: Any
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    mask: np.ndarray  # 1 where a token counts in the loss
    sampling_logps: np.ndarray
    rewards: Mapping[str, float]  # each function's, then what each shaper added; NaN for none
    reward_weights: Sequence[float]
    parts: Mapping[str, Sequence[Part]]
    outcomes: Mapping[str, Any]
    group: int
    of_group: Mapping[str, Any]  # fields of the rollout that come from the whole group, and `zero_variance`
    stages: Sequence[tuple[str, np.ndarray]]  # the advantages: TRL's, then after each rollout hook
    allowed_signs: np.ndarray | None

    @property
    def advantages(self) -> np.ndarray:
        """The advantage of each token after the rollout stage of the hooks."""
        return self.stages[-1][1]


class CarriedAdvantage(float):
    """A completion's mean advantage, with its `row`, and the groups that the filter dropped since the last one."""

    row: Row
    dropped: Mapping[int, str]

    def __new__(cls, row: Row, dropped: Mapping[int, str]) -> CarriedAdvantage:
        """The number comes from the row."""
        made = super().__new__(cls, row.advantages[row.mask > 0].mean())
        made.row, made.dropped = row, dropped
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the row."""
        return CarriedAdvantage, (self.row, self.dropped)


def as_bytes(rows: Sequence[Row]) -> np.ndarray:
    """The rows as bytes; zeros may follow."""
    return np.frombuffer(bytearray(pickle.dumps(list(rows))), dtype=np.uint8)


def from_bytes(data: torch.Tensor) -> list[Row]:
    """The rows of `as_bytes`, which this run has made itself."""
    rows: list[Row] = pickle.loads(data.cpu().numpy().tobytes())
    return rows


def padded(arrays: Sequence[Any], device: Any = "cpu") -> torch.Tensor:
    """Arrays `(T,)` of different lengths as `(B, T)`, with zeros on the right."""
    return pad_sequence([torch.as_tensor(array) for array in arrays], batch_first=True).to(device)


def rollout_of(
    rows: Sequence[Row],
    totals: Totals,
    gather: Callable[[torch.Tensor], torch.Tensor],
    *,
    tokenizer: Any,
    end_ids: Sequence[int],
    tools: Sequence[Any],
    step: int,
    device: Any = "cpu",
) -> Rollout:
    """The context of these rows, as if they were one group and all ranks had them; `of_group` says what is known."""
    named = dict.fromkeys(name for row in rows for name in row.parts)
    parts = {name: [row.parts.get(name, ()) for row in rows] for name in named}
    tool_masks = [row.mask.tolist() for row in rows] if any(row.mask.min() == 0 for row in rows) else None
    scored = ScoredRows(
        rows=[row.columns for row in rows],
        prompts=[row.prompt for row in rows],
        completions=[row.completion for row in rows],
        completion_ids=[row.completion_ids for row in rows],
        rewards_N_K=torch.tensor([list(row.rewards.values()) for row in rows], device=device),
        parts=parts,
        part_names=agreed_names(parts, gather, device),
        tool_masks=tool_masks,
    )
    logps = {"sampling_logps": padded([row.sampling_logps for row in rows], device)}
    made = RowTensors.of([row.prompt_ids for row in rows], scored.completion_ids, tokenizer.pad_token_id, tool_masks)
    moved = {name: value.to(device) for name, value in vars(made).items() if isinstance(value, torch.Tensor)}
    facts = RolloutFacts(
        tokenizer=tokenizer,
        end_ids={*end_ids, tokenizer.pad_token_id},
        reward_names=list(rows[0].rewards),
        reward_weights_K=torch.tensor(rows[0].reward_weights),
        group_size=len(rows),
        parsing=parsing_of(tokenizer),
        async_tools=frozenset(tool.__name__ for tool in tools if inspect.iscoroutinefunction(tool)),
    )
    rollout = build_rollout(scored, replace(made, **moved, logps_B_T=logps), facts, totals, gather, step=step)
    known: dict[str, Any] = {
        name: torch.tensor([row.of_group[name] for row in rows], device=device)
        for name in rows[0].of_group
        if name != "zero_variance"
    }
    return replace(rollout, **known)
