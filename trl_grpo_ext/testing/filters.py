"""The rules of group filters, each as a check on small generation batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..credit.flow import group_verdicts, verdicts_by_group
from ..types import Rollout, implements
from .builders import Scene, dead_batches, odd_batches, with_empty_rows
from .rules import Broken, fresh_copy
from .trials import Trials


class FilterChecks(Trials):
    """The checks of one filter, as `Trials`: a completion's verdict stands for each of its tokens."""

    prefix = "filter"

    # ------------------------------------------------------------------------------------------ running it

    def _rollout(self, scene: Scene, **settings: Any) -> Rollout:
        rollout = scene.rollout(aggregation=True, **settings)
        reads = getattr(self.plugin, "reads_advantages", False)
        return rollout if reads else replace(rollout, advantages_B_T=None)

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
        rollout = self._rollout(scene, width=width, padding=padding, dtype=dtype, logps_dtype=logps_dtype)
        return [("keep", _numbers(fresh_copy(self.plugin if plugin is None else plugin), rollout))]

    def _on_a_rank(self, scene: Scene, rollout: Rollout) -> torch.Tensor:
        return _numbers(fresh_copy(self.plugin), rollout)

    def _unsent(self, scene: Scene) -> Iterator[tuple[Any, dict[str, torch.Tensor], Callable[[], Any]]]:
        rollout = self._rollout(scene)
        yield rollout, {}, lambda: fresh_copy(self.plugin).keep(rollout)

    # ------------------------------------------------------------------------------------------ its rules

    def form(self) -> None:
        """The method."""
        if not implements(self.plugin, "keep"):
            raise Broken("it has no method keep")

    def run(self) -> None:
        """No exception on ordinary batches."""
        self._over(self.ordinary, lambda scene: [call() for *_, call in self._unsent(scene)])

    def shape(self) -> None:
        """One answer for each completion."""
        self._over(self.ordinary, self._results, breaks=("shape", None))

    def odd_batches(self) -> None:
        """Batches that provoke divisions by zero."""
        for what, scene in {
            **odd_batches(self.setting),
            **with_empty_rows(self.setting),
            **dead_batches(self.setting),
        }.items():
            self._over([scene], self._results, what, breaks=("shape", None))

    def groups(self) -> None:
        """One answer per group."""

        def judge(scene: Scene) -> None:
            rollout = self._rollout(scene)
            plugin = fresh_copy(self.plugin)
            verdicts_by_group(plugin, group_verdicts(plugin, rollout), rollout.group_ids_B.tolist())

        self._over(self.varied, judge, breaks=("groups", None))

    def ranks(self) -> None:
        """One rank, two, three."""
        self._split()

    def masked_values(self) -> None:
        """Garbage off the mask."""
        self._off_the_mask()


def _numbers(plugin: Any, rollout: Rollout) -> torch.Tensor:
    """A filter's verdict on each completion, as a number at each of its tokens."""
    said = group_verdicts(plugin, rollout)
    numbers = [2.0 + zlib.crc32(one.encode()) if isinstance(one, str) else float(one) for one in said]
    shape = rollout.mask_B_T.shape
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1).expand(shape)
