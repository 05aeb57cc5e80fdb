"""What the checks of hooks, aggregations, filters and token losses share; they are tried on small batches.

The flow itself (`credit.flow`) checks what a run enforces: its errors name a part of the contract, and that part's rule
reports them. Other rules skip batches on which the flow refuses the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..errors import PluginOutputError
from ..types import Rollout
from .batches import Setting, SmallBatch, long_batches, odd_batches, odd_beside_ordinary, ordinary_batches
from .builders import Ranks, cut
from .rules import Broken, Checks, NotChecked, describe_exception, fresh_copy, pickle_round_trip

PADDING = 3
"""Columns of surplus padding to try."""

RELATIVE = 1e-5
ABSOLUTE = 1e-6
"""Tolerances for numbers that should be equal, since a plugin may compute in float32."""

_ORDER = ("", "gathers", "inputs", "shape", "gradient", "finite", "non_negative", "mask", "groups", "rows", "silent")
"""The parts of the contract in the order in which the flow looks at them: a refusal for one says that those before it
are kept. The first stands for an exception of the plugin's own."""

Results = list[tuple[str, torch.Tensor]]
"""What the flow makes of each method's answer, `(B, T)` and zero off the mask, with the method's name."""


class TensorChecks(Checks, ABC):
    """The checks of one plugin on small batches. Each public method checks the rule of its name."""

    prefix: str
    """The prefix of its rules' names."""

    garbage: tuple[float, ...] = (1e4, float("nan"))
    """Values to put off the mask."""

    stray = 1e-2
    """How far sums of thousands of tokens in float32 may be off, relatively."""

    def __init__(self, plugin: Any, setting: Setting) -> None:
        self.plugin = plugin
        self.setting = setting
        self.ordinary = ordinary_batches(setting)
        self.odd = odd_beside_ordinary(setting)
        self.varied = [*self.ordinary, *self.odd]
        self._copyable = fresh_copy(plugin) is not None

    @abstractmethod
    def _results(self, batch: SmallBatch, *, plugin: Any = None, **how: Any) -> Results:
        """The results of a copy of the plugin, or of another one; `how` is for `SmallBatch.rollout`."""

    def _rollout(self, batch: SmallBatch, **settings: Any) -> Rollout:
        """The context of a method that sees the whole generation batch."""
        return batch.rollout(aggregation=True, **settings)

    @abstractmethod
    def _result_on_rank(self, batch: SmallBatch, rollout: Rollout) -> torch.Tensor:
        """The flow's result for that method's answer on one rank, which has some of the rows."""

    def _copy(self, plugin: Any = None) -> Any:
        """A copy with the state of now; the plugin itself if it cannot be copied, and then no results are compared."""
        plugin = self.plugin if plugin is None else plugin
        return fresh_copy(plugin) if self._copyable else plugin

    def _reported_by(self, error: BaseException, tried: Any, breaks: str) -> str | None:
        """A refusal by the flow is for the rule of its part, and the plugin's own exception for all but odd batches."""
        part = (error.breaks or "") if isinstance(error, PluginOutputError) else ""
        if part in (breaks, "") and (part or not any(tried is odd for odd in self.odd)):
            return None
        kept = not part or (breaks and _ORDER.index(part) > _ORDER.index(breaks))
        return "" if kept else f"{self.prefix}.{part}"

    def _agree(self, ours: Results, theirs: Results, what: str, at: SmallBatch, exactly: bool = False) -> None:
        for (method, one_B_T), (_, other_B_T) in zip(ours, theirs, strict=True):
            width = one_B_T.size(1)
            compare(one_B_T, other_B_T[:, :width], f"{method}, {what}", at, at.mask(width), exactly=exactly)

    def _comparable_only(self) -> None:
        """Leave a rule out that compares two results, where they may differ for another reason."""
        self._deterministic_only()
        if not self._copyable:  # each trial changes it for the next
            raise NotChecked(f"{self.prefix}.pickle is broken: it cannot be copied, so its results are not compared")

    def run(self) -> None:
        self._over(self.ordinary, self._results)

    def shape(self) -> None:
        single = [replace(batch, rows=batch.rows[:2]) for batch in self.ordinary]
        self._over([*self.ordinary, *single], self._results, breaks="shape")

    def inputs(self) -> None:
        self._over(self.varied, self._results, breaks="inputs")

    def finite(self) -> None:
        self._over(self.ordinary, self._results, breaks="finite")
        for what, batch in odd_batches(self.setting).items():
            self._over([batch], self._results, what, "finite")

    def padding(self) -> None:
        self._comparable_only()

        def judge(batch: SmallBatch) -> None:
            plain = self._results(batch)
            for off in (0.0, *self.garbage):
                what = f"without padding and with {PADDING} columns of it, with {off:g} off the mask"
                try:
                    padded = self._results(batch, width=batch.width + PADDING, padding=off)
                except PluginOutputError as error:
                    if off == 0.0:
                        raise
                    raise Broken(f"{what}: {describe_exception(error)}", batch) from error
                self._agree(plain, padded, what, batch)

        self._over(self.varied, judge)

    def _permuted(self, order_of: Callable[[SmallBatch], list[int]], what: str) -> None:
        """The rows in another order."""
        self._comparable_only()

        def judge(batch: SmallBatch) -> None:
            order = order_of(batch)
            other = replace(batch, rows=tuple(batch.rows[place] for place in order))
            plain = [(method, result_B_T[order]) for method, result_B_T in self._results(batch)]
            self._agree(plain, self._results(other), what, other)

        self._over(self.varied, judge)

    def _on_one_rank_and_on_several(self) -> None:
        self._comparable_only()

        def judge(batch: SmallBatch) -> None:
            ((_, whole_B_T), *_) = self._results(batch)
            for count, parts_B_T in self._on_ranks(batch):
                each = len(batch.rows) // count
                what = f"on one rank and on {count} ranks ({each} row{'s' * (each != 1)} each)"
                compare(whole_B_T, parts_B_T, what, batch, batch.mask())

        self._over(self.varied, judge)

    def _on_ranks(self, batch: SmallBatch) -> Iterator[tuple[int, torch.Tensor]]:
        """The result on two and on three ranks, if the rows can be split evenly, and with one row on each."""
        for count in dict.fromkeys((2, 3, len(batch.rows))):
            if len(batch.rows) % count or count > 6:
                continue
            totals = replace(batch.totals(), processes=count)
            ranks = Ranks(cut(self._rollout(batch, totals=totals), [len(batch.rows) // count] * count))
            yield count, torch.cat(ranks.run(lambda rollout: self._result_on_rank(batch, rollout)))

    def gathers(self) -> None:
        self._over(self.varied, lambda batch: list(self._on_ranks(batch)), breaks="gathers")

    def long(self) -> None:
        def judge(batch: SmallBatch) -> None:
            exact = self._results(batch)
            rounded = self._results(batch, dtype=torch.float32)
            if not self.deterministic or not self._copyable:
                return
            for (method, exact_B_T), (_, rounded_B_T) in zip(exact, rounded, strict=True):
                error_B_T = (exact_B_T - rounded_B_T.double()).abs()
                size = float(exact_B_T.abs().max())
                if bool((error_B_T > self.stray * size + ABSOLUTE).any()):
                    place = (error_B_T == error_B_T.max()).nonzero()[0].tolist()
                    raise Broken(f"{method}, in float64 and in float32: {_both(exact_B_T, rounded_B_T, place)}", batch)
                if size and not bool(rounded_B_T.any()):
                    raise Broken(f"{method}: in float32 nothing is left of {number(size)}", batch)

        for what, long in long_batches(self.setting).items():
            self._over([long], judge, what, "finite")

    def dtype(self) -> None:
        def judge(batch: SmallBatch) -> None:
            for dtype in (torch.bfloat16, torch.float16):
                self._results(batch, dtype=torch.float32, logps_dtype=dtype)

        self._over(self.ordinary, judge, "with log-probabilities in bfloat16 and float16", "shape")

    def determinism(self) -> None:
        self._comparable_only()

        def judge(batch: SmallBatch) -> None:
            self._agree(self._results(batch), self._results(batch), "once and again", batch, exactly=True)

        self._over(self.varied, judge)

    def pickle(self) -> None:
        again = pickle_round_trip(self.plugin)

        def judge(batch: SmallBatch) -> None:
            theirs = self._results(batch, plugin=again)
            self._agree(self._results(batch), theirs, "before and after pickling", batch)

        if self.deterministic:
            self._over(self.ordinary, judge)


def compare(
    ours: torch.Tensor, theirs: torch.Tensor, what: str, example: object, live: torch.Tensor, *, exactly: bool = False
) -> None:
    """Compare two tensors `(B, T)` where `live` is not zero; `what` names the two, as in "with padding and without"."""
    relative = 0.0 if exactly else RELATIVE
    absolute = 0.0 if exactly else ABSOLUTE
    close = torch.isclose(ours, theirs, rtol=relative, atol=absolute, equal_nan=True) | (live == 0)
    if not bool(close.all()):
        place = (~close).nonzero()[0].tolist()
        raise Broken(f"{what}: {_both(ours, theirs, place, 17 if exactly else 6)}", example)


def _both(ours: torch.Tensor, theirs: torch.Tensor, place: list[int], digits: int = 6) -> str:
    row, token = place
    values = [number(table[row, token], digits) for table in (ours, theirs)]
    return f"{' and '.join(values)} at row {row}, token {token}"


def compare_numbers(ours: float, theirs: float, what: str, example: object) -> None:
    """The same of two numbers."""
    if not abs(ours - theirs) <= ABSOLUTE + RELATIVE * abs(theirs):
        raise Broken(f"{what}: {number(ours)} and {number(theirs)}", example)


def number(value: torch.Tensor | float, digits: int = 6) -> str:
    """A number for a message."""
    return f"{float(value):.{digits}g}"
