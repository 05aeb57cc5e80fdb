"""Scripted rollouts of the benchmarks of compact updates: three profiles of lengths, three shares without signal."""

import math
import random
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from tests.support import CHARACTERS

PROFILES = ("all equal", "log-normal", "log-normal, 2 % at the limit")
SHARES = (0, 40, 80)
SPREAD = 0.4
"""Standard deviation of the log-length. The longest of 80 completions is then 2.5 times the mean, below the limit."""


@dataclass(frozen=True)
class Size:
    """Size of one update: `groups` prompts with `members` completions of up to `limit` tokens."""

    groups: int = 10
    members: int = 8
    limit: int = 512

    @property
    def rows(self) -> int:
        return self.groups * self.members


@dataclass(frozen=True)
class Cell:
    """A line of the table: the profile of lengths, and the percentage of completions without signal."""

    profile: str
    share: int


def completion_lengths(profile: str, size: Size, groups_with_signal: int) -> list[int]:
    """Tokens of each completion, the members of a group side by side; the mean is a third of the limit, or near it.

    The log-normal lengths are its quantiles in a random order, the same every time. Completions at the limit, 2 % of
    them rounded up, are in groups that have a signal, so that leaving rows out never takes the longest ones away.
    """
    mean = size.limit / 3
    if profile == PROFILES[0]:
        return [round(mean)] * size.rows
    normal = statistics.NormalDist(math.log(mean) - SPREAD**2 / 2, SPREAD)
    quantiles = [normal.inv_cdf((row + 0.5) / size.rows) for row in range(size.rows)]
    lengths = [min(size.limit, max(1, round(math.exp(value)))) for value in quantiles]
    random.Random(0).shuffle(lengths)
    if profile == PROFILES[2]:
        for number in range(math.ceil(0.02 * size.rows)):
            lengths[number % groups_with_signal * size.members + number // groups_with_signal] = size.limit
    return lengths


def prompt_lengths(profile: str, size: Size) -> list[int]:
    """Tokens of each group's prompt: from 1/32 to 6/32 of the limit, or all the mean of that."""
    low = max(1, size.limit // 32)
    high = max(1, size.limit * 6 // 32)
    if profile == PROFILES[0]:
        return [(low + high) // 2] * size.groups
    lengths = [low + (high - low) * group // max(1, size.groups - 1) for group in range(size.groups)]
    random.Random(1).shuffle(lengths)
    return lengths


class Script:
    """Rollouts and rewards of the current `cell`."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.cell = Cell(PROFILES[0], 0)

    @property
    def groups_with_signal(self) -> int:
        return self.size.groups - round(self.size.groups * self.cell.share / 100)

    def lengths(self) -> tuple[list[int], list[int]]:
        """Tokens in each row's prompt and completion."""
        prompts = prompt_lengths(self.cell.profile, self.size)
        rows = [length for length in prompts for _ in range(self.size.members)]
        return rows, completion_lengths(self.cell.profile, self.size, self.groups_with_signal)

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        assert len(prompts) == self.size.rows, "one generation batch is one update, on one process"
        prompts_, completions = self.lengths()
        prompt_ids = [self._tokens(length, row // self.size.members) for row, length in enumerate(prompts_)]
        completion_ids = [self._tokens(length, self.size.groups + row) for row, length in enumerate(completions)]
        for ids in completion_ids:
            if len(ids) < self.size.limit:
                ids[-1] = 1
        logprobs = [[-1.0] * length for length in completions]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    @staticmethod
    def _tokens(length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [int(i) for i in torch.randint(3, 3 + len(CHARACTERS), (length,), generator=generator)]

    def reward(self, completions: list[Any], **columns: Any) -> list[float]:
        with_signal = self.groups_with_signal * self.size.members
        return [float(row % 2) if row < with_signal else 0.0 for row in range(len(completions))]

    def padding(self) -> float:
        """Tokens that TRL computes for each token that is not padding: every row is as long as the longest."""
        prompts, completions = self.lengths()
        return self.size.rows * (max(prompts) + max(completions)) / (sum(prompts) + sum(completions))
