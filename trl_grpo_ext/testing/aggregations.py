"""The rules of loss aggregations, each as a check on small generation batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..credit.flow import reduced_loss, reduced_weights, token_weights
from ..types import AggregationDeclaration, Rollout, Totals, implements
from .batches import Row, Setting, SmallBatch, long_batches
from .rules import Broken, only_if, plugin_code
from .tensor_checks import PADDING, Results, TensorChecks, compare, compare_numbers

_DEAD = 90
"""Numbers of the rows that are in no total start here."""


class AggregationChecks(TensorChecks):
    """The checks of one aggregation.

    What a `reduce` makes each token count is the slope of its scalar in the token's loss; where rules speak of weights,
    these stand for them.
    """

    prefix = "aggregation"
    stray = 1e-3

    def __init__(self, plugin: Any, setting: Setting) -> None:
        super().__init__(plugin, setting)
        self.by_weights = implements(plugin, "weights")
        self.needs_step = "step_totals" in AggregationDeclaration.of(plugin).needs
        if not self.by_weights:
            self.garbage = (1e4, -1e4)  # losses off the mask are numbers

    def _results(self, batch: SmallBatch, *, plugin: Any = None, **how: Any) -> Results:
        aggregation = self._copy(plugin)
        if self.by_weights:
            return [("weights", token_weights(aggregation, self._rollout(batch, **how)))]
        width = how.get("width")
        dtype = how.get("dtype", torch.float64)
        mask_B_T = batch.mask(width, dtype)
        loss_B_T = batch.losses(width, how.get("logps_dtype") or dtype)
        loss_B_T = torch.where(mask_B_T > 0, loss_B_T, how.get("padding", 0.0)).requires_grad_()
        loss = reduced_loss(aggregation, loss_B_T, mask_B_T, batch.step_totals())
        return [("reduce", reduced_weights(aggregation, loss, loss_B_T, mask_B_T))]

    def _weights(self, batch: SmallBatch, totals: Totals) -> torch.Tensor:
        return token_weights(self._copy(), self._rollout(batch, totals=totals))

    def _reduced(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> float:
        return float(reduced_loss(self._copy(), loss_B_T, mask_B_T, totals))

    def _result_on_rank(self, batch: SmallBatch, rollout: Rollout) -> torch.Tensor:
        return token_weights(self._copy(), rollout)

    def _weights_only(self, reason: str) -> None:
        only_if(self.by_weights, f"it has reduce: {reason}")

    def _reduce_only(self) -> None:
        only_if(not self.by_weights, "it has weights; this is about reduce")

    def _parts_agree(self, parts: str) -> None:
        """The mean of `reduce` over the `micro_batches` or `processes` of a step equals its value for the whole."""
        self._comparable_only()
        only_if(self.needs_step, "its reduce sees one micro-batch at a time and does not need step_totals")

        def judge(batch: SmallBatch) -> None:
            loss_B_T = batch.losses()
            mask_B_T = batch.mask()
            whole = self._reduced(loss_B_T, mask_B_T, batch.step_totals())
            for count in [count for count in (2, 3) if len(batch.rows) % count == 0]:
                totals = batch.step_totals(**{parts: count})
                cuts = zip(loss_B_T.chunk(count), mask_B_T.chunk(count), strict=True)
                mean = sum(self._reduced(*part, totals) for part in cuts) / count
                compare_numbers(mean, whole, f"the mean over {count} {parts} and the whole step", batch)

        self._over(self.varied, judge)

    def form(self) -> None:
        has = [name for name in ("weights", "reduce") if implements(self.plugin, name)]
        if len(has) != 1:
            raise Broken(f"it has {'both weights and reduce' if has else 'neither weights nor reduce'}")
        self._contract("loss_aggregation", self.plugin)

    def long(self) -> None:
        super().long()
        for what, batch in long_batches(self.setting).items():
            self._over([batch], self._some_weight, what)

    def non_negative(self) -> None:
        self._weights_only("the slopes of a reduce may have either sign")
        self._over(self.varied, self._results, breaks="non_negative")

    def mask(self) -> None:
        self._over(self.ordinary, lambda batch: self._results(batch, width=batch.width + PADDING), breaks="mask")

    def live(self) -> None:
        self._over(self.ordinary, self._some_weight)

    def _some_weight(self, batch: SmallBatch) -> None:
        ((_, weights_B_T),) = self._results(batch)
        if not bool(weights_B_T.any()):
            raise Broken("all weights are zero, though tokens are live", batch)

    def micro_batches(self) -> None:
        if not self.by_weights:
            self._parts_agree("micro_batches")
            return
        self._comparable_only()

        def judge(batch: SmallBatch) -> None:
            one_B_T, four_B_T = (self._weights(batch, replace(batch.totals(), micro_batches=count)) for count in (1, 4))
            compare(one_B_T, four_B_T, "with one micro-batch on each rank and with four", batch, batch.mask())

        self._over(self.varied, judge)

    def ranks(self) -> None:
        if self.by_weights:
            self._on_one_rank_and_on_several()
        else:
            self._parts_agree("processes")

    def gathers(self) -> None:
        self._weights_only("reduce has no gather")
        super().gathers()

    def totals(self) -> None:
        self._weights_only("skip_zero_variance is for weights")
        self._comparable_only()

        def judge(batch: SmallBatch) -> None:
            size = len(batch.rows) // len({row.group for row in batch.rows})
            dead = [Row(_DEAD + i, _DEAD, (0,) * (i % 3), batch.rows[0].rewards) for i in range(size)]
            more = replace(batch, rows=(*batch.rows, *dead))
            more_B_T = self._weights(more, batch.totals())[: len(batch.rows), : batch.width]
            what = f"without and with a masked group of {size} rows that is in none of the totals"
            compare(self._weights(batch, batch.totals()), more_B_T, what, batch, batch.mask())

        self._over(self.varied, judge)

    def order(self) -> None:
        self._permuted(lambda batch: [*range(len(batch.rows))][::-1], "the rows in order and the other way round")

    def padding(self) -> None:
        self._comparable_only()

        def judge(batch: SmallBatch) -> None:
            mask_B_T = batch.mask(batch.width + PADDING)
            loss_B_T = batch.losses(batch.width + PADDING)
            clean, *garbled = (
                self._reduced(torch.where(mask_B_T > 0, loss_B_T, off), mask_B_T, batch.step_totals())
                for off in (0.0, *self.garbage)
            )
            for value, off in zip(garbled, self.garbage, strict=True):
                compare_numbers(clean, value, f"with losses of 0 off the mask and of {off:g}", batch)

        if not self.by_weights:
            self._over(self.varied, judge)
        super().padding()

    def gradient(self) -> None:
        self._reduce_only()
        self._over(self.ordinary, self._results, breaks="gradient")

    def step_totals(self) -> None:
        self._reduce_only()
        only_if(not self.needs_step, "it needs step_totals")

        def judge(batch: SmallBatch) -> None:
            with plugin_code(batch, before="where totals.step is None "):
                self._reduced(batch.losses(), batch.mask(), batch.totals())

        self._over(self.ordinary, judge)
