"""Trying an aggregation on small generation batches: by its weights, on several ranks and in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ..types import Rollout, Totals, implements
from .builders import Ranks, UnequalGathers, cut
from .comparing import ABSOLUTE, RELATIVE, fresh, number
from .running import Broken, NotChecked
from .scene_trials import SceneTrials
from .scenes import Scene, Setting


class AggregationTrials(SceneTrials):
    """The checks of one aggregation.

    What a `reduce` makes each token count is the slope of its scalar in the token's loss; where rules speak of weights,
    these stand for them.

    Args:
        aggregation: The aggregation.
        setting: Texts, columns and seed of the batches.
        deterministic: Whether the aggregation says that it is.
    """

    def __init__(self, aggregation: Any, setting: Setting, deterministic: bool = True) -> None:
        super().__init__(setting, deterministic)
        self.aggregation = aggregation
        self.by_weights = implements(aggregation, "weights")
        self.needs_step = bool(getattr(aggregation, "needs_step_totals", False))

    def _rollout(self, scene: Scene, width: int | None = None, padding: float = 0.0, **overrides: Any) -> Rollout:
        padding_id = 0 if padding == 0 else 7
        return scene.rollout(width, padding=padding, padding_id=padding_id, aggregation=True, **overrides)

    def _raw(self, scene: Scene) -> Any:
        if self.by_weights:
            return self._raw_weights(self._rollout(scene))
        return fresh(self.aggregation).reduce(scene.losses().requires_grad_(), scene.mask(), scene.step_totals())

    def _raw_weights(self, rollout: Rollout) -> Any:
        with torch.no_grad():
            return fresh(self.aggregation).weights(rollout)

    def _reduced(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        loss = fresh(self.aggregation).reduce(loss_B_T, mask_B_T, totals)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise Broken("reduce did not return a scalar tensor")
        return loss

    def _weights(
        self, scene: Scene, width: int | None = None, padding: float = 0.0, totals: Totals | None = None
    ) -> torch.Tensor:
        """Weights `(B, T)`; of a reduce, the slope of its scalar in each token's loss."""
        width = width or scene.width
        if self.by_weights:
            weights_B_T = self._raw_weights(self._rollout(scene, width, padding, totals=totals or scene.totals()))
            if not isinstance(weights_B_T, torch.Tensor) or weights_B_T.shape != (len(scene.rows), width):
                raise Broken(f"weights did not return a tensor {(len(scene.rows), width)}")
            return weights_B_T.detach()
        mask_B_T = scene.mask(width)
        losses_B_T = torch.where(mask_B_T > 0, scene.losses(width), padding).requires_grad_()
        return self._slope(losses_B_T, mask_B_T, totals or scene.step_totals())

    def _slope(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        loss = self._reduced(loss_B_T, mask_B_T, totals)
        if not loss.requires_grad:
            raise NotChecked("reduce has no gradient")
        (slope_B_T,) = torch.autograd.grad(loss, loss_B_T, allow_unused=True)
        if slope_B_T is None:
            raise NotChecked("reduce has no gradient")
        return slope_B_T

    def _finite(self, scene: Scene, what: str) -> None:
        def judge(scene: Scene) -> None:
            numbers = self._raw(scene)
            if not self.by_weights and numbers.requires_grad and bool(torch.isfinite(numbers)):
                numbers = self._weights(scene)
            bad = ~torch.isfinite(numbers).reshape(len(scene.rows) if numbers.dim() else 1, -1)
            if bool(bad.any()):
                row, token = (int(i) for i in bad.nonzero()[0])
                value = number(numbers[row, token] if numbers.dim() else numbers)
                place = f" at row {row}, token {token}" if numbers.dim() else ""
                raise Broken(f"it gave {value}{place} of {what}", str(scene))

        self._over([scene], judge, what)

    def _parts_agree(self, scene: Scene, totals: Callable[[int], Totals], parts: str) -> None:
        """The mean of a reduce over parts of a step is its value for the whole."""
        loss_B_T, mask_B_T = scene.losses(), scene.mask()
        whole = float(self._reduced(loss_B_T, mask_B_T, scene.step_totals()))
        for count in (2, 3):
            size, rest = divmod(len(scene.rows), count)
            if rest:
                continue
            cuts = [slice(start * size, (start + 1) * size) for start in range(count)]
            mean = sum(float(self._reduced(loss_B_T[rows], mask_B_T[rows], totals(count))) for rows in cuts) / count
            if abs(mean - whole) > ABSOLUTE + RELATIVE * abs(whole):
                message = (
                    f"the mean over {count} {parts} is {number(mean)}, and of the whole step it is {number(whole)}"
                )
                raise Broken(message, str(scene))

    def _on_ranks(self, scene: Scene, unequal_gathers: bool = False) -> Iterable[tuple[int, torch.Tensor]]:
        for count in (2, 3):
            if len(scene.rows) % count:
                continue
            totals = replace(scene.totals(), processes=count)
            ranks = Ranks(cut(self._rollout(scene, totals=totals), [len(scene.rows) // count] * count))
            try:
                yield count, torch.cat(ranks.run(self._raw_weights))
            except UnequalGathers as error:
                if unequal_gathers:
                    raise Broken(f"on {count} ranks {error}", str(scene)) from error
                raise

    def _deterministic_only(self) -> None:
        if not self.deterministic:
            raise NotChecked("it declares deterministic = False")

    def _weights_only(self, reason: str) -> None:
        if not self.by_weights:
            raise NotChecked(f"it has reduce: {reason}")

    def _reduce_only(self) -> None:
        if self.by_weights:
            raise NotChecked("it has weights; this is about reduce")

    def _step_only(self) -> None:
        if not self.needs_step:
            raise NotChecked("its reduce sees one micro-batch at a time and does not declare needs_step_totals = True")
