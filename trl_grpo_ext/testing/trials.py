"""Try hooks and aggregations on small generation batches: rules common to both kinds, and how they are judged.

The flow itself (`credit.flow`) checks what a run enforces: its errors name a part of the contract, and that part's rule
reports them. Other rules skip batches on which the flow refuses the result.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import PluginOutputError
from ..types import Rollout
from .builders import Ranks, Scene, Setting, cut, long_batches, odd_beside_ordinary, ordinary_batches, wider_width
from .collectives import collectives_of_ranks, describe_difference, mentions_collectives
from .rules import Broken, Checks, NotChecked, cause_of, describe_exception, pickle_round_trip

RELATIVE, ABSOLUTE = 1e-5, 1e-6
"""Tolerances for numbers that should be equal, since a plugin may compute in float32."""


_ORDER = ("gathers", "inputs", "shape", "gradient", "finite", "non_negative", "mask", "groups")
"""The parts of the contract in the order in which the flow looks at them: a refusal for one says that those before it
are kept."""


class Trials(Checks, ABC):
    """One plugin and the generation batches that it is tried on. A method without a leading `_` checks its rule.

    Args:
        plugin: The hook or aggregation.
        setting: Texts, columns and seed of the batches.
        deterministic: Whether the plugin says that it is.
    """

    prefix: str
    """The prefix of its rules' names."""

    garbage: tuple[float, ...] = (1e4, float("nan"))
    """Values to put off the mask."""

    def __init__(self, plugin: Any, setting: Setting, deterministic: bool = True) -> None:
        super().__init__()
        self.plugin, self.setting, self.deterministic = plugin, setting, deterministic
        self.ordinary = ordinary_batches(setting)
        self.varied = [*self.ordinary, *odd_beside_ordinary(setting)]

    @abstractmethod
    def _results(
        self,
        scene: Scene,
        *,
        plugin: Any = None,
        width: int | None = None,
        padding: float = 0.0,
        dtype: torch.dtype = torch.float64,
        logps_dtype: torch.dtype | None = None,
    ) -> list[tuple[str, torch.Tensor]]:
        """What the flow makes of the plugin's answers, `(B, T)` each and zero off the mask, with the method's name.

        Args:
            scene: The batch.
            plugin: Another plugin instead of this one; either is copied first.
            width: `T`.
            padding: The value where no token is.
            dtype: The dtype of all tensors of numbers.
            logps_dtype: The dtype of log-probabilities and entropies, if different.
        """

    @abstractmethod
    def _unsent(self, scene: Scene) -> Iterator[tuple[Any, dict[str, torch.Tensor], Callable[[], Any]]]:
        """Each method's context and tensors, before the call that hands them over."""

    @abstractmethod
    def _rollout(self, scene: Scene, **settings: Any) -> Rollout:
        """The context of a method that sees the whole generation batch."""

    @abstractmethod
    def _on_a_rank(self, scene: Scene, rollout: Rollout) -> torch.Tensor:
        """The flow's result for that method's answer on one rank, which has some of the rows."""

    # ------------------------------------------------------------------------------------------ judging

    def _over(
        self,
        scenes: Sequence[Scene],
        judge: Callable[[Scene], Any],
        where: str = "",
        breaks: Sequence[str | None] = (None,),
    ) -> None:
        """Judge scenes, the plugin's exceptions too; those on odd batches are for the rules about these to report.

        Args:
            scenes: The scenes, in the order in which they are tried.
            judge: Returns if all is well, else raises `Broken`.
            where: What is odd about the scenes.
            breaks: The parts of the contract that this rule reports, in the order of `_ORDER`; None stands for an
                exception of another kind.
        """
        no_news = self.varied[len(self.ordinary) :] if scenes is self.varied else []
        refused: list[str] = []
        place = f" ({where})" if where else ""

        def guarded(scene: Scene) -> None:
            try:
                judge(scene)
            except (Broken, NotChecked):
                raise
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the plugin's own, whatever it is; SystemExit too
                part = error.breaks if isinstance(error, PluginOutputError) else None
                known = part is None and any(scene is one for one in no_news)
                if part in breaks and not known:
                    raise Broken(f"{describe_exception(error)}{place}", str(scene), cause_of(error)) from error
                if part is not None and (breaks[0] is None or _ORDER.index(part) < _ORDER.index(breaks[0])):
                    refused.append(part)

        self.over(scenes, guarded, Scene.smaller)
        if len(refused) == len(scenes):  # nothing was checked, and another rule says why
            raise NotChecked(f"{self.prefix}.{refused[0]} is broken")

    def _agree(
        self, ours: Sequence[tuple[str, torch.Tensor]], theirs: Sequence[tuple[str, torch.Tensor]], what: str, at: Scene
    ) -> None:
        for (method, one_B_T), (_, other_B_T) in zip(ours, theirs, strict=True):
            compare(one_B_T, other_B_T[:, : one_B_T.size(1)], f"{method}, {what}", at, at.mask(one_B_T.size(1)))

    def _deterministic_only(self) -> None:
        if not self.deterministic:
            raise NotChecked("it declares deterministic = False")

    # ------------------------------------------------------------------------------------------ rules of both kinds

    def padding(self) -> None:
        """A wider batch."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            what = f"without padding and with {wider_width(scene) - scene.width} columns of it"
            self._agree(self._results(scene), self._results(scene, width=wider_width(scene)), what, scene)

        self._over(self.varied, judge)

    def _off_the_mask(self) -> None:
        """Garbage off the mask."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            width = wider_width(scene)
            clean = self._results(scene, width=width)
            for garbage in self.garbage:
                what = f"with 0 off the mask and with {garbage}"
                try:
                    garbled = self._results(scene, width=width, padding=garbage)
                except PluginOutputError as error:
                    raise Broken(f"{what}: {describe_exception(error)}", str(scene), cause_of(error)) from error
                self._agree(clean, garbled, what, scene)

        self._over(self.varied, judge)

    def _permuted(self, turned: Callable[[Scene], list[int]], what: str) -> None:
        """The rows in another order."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            order = turned(scene)
            other = replace(scene, rows=tuple(scene.rows[place] for place in order))
            plain = [(method, result_B_T[order]) for method, result_B_T in self._results(scene)]
            self._agree(plain, self._results(other), what, other)

        self._over(self.varied, judge)

    def _split(self) -> None:
        """One rank, two, three."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            ((_, whole_B_T), *_) = self._results(scene)
            for count, parts_B_T in self._on_ranks(scene):
                each = len(scene.rows) // count
                what = f"on one rank and on {count} ranks ({each} row{'s' * (each != 1)} each)"
                compare(whole_B_T, parts_B_T, what, scene, scene.mask())

        self._over(self.varied, judge)

    def gathers(self) -> None:
        """Equally often on each rank, including collectives that bypass `gather`."""
        self._over(self.varied, lambda scene: list(self._on_ranks(scene)), breaks=("gathers", None))
        if not mentions_collectives(self.plugin):
            return

        def judge(scene: Scene) -> None:
            half = len(scene.rows) // 2
            parts = cut(self._rollout(scene, totals=replace(scene.totals(), processes=2)), [half, half])

            def call(rank: int) -> None:
                rows = slice(rank * half, (rank + 1) * half)
                alone = replace(parts[rank], local_rows=rows, gather=lambda tensor: torch.cat([tensor, tensor]))
                self._on_a_rank(scene, alone)

            if difference := describe_difference(collectives_of_ranks(call)):
                raise Broken(difference, str(scene))

        self._over([scene for scene in self.varied if len(scene.rows) % 2 == 0], judge)

    def _long(self, stray: float) -> None:
        """Long completions, in float32 and in float64.

        Args:
            stray: How far, relatively, sums over thousands of tokens in float32 may be off.
        """
        for what, scene in long_batches(self.setting).items():

            def judge(scene: Scene) -> None:
                exact, rounded = self._results(scene), self._results(scene, dtype=torch.float32)
                if not self.deterministic:
                    return
                for (method, exact_B_T), (_, rounded_B_T) in zip(exact, rounded, strict=True):
                    error_B_T = (exact_B_T - rounded_B_T.double()).abs()
                    size = float(exact_B_T.abs().max())
                    if bool((error_B_T > stray * size + ABSOLUTE).any()):
                        row, token = (int(i) for i in (error_B_T == error_B_T.max()).nonzero()[0])
                        values = format_number(exact_B_T[row, token]), format_number(rounded_B_T[row, token])
                        raise Broken(
                            f"{method}, in float64 and in float32: {values[0]} and {values[1]} at row {row}, token "
                            f"{token}",
                            str(scene),
                        )
                    if size and not bool(rounded_B_T.any()):
                        raise Broken(f"{method}: in float32 nothing is left of {format_number(size)}", str(scene))

            self._over([scene], judge, what, breaks=("finite", None))

    def _in_half(self) -> None:
        """Contexts of bfloat16 and float16 compared with float32."""

        def judge(scene: Scene) -> None:
            for dtype in (torch.bfloat16, torch.float16):
                self._results(scene, dtype=torch.float32, logps_dtype=dtype)

        self._over(self.ordinary, judge, "with log-probabilities in bfloat16 and float16", breaks=("shape", None))

    def _on_ranks(self, scene: Scene) -> Iterator[tuple[int, torch.Tensor]]:
        """The result on two and on three ranks, if the rows can be split evenly."""
        for count in dict.fromkeys((2, 3, len(scene.rows))):  # to the last a row each
            if len(scene.rows) % count or count > 6:
                continue
            totals = replace(scene.totals(), processes=count)
            ranks = Ranks(cut(self._rollout(scene, totals=totals), [len(scene.rows) // count] * count))
            yield count, torch.cat(ranks.run(lambda rollout: self._on_a_rank(scene, rollout)))

    def inputs(self) -> None:
        """No in-place writes."""

        def judge(scene: Scene) -> None:
            for context, tensors, call in self._unsent(scene):
                unchanged = Unchanged(context, **tensors)
                call()
                unchanged.check(scene)

        self._over(self.varied, judge)

    def determinism(self) -> None:
        """Twice the same."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            for (method, once_B_T), (_, again_B_T) in zip(self._results(scene), self._results(scene), strict=True):
                compare(once_B_T, again_B_T, f"{method}, once and again", scene, scene.mask(), exactly=True)

        self._over(self.varied, judge)

    def pickle(self) -> None:
        """There and back."""
        again = pickle_round_trip(self.plugin)
        if not self.deterministic:
            return

        def judge(scene: Scene) -> None:
            theirs = self._results(scene, plugin=again)
            self._agree(self._results(scene), theirs, "before and after pickling", scene)

        self._over(self.ordinary, judge)


# ---------------------------------------------------------------------------------------------- comparing


def compare(
    ours: torch.Tensor, theirs: torch.Tensor, what: str, example: object, live: torch.Tensor, *, exactly: bool = False
) -> None:
    """Compare two tensors `(B, T)` where `live` is not zero.

    Raises:
        Broken: They differ; `what` names the two, as in "with padding and without".
    """
    relative, absolute = (0.0, 0.0) if exactly else (RELATIVE, ABSOLUTE)
    close = torch.isclose(ours, theirs, rtol=relative, atol=absolute, equal_nan=True) | (live == 0)
    if not bool(close.all()):
        row, token = (int(i) for i in (~close).nonzero()[0])
        digits = 17 if exactly else 6
        one, other = format_number(ours[row, token], digits), format_number(theirs[row, token], digits)
        raise Broken(f"{what}: {one} and {other} at row {row}, token {token}", str(example))


def format_number(value: torch.Tensor | float, digits: int = 6) -> str:
    """A number for a message."""
    return f"{float(value):.{digits}g}"


class Unchanged:
    """Checks that tensors and the lists of a context are unchanged."""

    def __init__(self, context: Any, **others: torch.Tensor) -> None:
        self._tensors = [*others.items(), *_tensors_in(context)]
        self._before = [(tensor.clone(), tensor._version) for _, tensor in self._tensors]
        self._context = context
        self._lists = {name: copy.deepcopy(value) for name, value in self._plain()}

    def check(self, example: object) -> None:
        """Raise `Broken` if one of them has changed."""
        for (name, tensor), (value, version) in zip(self._tensors, self._before, strict=True):
            untouched = tensor._version == version and torch.equal(tensor.nan_to_num(), value.nan_to_num())
            if not untouched:
                raise Broken(f"it wrote to {name}, in place", str(example))
        for name, value in self._plain():
            if value != self._lists[name]:
                raise Broken(f"it changed {name}", str(example))

    def _plain(self) -> list[tuple[str, Any]]:
        names = ("prompts", "completions", "texts", "columns", "reward_spans")
        return [(name, getattr(self._context, name)) for name in names if hasattr(self._context, name)]


def _tensors_in(context: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in the fields of a context, with the fields' names."""
    for field in dataclasses.fields(context):
        value = getattr(context, field.name)
        if isinstance(value, torch.Tensor):
            yield field.name, value
        elif isinstance(value, Mapping):
            yield from ((f"{field.name}[{key!r}]", item) for key, item in value.items() if torch.is_tensor(item))
