"""The generation batches that the kit tries plugins on.

A row's tokens, log-probabilities and losses depend only on its number. So a row is the same in any batch,
order and padding, which most rules rely on.
"""

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..credit.groups import group_is_equal, group_mean
from ..credit.parts import with_parts
from ..credit.turns import true_runs
from ..guard.outcomes import shown
from ..types import NEEDS, Forward, Parts, Place, Rollout, StepTotals, Totals
from .builders import character_offsets, make_forward, padded, turns_between

PIECES = ("<think>", "2", "+", "2", "=", "4", "</think>", "<answer>", "4", "</answer>", " so", ".", "\n\n", "sorry ")
REWARD_NAMES = ("right", "form")
REWARD_WEIGHTS = (1.0, 0.5)
LIMIT = 8
_LOGPS = (-3.0, -0.01)


@dataclass(frozen=True)
class Row:
    """One completion: its number, its group, which of its tokens count, and its rewards from two functions."""

    number: int
    group: int
    live: tuple[int, ...]
    rewards: tuple[float, float]

    @property
    def truncated(self) -> bool:
        return self.number % 3 == 2

    @property
    def reward(self) -> float:
        """The weighted sum of its rewards; NaN if it has none."""
        said = [r * w for r, w in zip(self.rewards, REWARD_WEIGHTS, strict=True) if not math.isnan(r)]
        return sum(said) if said else math.nan


@dataclass(frozen=True)
class Setting:
    """The common settings of all batches of one check."""

    texts: tuple[str, ...] | None = None
    prompts: tuple[Any, ...] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tokenizer: Any = None
    teachers: tuple[str, ...] = ()
    needs: Sequence[str] = NEEDS  # what the plugin declares


@dataclass(frozen=True)
class SmallBatch:
    """A generation batch of all ranks, with a group's rows next to each other, as in TRL."""

    rows: tuple[Row, ...]
    setting: Setting = field(default_factory=Setting)
    advantages: str = "row"  # what comes in: one advantage per "row", or another one for each "token"

    def __str__(self) -> str:
        masked = f"live tokens={[list(row.live) for row in self.rows]}, " if any(0 in r.live for r in self.rows) else ""
        return (
            f"lengths={[len(row.live) for row in self.rows]}, groups={[row.group for row in self.rows]}, "
            f"rewards={[round(row.reward, 6) for row in self.rows]}, {masked}"
            f"texts=[{', '.join(shown(''.join(self.pieces(row))) for row in self.rows)}]"
        )

    @property
    def width(self) -> int:
        """`T`, with minimal padding."""
        return max(1, *(len(row.live) for row in self.rows))

    def pieces(self, row: Row) -> Sequence[str]:
        if not self.setting.texts:
            return _written(row.number, len(row.live))
        text = self.setting.texts[row.number % len(self.setting.texts)]
        size = max(1, -(-len(text) // max(len(row.live), 1)))
        return [text[i * size : (i + 1) * size] for i in range(len(row.live))]

    def table(self, what: str, low: float, high: float, width: int | None = None, **how: Any) -> torch.Tensor:
        """A number for each token of each row, `(B, T)`; `how` may have the `padding` and the `dtype`."""
        drawn = [_drawn(f"{what}/{row.number}", low, high, max(len(row.live), 2 * LIMIT)) for row in self.rows]
        cut = [numbers[: len(row.live)] for numbers, row in zip(drawn, self.rows, strict=True)]
        return padded(cut, width or self.width, how.get("padding", 0.0), how.get("dtype", torch.float64))

    def rewards(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each row's reward, its group's number from 0, and its group's mean reward; `(B,)`."""
        places = {group: place for place, group in enumerate(dict.fromkeys(row.group for row in self.rows))}
        rewards_B = torch.tensor([row.reward for row in self.rows], dtype=torch.float64)
        groups_B = torch.tensor([places[row.group] for row in self.rows])
        return rewards_B.to(dtype), groups_B, group_mean(rewards_B, groups_B).to(dtype)

    def totals(self) -> Totals:
        return Totals(
            tokens=sum(sum(row.live) for row in self.rows),
            sequences=len(self.rows),
            prompts=len({row.group for row in self.rows}),
            max_completion_length=max(LIMIT, self.width),
        )

    def step_totals(self, micro_batches: int = 1, processes: int = 1) -> Totals:
        """The same with the counts of an optimizer step that takes all rows."""
        totals = self.totals()
        step = StepTotals(tokens=totals.tokens, sequences=len(self.rows), micro_batches=micro_batches)
        return replace(totals, step=step, micro_batches=micro_batches, processes=processes)

    def mask(self, width: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return padded([row.live for row in self.rows], width or self.width, 0.0, dtype)

    def incoming(self, width: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Advantages `(B, T)`, zero off the mask: the rewards without their group's mean, or others for each token."""
        width = width or self.width
        if self.advantages == "token":
            table_B_T = self.table("advantages", -2.0, 2.0, width, dtype=dtype)
        else:
            rewards_B, _, means_B = self.rewards(torch.float64)
            table_B_T = (rewards_B - means_B).nan_to_num(nan=0.0).to(dtype).unsqueeze(1).expand(-1, width)
        return torch.where(self.mask(width, dtype) > 0, table_B_T, torch.zeros_like(table_B_T))

    def losses(self, width: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return self.table("losses", -2.0, 2.0, width, dtype=dtype)

    def rollout(
        self,
        width: int | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        logps_dtype: torch.dtype | None = None,
        padding: float = 0.0,
        with_advantages: bool = False,
        **overrides: Any,
    ) -> Rollout:
        """The context of `on_rollout`, or of a method that sees the advantages; `padding` is for log-probabilities."""
        width = width or self.width
        rows = self.rows
        setting = self.setting
        needs = setting.needs
        rewards_B, groups_B, means_B = self.rewards(dtype)
        texts = ["".join(self.pieces(row)) for row in rows]
        prompts = setting.prompts or ("What is 2 + 2?",)
        table = functools.partial(self.table, width=width, padding=padding, dtype=logps_dtype or dtype)
        mask_B_T = self.mask(width, dtype)
        completion_mask_B_T = padded([[1.0] * len(row.live) for row in rows], width, 0.0, dtype)
        by_tools = any(0 in row.live and any(row.live) for row in rows)
        settings: dict[str, Any] = {
            "prompts": [prompts[row.group % len(prompts)] for row in rows],
            "completions": texts,
            "columns": {name: [each[row.group % len(each)] for row in rows] for name, each in setting.columns.items()},
            "texts": texts,
            "prompt_ids_B_P": torch.ones(len(rows), 2, dtype=torch.long),
            "prompt_mask_B_P": torch.ones(len(rows), 2, dtype=dtype),
            "completion_ids_B_T": self._ids(width, padding),
            "mask_B_T": mask_B_T,
            "completion_mask_B_T": completion_mask_B_T,
            "tool_mask_B_T": torch.where(completion_mask_B_T > 0, mask_B_T, 1.0) if by_tools else None,
            "truncated_B": torch.tensor([row.truncated for row in rows]),
            "rewards_B_K": torch.tensor([row.rewards for row in rows], dtype=dtype),
            "reward_names": REWARD_NAMES,
            "reward_weights_K": torch.tensor(REWARD_WEIGHTS, dtype=dtype),
            "rewards_B": rewards_B,
            "group_ids_B": groups_B,
            "group_baselines_B": means_B,
            "num_generations": len(rows) // self.totals().prompts,
            "totals": self.totals(),
            "sampling_logps_B_T": table("sampling", *_LOGPS) if "sampling_logps" in needs else None,
            "old_logps_B_T": table("old", *_LOGPS) if "old_logps" in needs else None,
            "old_entropies_B_T": table("old_entropies", 0.01, 3.0) if "old_entropies" in needs else None,
            "ref_logps_B_T": table("ref", *_LOGPS) if "ref_logps" in needs else None,
            "teacher_logps_B_T": {name: table(f"teacher {name}", *_LOGPS) for name in setting.teachers},
            "advantages_B_T": self.incoming(width, dtype) if with_advantages else None,
            "step": 3,
            "tokenizer": setting.tokenizer,
        }
        if "offsets" in needs:
            settings["offsets"] = lambda place: character_offsets(self.pieces(rows[place]))
            settings["turns"] = lambda place: turns_between(
                rows[place].live, self.pieces(rows[place]), [0] if rows[place].number % 2 else []
            )
        parts = {
            REWARD_NAMES[0]: [self._parts(row) for row in rows],
            REWARD_NAMES[1]: [_parts_of_turns(row) for row in rows],
        }
        return with_parts(Rollout(**{**settings, **overrides}), parts)

    def forward(
        self,
        width: int | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        logps_dtype: torch.dtype | None = None,
        padding: float = 0.0,
        **overrides: Any,
    ) -> Forward:
        """The context of `on_forward`, with all rows in one micro-batch. The policy has moved since it generated."""
        table = functools.partial(self.table, width=width, padding=padding, dtype=logps_dtype or dtype)
        old_B_T = table("old", *_LOGPS)
        rewards_B, groups_B, means_B = self.rewards(dtype)
        settings: dict[str, Any] = {
            "old_logps_B_T": old_B_T,
            "ref_logps_B_T": table("ref", *_LOGPS) if "ref_logps" in self.setting.needs else None,
            "completion_ids_B_T": self._ids(width or self.width, padding),
            "rewards_B": rewards_B,
            "group_baselines_B": means_B,
            "zero_variance_B": group_is_equal(rewards_B, groups_B),
            "step": 3,
        }
        logps_B_T = old_B_T + table("moved", -0.1, 0.1)
        entropies_B_T = table("entropies", 0.0, 3.0)
        return make_forward(logps_B_T, entropies_B_T, self.mask(width, dtype), **{**settings, **overrides})

    def _ids(self, width: int, padding: float) -> torch.Tensor:
        ids = [[1 + sum(map(ord, piece)) % 997 for piece in self.pieces(row)] for row in self.rows]
        return padded(ids, width, 7 if padding else 0, torch.long)

    def _parts(self, row: Row) -> Parts | None:
        if math.isnan(row.rewards[0]):
            return None
        start = len("".join(self.pieces(row)[:1]))
        end = len("".join(self.pieces(row)[:2]))
        second = (0.5 * row.number % 1, (start, end) if end > start else None)
        return Parts({"first": (row.rewards[0], (0, start) if start else None), "second": second}, row.rewards[0])


@functools.cache
def _drawn(name: str, low: float, high: float, count: int) -> tuple[float, ...]:
    drawn = random.Random(name)
    return tuple(drawn.uniform(low, high) for _ in range(count))


@functools.cache
def _written(number: int, count: int) -> tuple[str, ...]:
    chosen = random.Random(f"pieces/{number}")
    return tuple(PIECES[0] if place == 0 else chosen.choice(PIECES) for place in range(count))


def _parts_of_turns(row: Row) -> Parts | None:
    """The second function's reward for each turn: a tenth, and the rest for the last."""
    count = len(true_runs([bool(one) for one in row.live]))
    if math.isnan(row.rewards[1]) or not count:
        return None
    values = [*[0.1] * (count - 1), row.rewards[1] - 0.1 * (count - 1)]
    return Parts({f"turn {k}": (value, Place(turn=k)) for k, value in enumerate(values)}, row.rewards[1])


def _batch(
    setting: Setting, groups: int, lives: Sequence[Sequence[int]], rewards: Sequence[float], form: Sequence[float] = ()
) -> SmallBatch:
    """Rows in groups of one size, with what the first function gives each, and the second."""
    size = len(lives) // groups
    rows = []
    for number, (live, reward) in enumerate(zip(lives, rewards, strict=True)):
        second = form[number] if form else round(0.1 * (number % 3), 1)
        rows.append(Row(number, number // size, tuple(live), (reward, second)))
    return SmallBatch(tuple(rows), setting)


def ordinary_batches(setting: Setting) -> list[SmallBatch]:
    """Ordinary batches: rewards that differ, every completion scored and with a token that counts."""
    three_pairs = [(1, 1, 1), (1,), (1, 1), (1, 0, 1, 1, 1), (1, 1, 1, 1), (1, 1)]
    with_tools = [(1, 1, 0, 1), (1, 0, 1, 0, 0, 1, 1), (1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0, 1, 1)]
    three_fours = [(1,) * length for length in (3, 1, 4, 2, 5, 2, 6, 1, 2, 3, 4, 7)]
    return [
        _batch(setting, 3, three_pairs, [1.0, 0.0, 0.25, 1.0, 0.0, 0.5]),
        _batch(setting, 3, three_fours, [1.0, 0.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
        _batch(setting, 2, with_tools, [1.0, 0.0, 0.5, 0.0, 1.0, 0.25]),
    ]


_LIVES = [(1, 1, 1), (1,), (1, 1), (1, 1, 1, 1)]

ALSO_ORDINARY = (
    "a group whose rewards are all equal",
    "a completion without a reward",
    "an empty completion",
    "a completion that is all masked",
)
"""Odd batches that are tried with the ordinary ones, since some plugins only act on them."""


def odd_batches(setting: Setting) -> dict[str, SmallBatch]:
    """Batches that provoke divisions by zero, by what is odd about them."""
    nan = math.nan
    lives: dict[str, list[tuple[int, ...]]] = {
        "one-token completions": [(1,)] * 4,
        "an empty completion": [(1, 1), (), (1,), (1, 1, 1)],
        "a completion that is all masked": [(1, 1), (0, 0, 0), (1,), (1, 1)],
        "a group without a live token": [(0, 0), (), (1,), (1, 1)],
    }
    return {
        "a group whose rewards are all equal": _batch(setting, 2, _LIVES, [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.2, 0.0]),
        "rewards that are all zero": _batch(setting, 2, _LIVES, [0.0] * 4, [0.0] * 4),
        "a completion without a reward": _batch(setting, 2, _LIVES, [1.0, 0.0, 0.5, nan], [0.0, 0.1, 0.2, nan]),
        "completions without a reward": _batch(setting, 2, _LIVES, [nan] * 4, [nan] * 4),
        "one group": _batch(setting, 1, _LIVES, [1.0, 0.0, 0.5, 0.0]),
        "one group of two": _batch(setting, 1, _LIVES[:2], [1.0, 0.0]),  # the smallest that TRL trains on
        **{what: _batch(setting, 2, live, [1.0, 0.0, 0.5, 0.0]) for what, live in lives.items()},
        "a batch whose tokens are all masked": _batch(setting, 1, [(0, 0), (0,)], [1.0, 0.0]),
        "a batch of empty completions": _batch(setting, 1, [(), ()], [1.0, 0.0]),
    }


def equal_rewards(setting: Setting) -> list[SmallBatch]:
    """Batches with equal rewards in a group, at a number without an exact float, so that sums are rounded."""
    lives = [(1,) * length for length in (3, 1, 2, 4, 1, 2, 3, 5, 2, 1, 3, 1, 2, 1)]
    return [
        _batch(setting, 2, lives, [0.3] * 7 + [0.7] * 7, [0.1] * 14),
        _batch(setting, 2, lives[:6], [100.1] * 3 + [0.1] * 3, [0.1] * 6),
    ]


def long_batches(setting: Setting) -> dict[str, SmallBatch]:
    rewards = [1.0, 0.0, 0.5, 0.25]
    return {
        f"completions of up to {n} tokens": _batch(setting, 2, [(1,) * k for k in (n, n // 2, n - 3, 1)], rewards)
        for n in (64, 512, 4096)
    }
