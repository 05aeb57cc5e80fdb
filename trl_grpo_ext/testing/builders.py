"""Build contexts for unit tests of plugins without a trainer, and simulate several ranks in one process."""

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.functional import pad

from ..credit.groups import group_mean
from ..credit.parts import with_parts
from ..credit.turns import true_runs
from ..errors import PluginOutputError
from ..types import Forward, LossTerms, Rollout, ToolCall, Totals, Turn


class UnequalGathers(PluginOutputError):  # noqa: N818
    """One rank called `gather` more often than another; a run would hang."""


def mask_of(lengths: Sequence[int], width: int | None = None) -> torch.Tensor:
    """The loss mask `(B, T)` of completions of these lengths; `T` is the longest, or `width`."""
    width = max(max(lengths), 1) if width is None else width
    return (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).double()


def make_rollout(
    lengths: Sequence[int],
    rewards: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
    *,
    width: int | None = None,
    limit: int = 8,
    **overrides: Any,
) -> Rollout:
    """The context of one generation batch on one rank, for a unit test of `on_rollout` or `weights`.

        rollout = make_rollout([3, 1], rewards=[1.0, 0.0])
        new_B_T = MyHook().on_rollout(rollout.mask_B_T * torch.tensor([[0.5], [-0.5]]), rollout)

    By default each token wrote one character, `c`, and has the id 1. There are no log-probabilities. All tensors are
    float64. If `tool_mask_B_T` cuts tokens into turns, each but the last calls a tool, and the tokens between answer.

    Args:
        lengths: Live tokens of each of the `B` completions.
        rewards: The `B` rewards of a single reward function `r`; NaN for None. Zeros by default.
        groups: The group of each completion; by default one group.
        width: `T`, if not the longest length.
        limit: `max_completion_length`.
        **overrides: Any field of `Rollout`, used unchanged; as `parts`, what reward functions return, by name.
    """
    rows = len(lengths)
    rewards_B = torch.tensor([0.0] * rows if rewards is None else list(rewards), dtype=torch.float64)
    groups = [0] * rows if groups is None else list(groups)
    mask_B_T = mask_of(lengths, width)
    settings: dict[str, Any] = {
        "prompts": ["p"] * rows,
        "completions": ["c" * length for length in lengths],
        "texts": ["c" * length for length in lengths],
        "offsets": lambda row: [(i, i + 1) for i in range(lengths[row])],
        "prompt_ids_B_P": torch.ones(rows, 1, dtype=torch.long),
        "prompt_mask_B_P": torch.ones(rows, 1, dtype=torch.float64),
        "completion_ids_B_T": torch.ones(mask_B_T.shape, dtype=torch.long),
        "mask_B_T": mask_B_T,
        "completion_mask_B_T": mask_B_T,
        "truncated_B": torch.zeros(rows, dtype=torch.bool),
        "rewards_B_K": rewards_B.unsqueeze(1),
        "reward_names": ("r",),
        "reward_weights_K": torch.ones(1, dtype=torch.float64),
        "rewards_B": rewards_B,
        "group_ids_B": torch.tensor(groups),
        "group_baselines_B": group_mean(rewards_B, torch.unique(torch.tensor(groups), return_inverse=True)[1]),
        "num_generations": rows // len(set(groups)),
        "totals": Totals(tokens=sum(lengths), sequences=rows, prompts=len(set(groups)), max_completion_length=limit),
    }
    parts = overrides.pop("parts", {})
    rollout = Rollout(**{**settings, **overrides})
    if "turns" in overrides:
        return with_parts(rollout, parts)
    written = [numbers[:length] for numbers, length in zip(rollout.turns_B_T.tolist(), lengths, strict=True)]
    rollout = replace(rollout, turns=lambda row: turns_between([one >= 0 for one in written[row]], rollout.texts[row]))
    return with_parts(rollout, parts)


def turns_between(by_model: Sequence[bool | int], pieces: Sequence[str], failed: Collection[int] = ()) -> list[Turn]:
    """A completion's turns: each but the last calls a tool, which the tokens after it answer; those `failed` raised."""
    runs = true_runs([bool(one) for one in by_model])
    offsets = character_offsets(pieces)
    turns = []
    for number, (first, end) in enumerate(runs):
        after = runs[number + 1][0] if number + 1 < len(runs) else len(by_model)
        result = "".join(pieces[end:after])
        outcome = "raised" if number in failed else "returned"
        call = ToolCall(name="tool", arguments={}, outcome=outcome, result=result)
        calls = [call] if number + 1 < len(runs) else []
        text = "".join(pieces[first:end])
        characters = (offsets[first][0], offsets[end - 1][1])
        turn = Turn(number=number, tokens=(first, end), text=text, characters=characters, observation=result)
        turns.append(replace(turn, content=characters, calls=calls))
    return turns


def character_offsets(pieces: Sequence[str]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(map(len, pieces), initial=0)))


def padded(rows: Sequence[Sequence[float]], width: int, padding: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[*row, *([padding] * (width - len(row)))] for row in rows], dtype=dtype)


def make_forward(
    logps: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor | None = None, **overrides: Any
) -> Forward:
    """The context of one micro-batch at its loss forward, for a unit test of `on_forward`.

    Args:
        logps: Log-probabilities of the sampled tokens under the policy being trained, and that which generated.
        entropies: Entropies in nats, `(B, T)`.
        mask: Loss mask `(B, T)`; every token counts by default.
        **overrides: Any field of `Forward`, used unchanged; by default rewards are 0, and no group has zero variance.
    """
    rows = logps.size(0)
    settings: dict[str, Any] = {
        "logps_B_T": logps,
        "entropies_B_T": entropies,
        "old_logps_B_T": logps,
        "mask_B_T": torch.ones_like(logps) if mask is None else mask,
        "completion_ids_B_T": torch.ones(logps.shape, dtype=torch.long),
        "rewards_B": logps.new_zeros(rows),
        "group_baselines_B": logps.new_zeros(rows),
        "zero_variance_B": torch.zeros(rows, dtype=torch.bool),
    }
    return Forward(**{**settings, **overrides})


def make_terms(logps: torch.Tensor, old_logps: torch.Tensor, advantages: torch.Tensor, **overrides: Any) -> LossTerms:
    """The context of one micro-batch for a unit test of a token loss's `loss`; every token counts.

    Args:
        logps: Log-probabilities of the sampled tokens under the policy being trained, `(B, T)`.
        old_logps: Those under the policy that generated, `(B, T)`.
        advantages: `(B, T)`.
        **overrides: Any field of `LossTerms`, used unchanged; by default entropies and rewards are 0.
    """
    settings: dict[str, Any] = {
        "logps_B_T": logps,
        "old_logps_B_T": old_logps,
        "advantages_B_T": advantages,
        "mask_B_T": torch.ones_like(old_logps),
        "entropies_B_T": torch.zeros_like(old_logps),
        "completion_ids_B_T": torch.ones(logps.shape, dtype=torch.long),
        "rewards_B": old_logps.new_zeros(logps.size(0)),
    }
    return LossTerms(**{**settings, **overrides})


def cut(rollout: Rollout, sizes: Sequence[int]) -> list[Rollout]:
    """Split a generation batch over several ranks with `sizes` rows each, for `Ranks`."""
    parts = []
    first = 0
    for size in sizes:
        rows = slice(first, first + size)
        of_rows: dict[str, Any] = {}
        for entry in fields(rollout):
            value = getattr(rollout, entry.name)
            of_all_rows = isinstance(value, torch.Tensor) and entry.name != "reward_weights_K"
            if of_all_rows or entry.name in ("prompts", "completions", "texts"):
                of_rows[entry.name] = value[rows]
            elif entry.name in ("columns", "teacher_logps_B_T"):
                of_rows[entry.name] = {key: column[rows] for key, column in value.items()}
        of_rows["parts"] = {name: table.rows(rows) for name, table in rollout.parts.items()}
        of_rows["offsets"] = partial(lambda shift, row: rollout.offsets(shift + row), first)
        of_rows["turns"] = partial(lambda shift, row: rollout.turns(shift + row), first)
        parts.append(replace(rollout, **of_rows))
        first = rows.stop
    return parts


class Ranks:
    """Several ranks in this process, each with its part of a generation batch in `rollouts`, whose `gather` works."""

    def __init__(self, parts: Sequence[Rollout]) -> None:
        self._sent: list[torch.Tensor | None] = [None] * len(parts)
        self._meeting = threading.Barrier(len(parts))
        self._over = False
        self.gathers = [0] * len(parts)
        ends = list(accumulate((len(part.mask_B_T) for part in parts), initial=0))
        self.rollouts = [
            replace(part, gather=partial(self._gather, rank), local_rows=slice(*ends[rank : rank + 2]))
            for rank, part in enumerate(parts)
        ]

    def run(self, call: Callable[[Rollout], Any]) -> list[Any]:
        self._over = False

        def on(rank: int, rollout: Rollout) -> Any:
            try:
                return call(rollout)
            finally:
                self._meet(rank, None)

        with ThreadPoolExecutor(len(self.rollouts)) as pool:
            futures = [pool.submit(on, rank, rollout) for rank, rollout in enumerate(self.rollouts)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, UnequalGathers)):
            raise error
        return [future.result() for future in futures]

    def _meet(self, rank: int, tensor: torch.Tensor | None) -> list[torch.Tensor | None]:
        """What all ranks send, None from those that are done. Where one is done, nobody meets again."""
        if self._over:
            return [None]
        self._sent[rank] = tensor
        self._meeting.wait()
        sent = list(self._sent)
        self._over = self._over or any(part is None for part in sent)
        self._meeting.wait()  # until all have read
        return sent

    def _gather(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self.gathers[rank] += 1
        parts = [part for part in self._meet(rank, tensor) if part is not None]
        if len(parts) < len(self.rollouts):
            raise UnequalGathers(f"the ranks gathered {self.gathers} times: each must call gather equally often.")
        width = max(part.size(-1) for part in parts)
        return torch.cat([pad(part, (0, width - part.size(1))) if part.dim() == 2 else part for part in parts])
