"""The rules of group filters, each as a check on small generation batches."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import torch

from ..credit.flow import group_verdicts, verdicts_by_group
from ..types import FilterDeclaration, Rollout, implements
from .batches import SmallBatch, odd_batches
from .rules import Broken
from .tensor_checks import Results, TensorChecks


class FilterChecks(TensorChecks):
    """The checks of one filter: a completion's verdict stands, as a number, at each of its tokens."""

    prefix = "filter"

    def _rollout(self, batch: SmallBatch, **settings: Any) -> Rollout:
        rollout = super()._rollout(batch, **settings)
        reads = "advantages" in FilterDeclaration.of(self.plugin).needs
        return rollout if reads else replace(rollout, advantages_B_T=None)

    def _results(self, batch: SmallBatch, *, plugin: Any = None, **how: Any) -> Results:
        return [("keep", _numbers(self._copy(plugin), self._rollout(batch, **how)))]

    def _result_on_rank(self, batch: SmallBatch, rollout: Rollout) -> torch.Tensor:
        return _numbers(self._copy(), rollout)

    def form(self) -> None:
        if not implements(self.plugin, "keep"):
            raise Broken("it has no method keep")
        self._contract("group_filter", self.plugin)

    def shape(self) -> None:
        self._over(self.ordinary, self._results, breaks="shape")

    def odd_batches(self) -> None:
        for what, batch in odd_batches(self.setting).items():
            self._over([batch], self._results, what, "shape")

    def groups(self) -> None:
        def judge(batch: SmallBatch) -> None:
            rollout = self._rollout(batch)
            plugin = self._copy()
            verdicts_by_group(plugin, group_verdicts(plugin, rollout), rollout.group_ids_B.tolist())

        self._over(self.varied, judge, breaks="groups")

    def ranks(self) -> None:
        self._on_one_rank_and_on_several()


def _numbers(plugin: Any, rollout: Rollout) -> torch.Tensor:
    said = group_verdicts(plugin, rollout)
    numbers = [2.0 + zlib.crc32(one.encode()) if isinstance(one, str) else float(one) for one in said]
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1).expand(rollout.mask_B_T.shape)
