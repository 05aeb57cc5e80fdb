"""The rules of loss aggregations, each as a check on small generation batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..credit.flow import reduced_loss, reduced_weights, token_weights
from ..types import Rollout, Totals, implements
from .builders import Row, Scene, Setting, dead_batches, long_batches, odd_batches, wider_width, with_empty_rows
from .rules import Broken, NotChecked, cause_of, describe_exception, fresh_copy
from .trials import ABSOLUTE, RELATIVE, Trials, compare, format_number

_DEAD = 90
"""Numbers of the rows that are in no total start here."""


class AggregationChecks(Trials):
    """The checks of one aggregation, as `Trials`.

    What a `reduce` makes each token count is the slope of its scalar in the token's loss; where rules speak of weights,
    these stand for them.
    """

    prefix = "aggregation"

    def __init__(self, plugin: Any, setting: Setting, deterministic: bool = True) -> None:
        super().__init__(plugin, setting, deterministic)
        self.by_weights = implements(plugin, "weights")
        self.needs_step = bool(getattr(plugin, "needs_step_totals", False))
        if not self.by_weights:
            self.garbage = self.garbage[:1]  # losses off the mask are numbers

    # ------------------------------------------------------------------------------------------ running it

    def _rollout(self, scene: Scene, **settings: Any) -> Rollout:
        return scene.rollout(aggregation=True, **settings)

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
        aggregation = fresh_copy(self.plugin if plugin is None else plugin)
        if self.by_weights:
            off_mask = {"padding": padding, "padding_id": 7 if padding else 0}
            rollout = self._rollout(scene, width=width, dtype=dtype, logps_dtype=logps_dtype, **off_mask)
            return [("weights", token_weights(aggregation, rollout))]
        mask_B_T = scene.mask(width, dtype)
        loss_B_T = torch.where(mask_B_T > 0, scene.losses(width, logps_dtype or dtype), padding).requires_grad_()
        loss = reduced_loss(aggregation, loss_B_T, mask_B_T, scene.step_totals())
        return [("reduce", reduced_weights(aggregation, loss, loss_B_T, mask_B_T))]

    def _weights(self, scene: Scene, totals: Totals | None = None) -> torch.Tensor:
        return token_weights(fresh_copy(self.plugin), self._rollout(scene, totals=totals or scene.totals()))

    def _reduced(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        return reduced_loss(fresh_copy(self.plugin), loss_B_T, mask_B_T, totals)

    def _on_a_rank(self, scene: Scene, rollout: Rollout) -> torch.Tensor:
        return token_weights(fresh_copy(self.plugin), rollout)

    def _unsent(self, scene: Scene) -> Iterator[tuple[Any, dict[str, torch.Tensor], Callable[[], Any]]]:
        rollout = self._rollout(scene)
        if self.by_weights:
            yield rollout, {}, lambda: fresh_copy(self.plugin).weights(rollout)
        else:
            tensors = {"loss_B_T": scene.losses().requires_grad_(), "mask_B_T": scene.mask()}
            yield rollout, tensors, lambda: fresh_copy(self.plugin).reduce(*tensors.values(), scene.step_totals())

    def _weights_only(self, reason: str) -> None:
        if not self.by_weights:
            raise NotChecked(f"it has reduce: {reason}")

    def _reduce_only(self) -> None:
        if self.by_weights:
            raise NotChecked("it has weights; this is about reduce")

    def _step_only(self) -> None:
        if not self.needs_step:
            raise NotChecked("its reduce sees one micro-batch at a time and does not declare needs_step_totals = True")

    def _parts_agree(self, parts: str) -> None:
        """The mean of `reduce` over the `micro_batches` or `processes` of a step equals its value for the whole."""
        self._step_only()

        def judge(scene: Scene) -> None:
            loss_B_T, mask_B_T = scene.losses(), scene.mask()
            whole = float(self._reduced(loss_B_T, mask_B_T, scene.step_totals()))
            for count in (2, 3):
                size, rest = divmod(len(scene.rows), count)
                if rest:
                    continue
                totals = scene.step_totals(**{parts: count})
                cuts = [slice(start * size, (start + 1) * size) for start in range(count)]
                mean = sum(float(self._reduced(loss_B_T[rows], mask_B_T[rows], totals)) for rows in cuts) / count
                if abs(mean - whole) > ABSOLUTE + RELATIVE * abs(whole):
                    what = f"the mean over {count} {parts} is {format_number(mean)}"
                    raise Broken(f"{what}, and of the whole step it is {format_number(whole)}", str(scene))

        self._over(self.varied, judge)

    # ------------------------------------------------------------------------------------------ its rules

    def form(self) -> None:
        """One of the two methods."""
        has = [name for name in ("weights", "reduce") if implements(self.plugin, name)]
        if len(has) != 1:
            raise Broken(f"it has {'both weights and reduce' if has else 'neither weights nor reduce'}")

    def run(self) -> None:
        """No exception on ordinary batches."""
        self._over(self.ordinary, lambda scene: [call() for *_, call in self._unsent(scene)])

    def shape(self) -> None:
        """`(B, T)`, or a scalar."""
        single = [replace(scene, rows=scene.rows[:2]) for scene in self.ordinary]
        self._over([*self.ordinary, *single], self._results, breaks=("shape", None))

    def finite(self) -> None:
        """No NaN, no infinity."""
        self._finite({"an ordinary batch": self.ordinary[0], **odd_batches(self.setting)})
        self._finite({"an ordinary batch": self.ordinary[1]})

    def empty_rows(self) -> None:
        """Rows without a live token among others."""
        self._finite(with_empty_rows(self.setting))

    def nothing_live(self) -> None:
        """No live token at all."""
        self._finite(dead_batches(self.setting))

    def _finite(self, scenes: dict[str, Scene]) -> None:
        for what, scene in scenes.items():
            self._over([scene], self._results, what, breaks=("finite", None))

    def long(self) -> None:
        """Thousands of tokens."""
        self._long(1e-3)
        for what, scene in long_batches(self.setting).items():
            self._over([scene], self._some_weight, what)

    def dtype(self) -> None:
        """Half precision."""
        self._in_half()

    def non_negative(self) -> None:
        """No negative weight."""
        self._weights_only("the slopes of a reduce may have either sign")
        self._over(self.varied, self._results, breaks=("non_negative", None))

    def mask(self) -> None:
        """Zero off the mask."""
        self._over(self.ordinary, lambda scene: self._results(scene, width=wider_width(scene)), breaks=("mask", None))

    def live(self) -> None:
        """Some weight."""
        self._over(self.ordinary, self._some_weight)

    def _some_weight(self, scene: Scene) -> None:
        ((_, weights_B_T),) = self._results(scene)
        if not bool(weights_B_T.any()) and any(any(row.live) for row in scene.rows):
            raise Broken("all weights are zero, though tokens are live", str(scene), "no weight")

    def micro_batches(self) -> None:
        """Micro-batches of a different size."""
        self._deterministic_only()
        if not self.by_weights:
            self._parts_agree("micro_batches")
            return

        def judge(scene: Scene) -> None:
            one_B_T, four_B_T = (self._weights(scene, replace(scene.totals(), micro_batches=count)) for count in (1, 4))
            compare(one_B_T, four_B_T, "with one micro-batch on each rank and with four", scene, scene.mask())

        self._over(self.varied, judge)

    def ranks(self) -> None:
        """One rank, two, three."""
        if self.by_weights:
            self._split()
        else:
            self._deterministic_only()
            self._parts_agree("processes")

    def gathers(self) -> None:
        """Equally often on each rank."""
        self._weights_only("reduce has no gather")
        super().gathers()

    def totals(self) -> None:
        """Rows that are in no total."""
        self._weights_only("skip_zero_variance is for weights")
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            size = len(scene.rows) // len({row.group for row in scene.rows})
            dead = [Row(_DEAD + i, _DEAD, (0,) * (i % 3), scene.rows[0].rewards) for i in range(size)]
            more = replace(scene, rows=(*scene.rows, *dead))
            more_B_T = self._weights(more, scene.totals())[: len(scene.rows), : scene.width]
            what = f"without and with a masked group of {size} rows that is in none of the totals"
            compare(self._weights(scene), more_B_T, what, scene, scene.mask())

        self._over(self.varied, judge)

    def row_permutation(self) -> None:
        """All rows in reverse order, including groups."""
        self._permuted(lambda scene: [*range(len(scene.rows))][::-1], "the rows in order and the other way round")

    def masked_values(self) -> None:
        """Garbage off the mask."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            mask_B_T, loss_B_T = scene.mask(wider_width(scene)), scene.losses(wider_width(scene))
            clean, garbled = (
                self._reduced(torch.where(mask_B_T > 0, loss_B_T, off), mask_B_T, scene.step_totals())
                for off in (0.0, self.garbage[0])
            )
            if not bool(torch.isclose(clean, garbled, rtol=RELATIVE, atol=ABSOLUTE)):
                what = f"with losses of 0 off the mask and of {self.garbage[0]:g}"
                raise Broken(f"{what}: {format_number(clean)} and {format_number(garbled)}", str(scene))

        if not self.by_weights:
            self._over(self.varied, judge)
        self._off_the_mask()

    def gradient(self) -> None:
        """A graph, and finite slopes."""
        self._reduce_only()
        self._over(self.ordinary, self._results, breaks=("gradient", "finite", None))

    def homogeneous(self) -> None:
        """Twice the losses."""
        self._reduce_only()
        self._deterministic_only()
        if getattr(self.plugin, "homogeneous", True) is False:
            raise NotChecked("it declares homogeneous = False")

        def judge(scene: Scene) -> None:
            once, twice = (
                float(self._reduced(factor * scene.losses(), scene.mask(), scene.step_totals())) for factor in (1, 2)
            )
            if abs(twice - 2 * once) > ABSOLUTE + RELATIVE * abs(once):
                raise Broken(
                    f"reduce gives {format_number(once)}, and {format_number(twice)} for losses twice as large",
                    str(scene),
                )

        self._over(self.ordinary, judge)

    def step_totals(self) -> None:
        """Without counts of the step."""
        self._reduce_only()
        if self.needs_step:
            raise NotChecked("it declares needs_step_totals = True")

        def judge(scene: Scene) -> None:
            try:
                self._reduced(scene.losses(), scene.mask(), scene.totals())
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the plugin's own, whatever it is
                raise Broken(
                    f"where totals.step is None {describe_exception(error)}", str(scene), cause_of(error)
                ) from error

        self.over(self.ordinary, judge, Scene.smaller)
