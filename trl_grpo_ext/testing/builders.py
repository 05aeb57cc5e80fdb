"""Contexts made by hand, for tests of hooks and aggregations without a trainer; and several ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from ..errors import PluginOutputError
from ..types import Forward, Rollout, Totals


class UnequalGathers(PluginOutputError):  # noqa: N818
    """One rank called `gather` more often than another, which in a run would wait for ever."""


def mask_of(lengths: Sequence[int], width: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The loss mask `(B, T)` of completions of these lengths; `T` is the longest, or `width`."""
    width = max(max(lengths), 1) if width is None else width
    return (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).to(dtype)


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

    By default each token wrote one character, `c`, and every token has the id 1. There are no log-probabilities. All
    tensors are float64, so that sums done by hand are met to the last digits.

    Args:
        lengths: Live tokens of each of the `B` completions.
        rewards: Those of a single reward function, called `r`, `B` of them; NaN where it said None. Zeros by default.
        groups: The group of each completion; by default all are completions of one prompt.
        width: `T`, where it is not the longest length.
        limit: `max_completion_length`.
        **overrides: Any field of `Rollout`, taken as it is.
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
        "group_baselines_B": torch.stack(
            [rewards_B[[other == group for other in groups]].nanmean() for group in groups]
        ),
        "num_generations": rows // len(set(groups)),
        "totals": Totals(tokens=sum(lengths), sequences=rows, prompts=len(set(groups)), max_completion_length=limit),
    }
    return Rollout(**{**settings, **overrides})


def make_forward(
    logps: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor | None = None, **overrides: Any
) -> Forward:
    """The context of one micro-batch at its loss forward, for a unit test of `on_forward`.

    Args:
        logps: Log-probabilities of the sampled tokens under the policy being trained, `(B, T)`. Those under the policy
            that generated are the same.
        entropies: Entropies in nats, `(B, T)`.
        mask: Loss mask `(B, T)`; every token counts by default.
        **overrides: Any field of `Forward`, taken as it is; by default rewards are 0, of groups whose rewards differ.
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


def cut(rollout: Rollout, sizes: Sequence[int]) -> list[Rollout]:
    """The same generation batch on several ranks, which have `sizes` rows of it; for `Ranks`."""
    parts, first = [], 0
    if sum(sizes) != len(rollout.mask_B_T):
        raise ValueError(f"The sizes {list(sizes)} must add up to the {len(rollout.mask_B_T)} rows of the batch.")
    for size in sizes:
        rows = slice(first, first + size)
        of_rows: dict[str, Any] = {}
        for field in fields(rollout):
            value = getattr(rollout, field.name)
            of_all_rows = isinstance(value, torch.Tensor) and field.name != "reward_weights_K"
            if of_all_rows or field.name in ("prompts", "completions", "texts"):
                of_rows[field.name] = value[rows]
            elif field.name in ("columns", "reward_spans", "teacher_logps_B_T"):
                of_rows[field.name] = {key: column[rows] for key, column in value.items()}
        of_rows["offsets"] = partial(lambda shift, row: rollout.offsets(shift + row), first)
        parts.append(replace(rollout, **of_rows))
        first = rows.stop
    return parts


class Ranks:
    """Several ranks in this process, each with its part of a generation batch: their `gather` really meets.

    Args:
        parts: Each rank's rollout, with the totals of all.

    Attributes:
        rollouts: The same, with `gather` and `local_rows`.
        gathers: How often each rank has gathered.
    """

    def __init__(self, parts: Sequence[Rollout]) -> None:
        self._sent: list[torch.Tensor | None] = [None] * len(parts)
        self._meeting = threading.Condition()
        self._waiting, self._round, self._gone = 0, 0, 0
        self._failed = False
        self._result: torch.Tensor | None = None
        self.gathers = [0] * len(parts)
        self.rollouts: list[Rollout] = []
        first = 0
        for rank, part in enumerate(parts):
            rows = slice(first, first + len(part.mask_B_T))
            self.rollouts.append(replace(part, gather=partial(self._gather, rank), local_rows=rows))
            first = rows.stop

    def run(self, call: Callable[[Rollout], Any]) -> list[Any]:
        """What `call` gives on each rank.

        Raises:
            UnequalGathers: The ranks don't gather equally often. (What `call` raises on a rank is raised first.)
        """
        self._gone, self._failed = 0, False

        def on(rollout: Rollout) -> Any:
            try:
                return call(rollout)
            except BaseException:
                self._failed = True
                raise
            finally:
                with self._meeting:  # nobody waits for this rank
                    self._gone += 1
                    self._meeting.notify_all()

        with ThreadPoolExecutor(len(self.rollouts)) as pool:
            futures = [pool.submit(on, rollout) for rollout in self.rollouts]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, UnequalGathers)):
            raise error
        return [future.result() for future in futures]

    def _gather(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        with self._meeting:
            self._sent[rank] = tensor
            self.gathers[rank] += 1
            self._waiting += 1
            mine = self._round
            if self._waiting == len(self.rollouts):
                self._result = self._joined()
                self._waiting, self._round = 0, self._round + 1
                self._meeting.notify_all()
            while self._round == mine:
                if self._gone and self._waiting + self._gone >= len(self.rollouts):  # nobody is left who might come
                    raise UnequalGathers(
                        f"the ranks gathered {self.gathers} times: every rank must call gather equally often, and "
                        "never under a condition on its own rows."
                    )
                self._meeting.wait()
            assert self._result is not None
            return self._result

    def _joined(self) -> torch.Tensor:
        sent = [part for part in self._sent if part is not None]
        if any(part.dim() == 0 for part in sent):
            raise PluginOutputError("gather takes tensors of (B,) or (B, T), and was given a scalar.")
        width = max(part.size(-1) for part in sent)
        wide = [pad(part, (0, width - part.size(1))) if part.dim() == 2 else part for part in sent]
        return torch.cat(wide)
