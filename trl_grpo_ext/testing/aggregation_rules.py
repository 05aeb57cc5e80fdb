"""The rules of loss aggregations, each as a check on small generation batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..types import implements
from .aggregation_trials import AggregationTrials
from .comparing import ABSOLUTE, RELATIVE, Unchanged, number, pickled, same
from .running import Broken, NotChecked, raised
from .scenes import Row, Scene, nothing_live, odd, wider, with_empty_rows

GATES = ("aggregation.form", "aggregation.run", "aggregation.shape")
_DEAD = 90
"""Numbers of the rows that are in no total start here."""


class AggregationChecks(AggregationTrials):
    """The checks of one plugin, made as `AggregationTrials`."""

    def by_rule(self) -> dict[str, Callable[[], None]]:
        """Each rule's check."""
        return {f"aggregation.{name}": getattr(self, name) for name in _RULES}

    def form(self) -> None:
        """One of the two methods."""
        has = [name for name in ("weights", "reduce") if implements(self.aggregation, name)]
        if len(has) != 1:
            raise Broken(f"it has {'both weights and reduce' if has else 'neither weights nor reduce'}")

    def run(self) -> None:
        """No exception on ordinary batches."""
        self._over(self.ordinary, self._raw)

    def shape(self) -> None:
        """`(B, T)`, or a scalar."""

        def judge(scene: Scene) -> None:
            result = self._raw(scene)
            wanted = (len(scene.rows), scene.width) if self.by_weights else ()
            what = f"{'weights' if self.by_weights else 'reduce'} returned"
            if not isinstance(result, torch.Tensor):
                raise Broken(f"{what} {type(result).__name__}, not a tensor of shape {wanted}", str(scene))
            if tuple(result.shape) != wanted:
                raise Broken(f"{what} shape {tuple(result.shape)}, not {wanted}", str(scene))
            if not result.is_floating_point():
                raise Broken(f"{what} {result.dtype}, not a floating point dtype", str(scene))

        single = [replace(scene, rows=scene.rows[:2]) for scene in self.ordinary]
        self._over([*self.ordinary, *single], judge)

    def finite(self) -> None:
        """No NaN, no infinity."""
        for what, scene in {"an ordinary batch": self.ordinary[0], **odd(self.setting)}.items():
            self._finite(scene, what)
        self._finite(self.ordinary[1], "an ordinary batch")

    def non_negative(self) -> None:
        """No negative weight."""
        self._weights_only("the slopes of a reduce may have either sign")

        def judge(scene: Scene) -> None:
            weights_B_T = self._weights(scene)
            bad = weights_B_T < 0
            if bool(bad.any()):
                row, token = (int(i) for i in bad.nonzero()[0])
                raise Broken(f"the weight of row {row}, token {token} is {number(weights_B_T[row, token])}", str(scene))

        self._over(self.varied, judge)

    def mask(self) -> None:
        """Zero off the mask."""

        def judge(scene: Scene) -> None:
            width = wider(scene)
            weights_B_T, mask_B_T = self._weights(scene, width), scene.mask(width)
            bad = (mask_B_T == 0) & (weights_B_T != 0)
            if bool(bad.any()):
                row, token = (int(i) for i in bad.nonzero()[0])
                message = f"row {row}, token {token} is off the mask and counts {number(weights_B_T[row, token])}"
                raise Broken(f"{message}; multiply by the mask", str(scene))

        self._over(self.ordinary, judge)

    def live(self) -> None:
        """Some weight."""

        def judge(scene: Scene) -> None:
            if not bool(self._weights(scene).any()) and any(any(row.live) for row in scene.rows):
                raise Broken("all weights are zero, though tokens are live", str(scene))

        self._over(self.ordinary, judge)

    def empty_rows(self) -> None:
        """Rows without a live token beside others."""
        for what, scene in with_empty_rows(self.setting).items():
            self._finite(scene, what)

    def nothing_live(self) -> None:
        """No live token at all."""
        for what, scene in nothing_live(self.setting).items():
            self._finite(scene, what)

    def micro_batches(self) -> None:
        """Micro-batches of another size."""
        self._deterministic_only()
        if self.by_weights:

            def judge(scene: Scene) -> None:
                one_B_T, four_B_T = (
                    self._weights(scene, totals=replace(scene.totals(), micro_batches=count)) for count in (1, 4)
                )
                same(one_B_T, four_B_T, "with one micro-batch on each rank and with four", scene, scene.mask())

        else:
            self._step_only()

            def judge(scene: Scene) -> None:
                self._parts_agree(scene, lambda count: scene.step_totals(micro_batches=count), "micro-batches")

        self._over(self.varied, judge)

    def ranks(self) -> None:
        """One rank, two, three."""
        self._deterministic_only()
        if not self.by_weights:
            self._step_only()

            def judge_step(scene: Scene) -> None:
                self._parts_agree(scene, lambda count: scene.step_totals(processes=count), "ranks")

            self._over(self.varied, judge_step)
            return

        def judge(scene: Scene) -> None:
            whole_B_T = self._weights(scene)
            for count, parts_B_T in self._on_ranks(scene):
                what = f"on one rank and on {count} (rows {len(scene.rows) // count} each)"
                same(whole_B_T, parts_B_T, what, scene, scene.mask())

        self._over(self.varied, judge, unequal_gathers=False)

    def gathers(self) -> None:
        """Equally often on each rank."""
        self._weights_only("reduce has no gather")

        def judge(scene: Scene) -> None:
            for _ in self._on_ranks(scene, unequal_gathers=True):
                pass

        self._over(self.varied, judge)

    def totals(self) -> None:
        """Rows that are in no total."""
        self._weights_only("skip_zero_variance is for weights")
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            size = len(scene.rows) // len({row.group for row in scene.rows})
            dead = [Row(_DEAD + i, _DEAD, (0,) * (i % 3), scene.rows[0].rewards) for i in range(size)]
            more = replace(scene, rows=(*scene.rows, *dead))
            weights_B_T = self._weights(scene)
            more_B_T = self._weights(more, totals=scene.totals())[: len(scene.rows), : scene.width]
            what = f"without and with a masked group of {size} rows that is in none of the totals"
            same(weights_B_T, more_B_T, what, scene, scene.mask())

        self._over(self.varied, judge)

    def padding(self) -> None:
        """A wider batch."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            plain_B_T, wide_B_T = self._weights(scene), self._weights(scene, wider(scene))
            what = f"without padding and with {wider(scene) - scene.width} columns of it"
            same(plain_B_T, wide_B_T[:, : scene.width], what, scene, scene.mask())

        self._over(self.varied, judge)

    def row_permutation(self) -> None:
        """All rows the other way round, groups too."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            other = replace(scene, rows=scene.rows[::-1])
            what = "the rows in order and the other way round"
            same(self._weights(scene).flip(0), self._weights(other), what, other, other.mask())

        self._over(self.varied, judge)

    def masked_values(self) -> None:
        """Garbage off the mask."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            width = wider(scene)
            clean_B_T = self._weights(scene, width)
            if not self.by_weights:
                mask_B_T, losses_B_T = scene.mask(width), scene.losses(width)
                clean, garbled = (
                    self._reduced(torch.where(mask_B_T > 0, losses_B_T, off), mask_B_T, scene.step_totals())
                    for off in (0.0, 1e4)
                )
                if not bool(torch.isclose(clean, garbled, rtol=RELATIVE, atol=ABSOLUTE)):
                    message = f"with losses of 0 off the mask and of 10000: {number(clean)} and {number(garbled)}"
                    raise Broken(message, str(scene))
            for garbage in (1e4, float("nan")) if self.by_weights else (1e4,):
                garbled_B_T = self._weights(scene, width, padding=garbage)
                same(clean_B_T, garbled_B_T, f"with 0 off the mask and with {garbage}", scene, scene.mask(width))

        self._over(self.varied, judge)

    def gradient(self) -> None:
        """A graph, and finite slopes."""
        self._reduce_only()

        def judge(scene: Scene) -> None:
            loss_B_T = scene.losses().requires_grad_()
            loss = self._reduced(loss_B_T, scene.mask(), scene.step_totals())
            slope = None
            if loss.requires_grad:
                (slope,) = torch.autograd.grad(loss, loss_B_T, allow_unused=True)
            if slope is None:
                raise Broken(
                    "what reduce returned does not depend on loss_B_T: don't detach, don't use .item()", str(scene)
                )
            bad = ~torch.isfinite(slope)
            if bool(bad.any()):
                row, token = (int(i) for i in bad.nonzero()[0])
                raise Broken(f"the gradient at row {row}, token {token} is {number(slope[row, token])}", str(scene))

        self._over(self.ordinary, judge)

    def homogeneous(self) -> None:
        """Twice the losses."""
        self._reduce_only()
        self._deterministic_only()
        if getattr(self.aggregation, "homogeneous", True) is False:
            raise NotChecked("it declares homogeneous = False")

        def judge(scene: Scene) -> None:
            once, twice = (
                float(self._reduced(factor * scene.losses(), scene.mask(), scene.step_totals())) for factor in (1, 2)
            )
            if abs(twice - 2 * once) > ABSOLUTE + RELATIVE * abs(once):
                raise Broken(f"reduce gives {number(once)}, and {number(twice)} for losses twice as large", str(scene))

        self._over(self.ordinary, judge)

    def step_totals(self) -> None:
        """Without counts of the step."""
        self._reduce_only()
        if self.needs_step:
            raise NotChecked("it declares needs_step_totals = True")

        def judge(scene: Scene) -> None:
            try:
                self._reduced(scene.losses(), scene.mask(), scene.totals())
            except Exception as error:  # the plugin's own, whatever it is
                raise Broken(f"where totals.step is None it {raised(error)}", str(scene)) from error

        self._over(self.ordinary, judge)

    def inputs(self) -> None:
        """No in-place writes."""

        def judge(scene: Scene) -> None:
            if self.by_weights:
                rollout = self._rollout(scene)
                unchanged = Unchanged(rollout)
                self._raw_weights(rollout)
            else:
                loss_B_T, mask_B_T = scene.losses(), scene.mask()
                unchanged = Unchanged(scene.rollout(), loss_B_T=loss_B_T, mask_B_T=mask_B_T)
                self._reduced(loss_B_T, mask_B_T, scene.step_totals())
            unchanged.check(scene)

        self._over(self.ordinary, judge)

    def determinism(self) -> None:
        """Twice the same."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            same(self._weights(scene), self._weights(scene), "once and again", scene, scene.mask(), exactly=True)

        self._over(self.varied, judge)

    def pickle(self) -> None:
        """There and back."""
        again = AggregationChecks(pickled(self.aggregation), self.setting, self.deterministic)
        if not self.deterministic:
            return

        def judge(scene: Scene) -> None:
            same(self._weights(scene), again._weights(scene), "before and after pickling", scene, scene.mask())

        self._over(self.ordinary, judge)


_RULES = (
    *("form", "run", "shape", "finite", "non_negative", "mask", "live", "empty_rows", "nothing_live", "micro_batches"),
    *("ranks", "gathers", "totals", "padding", "row_permutation", "masked_values", "gradient", "homogeneous"),
    *("step_totals", "inputs", "determinism", "pickle"),
)
