"""Generation batches to try hooks and aggregations on: made from a few numbers, so that they can be made smaller.

A row's tokens, log-probabilities and losses follow from its number and the seed alone. So a row is the same row in
whatever batch, order and padding it stands, which is what most of the rules are about.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..guard.outcomes import shown
from ..types import NEEDS, Forward, Rollout, Span, StepTotals, Totals

PIECES = ("<think>", "2", "+", "2", "=", "4", "</think>", "<answer>", "4", "</answer>", " so", ".", "\n\n", "sorry ")
REWARD_NAMES = ("right", "form")
REWARD_WEIGHTS = (1.0, 0.5)
LIMIT = 8
_WIDER = 3


@dataclass(frozen=True)
class Row:
    """One completion: its number, its group, which of its tokens count, and what two functions gave it."""

    number: int
    group: int
    live: tuple[int, ...]
    rewards: tuple[float, float]
    truncated: bool = False

    @property
    def reward(self) -> float:
        """The weighted sum of those that said something; NaN where none did."""
        said = [(r, w) for r, w in zip(self.rewards, REWARD_WEIGHTS, strict=True) if not math.isnan(r)]
        return sum(r * w for r, w in said) if said else math.nan


@dataclass(frozen=True)
class Setting:
    """What is the same for all batches of one check."""

    seed: int = 0
    texts: tuple[str, ...] | None = None
    prompts: tuple[Any, ...] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tokenizer: Any = None
    teachers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scene:
    """A generation batch of all ranks, rows of one group side by side as in TRL."""

    rows: tuple[Row, ...]
    setting: Setting = field(default_factory=Setting)
    advantages: str = "row"
    """What comes in: one advantage per "row", or another one for each "token"."""

    def __str__(self) -> str:
        lengths = [len(row.live) for row in self.rows]
        parts = [f"lengths={lengths}", f"groups={[row.group for row in self.rows]}"]
        parts.append(f"rewards={[round(row.reward, 6) for row in self.rows]}")
        if any(0 in row.live for row in self.rows):
            parts.append(f"live tokens={[list(row.live) for row in self.rows]}")
        parts.append(f"texts=[{', '.join(shown(''.join(self.pieces(row))) for row in self.rows)}]")
        return ", ".join(parts)

    def pieces(self, row: Row) -> list[str]:
        """What each of a row's tokens wrote."""
        if self.setting.texts:
            text = self.setting.texts[row.number % len(self.setting.texts)]
            size = max(1, -(-len(text) // max(len(row.live), 1)))
            return [text[i * size : (i + 1) * size] for i in range(len(row.live))]
        chosen = random.Random(f"{self.setting.seed}/pieces/{row.number}")
        return [PIECES[0] if i == 0 else chosen.choice(PIECES) for i in range(len(row.live))]

    def ids(self, row: Row) -> list[int]:
        """A row's token ids, from 1 on."""
        pieces = self.pieces(row)
        if self.setting.texts:
            return [1 + sum(map(ord, piece)) % 997 for piece in pieces]
        return [1 + PIECES.index(piece) for piece in pieces]

    def numbers(self, row: Row, what: str, low: float, high: float) -> list[float]:
        """A number for each token of a row."""
        return list(_drawn(f"{self.setting.seed}/{what}/{row.number}", low, high)[: len(row.live)])

    def table(
        self, what: str, low: float, high: float, width: int, *, padding: float = 0.0, dtype: torch.dtype
    ) -> torch.Tensor:
        """Such numbers as `(B, T)`."""
        return padded([self.numbers(row, what, low, high) for row in self.rows], width, padding, dtype)

    @property
    def width(self) -> int:
        """`T`, without more padding than there must be."""
        return max(1, *(len(row.live) for row in self.rows), 1)

    def baselines(self) -> list[float]:
        """Each row's group's mean reward; NaN where nobody has one."""
        means = {}
        for group in {row.group for row in self.rows}:
            scored = [row.reward for row in self.rows if row.group == group and not math.isnan(row.reward)]
            means[group] = sum(scored) / len(scored) if scored else math.nan
        return [means[row.group] for row in self.rows]

    def totals(self, **overrides: Any) -> Totals:
        """Counts over all rows."""
        settings: dict[str, Any] = {
            "tokens": sum(sum(row.live) for row in self.rows),
            "sequences": len(self.rows),
            "prompts": len({row.group for row in self.rows}),
            "max_completion_length": LIMIT,
        }
        return Totals(**{**settings, **overrides})

    def step_totals(self, micro_batches: int = 1, processes: int = 1) -> Totals:
        """The same with the counts of an optimizer step that takes all rows."""
        step = StepTotals(
            tokens=sum(sum(row.live) for row in self.rows), sequences=len(self.rows), micro_batches=micro_batches
        )
        return self.totals(step=step, micro_batches=micro_batches, processes=processes)

    def mask(self, width: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The loss mask `(B, T)`."""
        return padded([row.live for row in self.rows], width or self.width, 0.0, dtype)

    def incoming(self, width: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Advantages `(B, T)`, zero off the mask: the rewards without their group's mean, or others for each token."""
        width = width or self.width
        if self.advantages == "token":
            table_B_T = self.table("advantages", -2.0, 2.0, width, dtype=dtype)
        else:
            pairs = zip(self.rows, self.baselines(), strict=True)
            each = [0.0 if math.isnan(row.reward) else row.reward - mean for row, mean in pairs]
            table_B_T = torch.tensor(each, dtype=dtype).unsqueeze(1).expand(-1, width)
        return torch.where(self.mask(width, dtype) > 0, table_B_T, torch.zeros_like(table_B_T))

    def losses(self, width: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Per-token losses `(B, T)` of either sign."""
        return self.table("losses", -2.0, 2.0, width or self.width, dtype=dtype)

    def rollout(
        self,
        width: int | None = None,
        *,
        needs: Sequence[str] = NEEDS,
        dtype: torch.dtype = torch.float64,
        padding: float = 0.0,
        padding_id: int = 0,
        aggregation: bool = False,
        **overrides: Any,
    ) -> Rollout:
        """The context of `on_rollout`, or with `aggregation` that of `weights`.

        Args:
            width: `T`.
            needs: The log-probabilities and offsets that are there.
            dtype: That of every float tensor.
            padding: What stands where no token is, in log-probabilities.
            padding_id: What stands there in the token ids.
            aggregation: Whether the advantages are in it.
            **overrides: Fields of `Rollout`.
        """
        width, rows, setting = width or self.width, self.rows, self.setting
        groups = {group: place for place, group in enumerate(dict.fromkeys(row.group for row in rows))}
        texts = ["".join(self.pieces(row)) for row in rows]
        prompts = setting.prompts or ("What is 2 + 2?",)
        written = [[1.0] * len(row.live) for row in rows]
        logps = functools.partial(self.table, low=-3.0, high=-0.01, width=width, padding=padding, dtype=dtype)
        rewards_B = torch.tensor([row.reward for row in rows], dtype=dtype)
        completion_mask_B_T = padded(written, width, 0.0, dtype)
        mask_B_T = self.mask(width, dtype)
        by_tools = any(0 in row.live and any(row.live) for row in rows)
        settings: dict[str, Any] = {
            "prompts": [prompts[row.group % len(prompts)] for row in rows],
            "completions": texts,
            "columns": {
                key: [values[row.group % len(values)] for row in rows] for key, values in setting.columns.items()
            },
            "texts": texts,
            "prompt_ids_B_P": torch.ones(len(rows), 2, dtype=torch.long),
            "prompt_mask_B_P": torch.ones(len(rows), 2, dtype=dtype),
            "completion_ids_B_T": padded([self.ids(row) for row in rows], width, padding_id, torch.long),
            "mask_B_T": mask_B_T,
            "completion_mask_B_T": completion_mask_B_T,
            "tool_mask_B_T": torch.where(completion_mask_B_T > 0, mask_B_T, 1.0) if by_tools else None,
            "truncated_B": torch.tensor([row.truncated for row in rows]),
            "rewards_B_K": torch.tensor([row.rewards for row in rows], dtype=dtype),
            "reward_names": REWARD_NAMES,
            "reward_weights_K": torch.tensor(REWARD_WEIGHTS, dtype=dtype),
            "rewards_B": rewards_B,
            "reward_spans": {REWARD_NAMES[0]: [self._spans(row) for row in rows]},
            "group_ids_B": torch.tensor([groups[row.group] for row in rows]),
            "group_baselines_B": torch.tensor(self.baselines(), dtype=dtype),
            "num_generations": len(rows) // len(groups),
            "totals": self.totals(),
            "sampling_logps_B_T": logps("sampling") if "sampling_logps" in needs else None,
            "old_logps_B_T": logps("old") if "old_logps" in needs else None,
            "ref_logps_B_T": logps("ref") if "ref_logps" in needs else None,
            "teacher_logps_B_T": _Teachers(logps, setting.teachers, any_other=tuple(needs) == NEEDS),
            "advantages_B_T": self.incoming(width, dtype) if aggregation else None,
            "step": 3,
            "tokenizer": setting.tokenizer,
        }
        if "offsets" in needs:
            settings["offsets"] = lambda row: _offsets(self.pieces(rows[row]))
        return Rollout(**{**settings, **overrides})

    def forward(
        self,
        width: int | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        padding: float = 0.0,
        padding_id: int = 0,
        ref: bool = True,
        **overrides: Any,
    ) -> Forward:
        """The context of `on_forward`, with all rows in one micro-batch. The policy has moved since it generated."""
        width, rows = width or self.width, self.rows
        logps = functools.partial(self.table, width=width, padding=padding, dtype=dtype)
        old_B_T = logps("old", -3.0, -0.01)
        by_group: dict[int, list[float]] = {}
        for row in rows:
            by_group.setdefault(row.group, []).extend([] if math.isnan(row.reward) else [row.reward])
        settings: dict[str, Any] = {
            "logps_B_T": old_B_T + logps("moved", -0.1, 0.1),
            "entropies_B_T": logps("entropies", 0.0, 3.0),
            "old_logps_B_T": old_B_T,
            "mask_B_T": self.mask(width, dtype),
            "ref_logps_B_T": logps("ref", -3.0, -0.01) if ref else None,
            "completion_ids_B_T": padded([self.ids(row) for row in rows], width, padding_id, torch.long),
            "rewards_B": torch.tensor([row.reward for row in rows], dtype=dtype),
            "group_baselines_B": torch.tensor(self.baselines(), dtype=dtype),
            "zero_variance_B": torch.tensor([len({*by_group[row.group]}) < 2 for row in rows]),
            "step": 3,
        }
        return Forward(**{**settings, **overrides})

    def smaller(self) -> Iterator[Scene]:
        """The scene with less in it, the greatest steps first: a group, a row of each group, a token, a reward."""
        groups = list(dict.fromkeys(row.group for row in self.rows))
        for group in groups if len(groups) > 1 else ():
            yield replace(self, rows=tuple(row for row in self.rows if row.group != group))
        size = len(self.rows) // len(groups)
        for place in range(size) if size > 2 else ():
            gone = {id([row for row in self.rows if row.group == group][place]) for group in groups}
            yield replace(self, rows=tuple(row for row in self.rows if id(row) not in gone))
        for place, row in enumerate(self.rows):
            if row.live:
                yield self._with(place, replace(row, live=row.live[:-1]))
        for place, row in enumerate(self.rows):
            simple = tuple(1.0 if reward > 0 else 0.0 for reward in row.rewards)
            if simple != row.rewards and not any(map(math.isnan, row.rewards)):
                yield self._with(place, replace(row, rewards=(simple[0], simple[1])))

    def _with(self, place: int, row: Row) -> Scene:
        return replace(self, rows=(*self.rows[:place], row, *self.rows[place + 1 :]))

    def _spans(self, row: Row) -> list[Span] | None:
        """What the first function says of characters: its reward belongs to those of the first two tokens."""
        if math.isnan(row.rewards[0]):
            return None
        end = len("".join(self.pieces(row)[:2]))
        return [(0, end, row.rewards[0])] if end else []


class _Teachers(dict[str, torch.Tensor]):
    def __init__(self, logps: Any, names: Sequence[str], any_other: bool) -> None:
        super().__init__({name: logps(f"teacher {name}") for name in names})
        self._logps, self._any_other = logps, any_other

    def __missing__(self, name: str) -> torch.Tensor:
        if not self._any_other:
            raise KeyError(name)
        table_B_T: torch.Tensor = self._logps(f"teacher {name}")
        return table_B_T


def padded(rows: Sequence[Sequence[float]], width: int, padding: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows of numbers as one tensor `(B, T)`."""
    return torch.tensor([[*row, *([padding] * (width - len(row)))] for row in rows], dtype=dtype)


@functools.cache
def _drawn(name: str, low: float, high: float) -> tuple[float, ...]:
    drawn = random.Random(name)
    return tuple(drawn.uniform(low, high) for _ in range(2 * LIMIT))


def _offsets(pieces: Sequence[str]) -> list[tuple[int, int]]:
    ends, offsets = 0, []
    for piece in pieces:
        offsets.append((ends, ends + len(piece)))
        ends += len(piece)
    return offsets


def _scene(
    setting: Setting, groups: int, lives: Sequence[Sequence[int]], rewards: Sequence[float], **kwargs: Any
) -> Scene:
    size = len(lives) // groups
    rows = [
        Row(number, number // size, tuple(live), (reward, round(0.1 * (number % 3), 1)), truncated=number % 3 == 2)
        for number, (live, reward) in enumerate(zip(lives, rewards, strict=True))
    ]
    return Scene(tuple(rows), setting, **kwargs)


def ordinary(setting: Setting) -> list[Scene]:
    """Batches as they come: rewards that differ, every completion scored and with a token that counts."""
    three_pairs = [(1, 1, 1), (1,), (1, 1), (1, 0, 1, 1, 1), (1, 1, 1, 1), (1, 1)]
    three_fours = [(1,) * length for length in (3, 1, 4, 2, 5, 2, 6, 1, 2, 3, 4, 7)]
    return [
        _scene(setting, 3, three_pairs, [1.0, 0.0, 0.25, 1.0, 0.0, 0.5]),
        _scene(setting, 3, three_fours, [1.0, 0.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
    ]


def odd(setting: Setting) -> dict[str, Scene]:
    """Batches on which divisions by zero happen, by what is odd about them."""
    lives = [(1, 1, 1), (1,), (1, 1), (1, 1, 1, 1)]
    nan = math.nan
    unscored = _scene(setting, 2, lives, [nan] * 4)
    return {
        "a group whose rewards are all equal": _equal(_scene(setting, 2, lives, [1.0, 1.0, 0.0, 1.0]), 0, (1.0, 0.0)),
        "rewards that are all zero": _equal(_scene(setting, 2, lives, [0.0] * 4), None, (0.0, 0.0)),
        "one-token completions": _scene(setting, 2, [(1,)] * 4, [1.0, 0.0, 0.5, 0.0]),
        "a completion without a reward": _equal(_scene(setting, 2, lives, [1.0, 0.0, 0.5, 1.0]), 3, (nan, nan)),
        "completions without a reward": replace(
            unscored, rows=tuple(replace(row, rewards=(nan, nan)) for row in unscored.rows)
        ),
    }


def with_empty_rows(setting: Setting) -> dict[str, Scene]:
    """Batches in which some completion has no token that counts, beside others that have."""
    return {
        "an empty completion": _scene(setting, 2, [(1, 1), (), (1,), (1, 1, 1)], [1.0, 0.0, 0.5, 0.0]),
        "a completion that is all masked": _scene(setting, 2, [(1, 1), (0, 0, 0), (1,), (1, 1)], [1.0, 0.0, 0.5, 0.0]),
        "a group without a live token": _scene(setting, 2, [(0, 0), (), (1,), (1, 1)], [1.0, 0.0, 0.5, 0.0]),
    }


def odd_beside_ordinary(setting: Setting) -> list[Scene]:
    """Those of the odd batches that are tried with the ordinary ones, since some plugins act on them alone."""
    some, empty = odd(setting), with_empty_rows(setting)
    return [
        some["a group whose rewards are all equal"],
        some["a completion without a reward"],
        empty["an empty completion"],
        empty["a completion that is all masked"],
    ]


def nothing_live(setting: Setting) -> dict[str, Scene]:
    """Batches without any token that counts."""
    return {
        "a batch whose tokens are all masked": _scene(setting, 1, [(0, 0), (0,)], [1.0, 0.0]),
        "a batch of empty completions": _scene(setting, 1, [(), ()], [1.0, 0.0]),
    }


def negative(setting: Setting) -> Scene:
    """A batch with negative rewards."""
    return _scene(setting, 2, [(1, 1), (1,), (1, 1, 1), (1,)], [-1.0, -2.0, 0.5, -0.5])


def _equal(scene: Scene, which: int | None, rewards: tuple[float, float]) -> Scene:
    """Give one group (a row where `which` is 3), or all, these rewards."""
    if which == 3:
        return replace(scene, rows=(*scene.rows[:3], replace(scene.rows[3], rewards=rewards)))
    return replace(
        scene,
        rows=tuple(replace(row, rewards=rewards) if which in (None, row.group) else row for row in scene.rows),
    )


def wider(scene: Scene) -> int:
    """A width with more padding than there must be."""
    return scene.width + _WIDER
