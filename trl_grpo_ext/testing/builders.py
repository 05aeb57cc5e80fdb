"""Build contexts for tests of hooks and aggregations without a trainer, and simulate several ranks in one process.

`make_rollout` and `make_forward` are for unit tests. The kit tries plugins on a `Scene`: a generation batch made from a
few numbers, so that it can be shrunk. A row's tokens, log-probabilities and losses depend only on its number and the
seed. So a row is the same in any batch, order and padding, which most rules rely on.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from ..credit.groups import group_mean
from ..credit.turns import true_runs
from ..errors import PluginOutputError
from ..guard.outcomes import shown
from ..types import NEEDS, Forward, Rollout, Span, StepTotals, ToolCall, Totals, Turn


class UnequalGathers(PluginOutputError):  # noqa: N818
    """One rank called `gather` more often than another; a run would hang."""

    breaks = "gathers"


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

    By default each token wrote one character, `c`, and has the id 1. If `tool_mask_B_T` cuts tokens into turns, each
    turn but the last calls a tool, and the tokens between turns are its answer. There are no log-probabilities. All
    tensors are float64, so that sums by hand agree to the last digits.

    Args:
        lengths: Live tokens of each of the `B` completions.
        rewards: The `B` rewards of a single reward function `r`; NaN for None. Zeros by default.
        groups: The group of each completion; by default one group.
        width: `T`, if not the longest length.
        limit: `max_completion_length`.
        **overrides: Any field of `Rollout`, used unchanged.
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
    rollout = Rollout(**{**settings, **overrides})
    if "turns" in overrides:
        return rollout
    written = [numbers[:length] for numbers, length in zip(rollout.turns_B_T.tolist(), lengths, strict=True)]
    return replace(rollout, turns=lambda row: turns_between([one >= 0 for one in written[row]], rollout.texts[row]))


def turns_between(wrote: Sequence[bool | int], pieces: Sequence[str], failed: Collection[int] = ()) -> list[Turn]:
    """The turns of a completion; each but the last is one tool call, answered by the tokens after it.

    Args:
        wrote: Whether the model wrote each token.
        pieces: What each token wrote.
        failed: Numbers of the turns whose call raised.
    """
    runs, offsets = true_runs([bool(one) for one in wrote]), _offsets(pieces)
    turns = []
    for number, (first, end) in enumerate(runs):
        after = runs[number + 1][0] if number + 1 < len(runs) else len(wrote)
        text, result = "".join(pieces[first:end]), "".join(pieces[end:after])
        outcome = "raised" if number in failed else "returned"
        call = ToolCall(name="tool", arguments={}, outcome=outcome, result=result, tokens=(first, end))
        characters = (offsets[first][0], offsets[end - 1][1])
        turns.append(
            Turn(
                number=number,
                tokens=(first, end),
                text=text,
                characters=characters,
                content=characters,
                calls=[call] if number + 1 < len(runs) else [],
                observation=result,
            )
        )
    return turns


def make_forward(
    logps: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor | None = None, **overrides: Any
) -> Forward:
    """The context of one micro-batch at its loss forward, for a unit test of `on_forward`.

    Args:
        logps: Log-probabilities of the sampled tokens under the policy being trained, `(B, T)`, and by default under
            the policy that generated.
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


def cut(rollout: Rollout, sizes: Sequence[int]) -> list[Rollout]:
    """Split a generation batch over several ranks with `sizes` rows each, for `Ranks`."""
    parts, first = [], 0
    if sum(sizes) != len(rollout.mask_B_T):
        raise ValueError(f"The sizes {list(sizes)} must add up to the {len(rollout.mask_B_T)} rows of the batch.")
    for size in sizes:
        rows = slice(first, first + size)
        of_rows: dict[str, Any] = {}
        for entry in fields(rollout):
            value = getattr(rollout, entry.name)
            of_all_rows = isinstance(value, torch.Tensor) and entry.name != "reward_weights_K"
            if of_all_rows or entry.name in ("prompts", "completions", "texts"):
                of_rows[entry.name] = value[rows]
            elif entry.name in ("columns", "reward_spans", "reward_turns", "teacher_logps_B_T"):
                of_rows[entry.name] = {key: column[rows] for key, column in value.items()}
        of_rows["offsets"] = partial(lambda shift, row: rollout.offsets(shift + row), first)
        of_rows["turns"] = partial(lambda shift, row: rollout.turns(shift + row), first)
        parts.append(replace(rollout, **of_rows))
        first = rows.stop
    return parts


class Ranks:
    """Several ranks in this process, each with its part of a generation batch and a working `gather`.

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
        """Run `call` on each rank and return the results.

        Raises:
            UnequalGathers: The ranks don't gather equally often. (An exception of `call` is raised first.)
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


# ---------------------------------------------------------------------------------------------- scenes

PIECES = ("<think>", "2", "+", "2", "=", "4", "</think>", "<answer>", "4", "</answer>", " so", ".", "\n\n", "sorry ")
REWARD_NAMES = ("right", "form")
REWARD_WEIGHTS = (1.0, 0.5)
LIMIT = 8
_WIDER = 3


@dataclass(frozen=True)
class Row:
    """One completion: its number, its group, which of its tokens count, and its rewards from two functions."""

    number: int
    group: int
    live: tuple[int, ...]
    rewards: tuple[float, float]
    truncated: bool = False

    @property
    def reward(self) -> float:
        """The weighted sum of its rewards; NaN if it has none."""
        said = [(r, w) for r, w in zip(self.rewards, REWARD_WEIGHTS, strict=True) if not math.isnan(r)]
        return sum(r * w for r, w in said) if said else math.nan


@dataclass(frozen=True)
class Setting:
    """The common settings of all batches of one check."""

    seed: int = 0
    texts: tuple[str, ...] | None = None
    prompts: tuple[Any, ...] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tokenizer: Any = None
    teachers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scene:
    """A generation batch of all ranks, with a group's rows next to each other, as in TRL."""

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
        count = max(len(row.live), 2 * LIMIT)
        return list(_drawn(f"{self.setting.seed}/{what}/{row.number}", low, high, count)[: len(row.live)])

    def table(
        self, what: str, low: float, high: float, width: int, *, padding: float = 0.0, dtype: torch.dtype
    ) -> torch.Tensor:
        """Such numbers as `(B, T)`."""
        return padded([self.numbers(row, what, low, high) for row in self.rows], width, padding, dtype)

    @property
    def width(self) -> int:
        """`T`, with minimal padding."""
        return max(1, *(len(row.live) for row in self.rows), 1)

    def baselines(self) -> list[float]:
        """Each row's group's mean reward; NaN if no row has one."""
        means = {}
        for group in {row.group for row in self.rows}:
            scored = [row.reward for row in self.rows if row.group == group and not math.isnan(row.reward)]
            # As in a run: the mean of equal numbers is that number.
            low = min(scored, default=math.nan)
            means[group] = low + sum(reward - low for reward in scored) / max(len(scored), 1)
        return [means[row.group] for row in self.rows]

    def totals(self, **overrides: Any) -> Totals:
        """Counts over all rows."""
        settings: dict[str, Any] = {
            "tokens": sum(sum(row.live) for row in self.rows),
            "sequences": len(self.rows),
            "prompts": len({row.group for row in self.rows}),
            "max_completion_length": max(LIMIT, self.width),
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
        logps_dtype: torch.dtype | None = None,
        padding: float = 0.0,
        padding_id: int = 0,
        aggregation: bool = False,
        **overrides: Any,
    ) -> Rollout:
        """The context of `on_rollout`, or with `aggregation` that of `weights`.

        Args:
            width: `T`.
            needs: The log-probabilities and offsets that are there.
            dtype: That of every float tensor,
            logps_dtype: but of log-probabilities and entropies where it is given.
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
        scored = logps_dtype or dtype
        logps = partial(self.table, low=-3.0, high=-0.01, width=width, padding=padding, dtype=scored)
        entropies = partial(self.table, low=0.01, high=3.0, width=width, padding=padding, dtype=scored)
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
            "reward_turns": {REWARD_NAMES[1]: [_turn_values(row) for row in rows]},
            "group_ids_B": torch.tensor([groups[row.group] for row in rows]),
            "group_baselines_B": torch.tensor(self.baselines(), dtype=dtype),
            "num_generations": len(rows) // len(groups),
            "totals": self.totals(),
            "sampling_logps_B_T": logps("sampling") if "sampling_logps" in needs else None,
            "old_logps_B_T": logps("old") if "old_logps" in needs else None,
            "old_entropies_B_T": entropies("old_entropies") if "old_entropies" in needs else None,
            "ref_logps_B_T": logps("ref") if "ref_logps" in needs else None,
            "teacher_logps_B_T": _Teachers(logps, setting.teachers, any_other=tuple(needs) == NEEDS),
            "advantages_B_T": self.incoming(width, dtype) if aggregation else None,
            "step": 3,
            "tokenizer": setting.tokenizer,
        }
        if "offsets" in needs:
            settings["offsets"] = lambda row: _offsets(self.pieces(rows[row]))
            settings["turns"] = lambda row: turns_between(
                rows[row].live, self.pieces(rows[row]), [0] if rows[row].number % 2 else []
            )
        return Rollout(**{**settings, **overrides})

    def forward(
        self,
        width: int | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        logps_dtype: torch.dtype | None = None,
        padding: float = 0.0,
        padding_id: int = 0,
        ref: bool = True,
        **overrides: Any,
    ) -> Forward:
        """The context of `on_forward`, with all rows in one micro-batch. The policy has moved since it generated."""
        width, rows = width or self.width, self.rows
        logps = partial(self.table, width=width, padding=padding, dtype=logps_dtype or dtype)
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
        """Smaller scenes, the greatest steps first: without a group, a row of each group, a token, a reward."""
        groups = list(dict.fromkeys(row.group for row in self.rows))
        for group in groups if len(groups) > 1 else ():
            yield replace(self, rows=tuple(row for row in self.rows if row.group != group))
        size = len(self.rows) // len(groups)
        for place in range(size) if size > 2 else ():
            gone = {id([row for row in self.rows if row.group == group][place]) for group in groups}
            yield replace(self, rows=tuple(row for row in self.rows if id(row) not in gone))
        for place, row in enumerate(self.rows):
            for cut in dict.fromkeys((len(row.live) // 2, 1) if len(row.live) > 2 * LIMIT else (1,)):
                if row.live:
                    yield self._with(place, replace(row, live=row.live[:-cut]))
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
def _drawn(name: str, low: float, high: float, count: int) -> tuple[float, ...]:
    drawn = random.Random(name)
    return tuple(drawn.uniform(low, high) for _ in range(count))


def _turn_values(row: Row) -> list[float] | None:
    """The second function's reward for each turn: a tenth, and the rest for the last."""
    count = len(true_runs([bool(one) for one in row.live]))
    if math.isnan(row.rewards[1]) or not count:
        return None
    return [*[0.1] * (count - 1), row.rewards[1] - 0.1 * (count - 1)]


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


def ordinary_batches(setting: Setting) -> list[Scene]:
    """Ordinary batches: rewards that differ, every completion scored and with a token that counts."""
    three_pairs = [(1, 1, 1), (1,), (1, 1), (1, 0, 1, 1, 1), (1, 1, 1, 1), (1, 1)]
    with_tools = [(1, 1, 0, 1), (1, 0, 1, 0, 0, 1, 1), (1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0, 1, 1)]
    three_fours = [(1,) * length for length in (3, 1, 4, 2, 5, 2, 6, 1, 2, 3, 4, 7)]
    return [
        _scene(setting, 3, three_pairs, [1.0, 0.0, 0.25, 1.0, 0.0, 0.5]),
        _scene(setting, 3, three_fours, [1.0, 0.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
        _scene(setting, 2, with_tools, [1.0, 0.0, 0.5, 0.0, 1.0, 0.25]),
    ]


def odd_batches(setting: Setting) -> dict[str, Scene]:
    """Batches that provoke divisions by zero, by what is odd about them."""
    lives = [(1, 1, 1), (1,), (1, 1), (1, 1, 1, 1)]
    nan = math.nan
    return {
        "a group whose rewards are all equal": _scored(
            _scene(setting, 2, lives, [1.0, 1.0, 0.0, 1.0]), (0, 1), (1.0, 0.0)
        ),
        "rewards that are all zero": _scored(_scene(setting, 2, lives, [0.0] * 4), range(4), (0.0, 0.0)),
        "one-token completions": _scene(setting, 2, [(1,)] * 4, [1.0, 0.0, 0.5, 0.0]),
        "a completion without a reward": _scored(_scene(setting, 2, lives, [1.0, 0.0, 0.5, 1.0]), (3,), (nan, nan)),
        "completions without a reward": _scored(_scene(setting, 2, lives, [nan] * 4), range(4), (nan, nan)),
        "one group": _scene(setting, 1, lives, [1.0, 0.0, 0.5, 0.0]),
        "one group of two": _scene(setting, 1, lives[:2], [1.0, 0.0]),  # the smallest that TRL trains on
    }


def equal_rewards(setting: Setting) -> list[Scene]:
    """Batches with equal rewards in a group, at a number without an exact float, so that sums are rounded."""
    lives = [(1,) * length for length in (3, 1, 2, 4, 1, 2, 3, 5, 2, 1, 3, 1, 2, 1)]
    scenes = [_scene(setting, 2, lives, [0.3] * 7 + [0.7] * 7), _scene(setting, 2, lives[:6], [100.1] * 3 + [0.1] * 3)]
    return [_scored(scene, range(len(scene.rows)), None) for scene in scenes]


def with_empty_rows(setting: Setting) -> dict[str, Scene]:
    """Batches in which some completions have tokens that count and others have none."""
    return {
        "an empty completion": _scene(setting, 2, [(1, 1), (), (1,), (1, 1, 1)], [1.0, 0.0, 0.5, 0.0]),
        "a completion that is all masked": _scene(setting, 2, [(1, 1), (0, 0, 0), (1,), (1, 1)], [1.0, 0.0, 0.5, 0.0]),
        "a group without a live token": _scene(setting, 2, [(0, 0), (), (1,), (1, 1)], [1.0, 0.0, 0.5, 0.0]),
    }


def odd_beside_ordinary(setting: Setting) -> list[Scene]:
    """Odd batches that are tried with the ordinary ones, since some plugins only act on them."""
    some, empty = odd_batches(setting), with_empty_rows(setting)
    return [
        some["a group whose rewards are all equal"],
        some["a completion without a reward"],
        empty["an empty completion"],
        empty["a completion that is all masked"],
    ]


def dead_batches(setting: Setting) -> dict[str, Scene]:
    """Batches without any token that counts."""
    return {
        "a batch whose tokens are all masked": _scene(setting, 1, [(0, 0), (0,)], [1.0, 0.0]),
        "a batch of empty completions": _scene(setting, 1, [(), ()], [1.0, 0.0]),
    }


LONG = (64, 512, 4096)
"""Tokens of long completions."""


def long_batches(setting: Setting) -> dict[str, Scene]:
    """Batches of long and short completions."""
    lengths = {length: (length, length // 2, length - 3, 1) for length in LONG}
    return {
        f"completions of up to {length} tokens": _scene(
            setting, 2, [(1,) * count for count in counts], [1.0, 0.0, 0.5, 0.25]
        )
        for length, counts in lengths.items()
    }


def negative_batch(setting: Setting) -> Scene:
    """A batch with negative rewards."""
    return _scene(setting, 2, [(1, 1), (1,), (1, 1, 1), (1,)], [-1.0, -2.0, 0.5, -0.5])


def _scored(scene: Scene, places: Collection[int], rewards: tuple[float, float] | None) -> Scene:
    """Give the rows at some places these rewards; with None what the first function gave, and 0.1."""
    rows = tuple(
        replace(row, rewards=rewards or (row.rewards[0], 0.1)) if place in places else row
        for place, row in enumerate(scene.rows)
    )
    return replace(scene, rows=rows)


def wider_width(scene: Scene) -> int:
    """A width with surplus padding."""
    return scene.width + _WIDER
