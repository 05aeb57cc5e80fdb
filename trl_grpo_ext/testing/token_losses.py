"""The rules of token losses, each as a check on small generation batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..credit.token_losses import carried_values, check_declarations, measured, rows_of, value_and_slope
from ..types import NEEDS, LossTerms, Rollout, TokenLossDeclaration, implements
from .batches import Setting, SmallBatch
from .rules import Broken, NotChecked, only_if, plugin_code
from .tensor_checks import Results, TensorChecks


class TokenLossChecks(TensorChecks):
    """The checks of one token loss: of its losses, their gradient in the log-probabilities, and what it measures."""

    prefix = "token-loss"

    def __init__(self, plugin: Any, setting: Setting) -> None:
        super().__init__(plugin, setting)
        self.declared = TokenLossDeclaration.of(plugin)

    def _terms(self, batch: SmallBatch, plugin: Any, needs: Any = NEEDS, **how: Any) -> LossTerms:
        """All rows of a batch as one micro-batch, with what the loss carries there."""
        rollout = self._rollout(batch, needs=needs, **how)
        return self._of_rollout(batch, plugin, rollout, ref="ref_logps" in needs, **how)

    @staticmethod
    def _of_rollout(batch: SmallBatch, plugin: Any, rollout: Rollout, **how: Any) -> LossTerms:
        forward = batch.forward(**how)
        rows = rollout.local_rows
        assert rollout.advantages_B_T is not None  # the rollout is one of an aggregation
        return LossTerms(
            logps_B_T=forward.logps_B_T[rows],
            old_logps_B_T=forward.old_logps_B_T[rows],
            advantages_B_T=rollout.advantages_B_T,
            mask_B_T=rollout.mask_B_T,
            entropies_B_T=forward.entropies_B_T[rows],
            ref_logps_B_T=None if forward.ref_logps_B_T is None else forward.ref_logps_B_T[rows],
            sampling_logps_B_T=rollout.sampling_logps_B_T,
            completion_ids_B_T=rollout.completion_ids_B_T,
            rewards_B=rollout.rewards_B,
            carried_B_T=carried_values(plugin, rollout),
            step=rollout.step,
        )

    def _results(self, batch: SmallBatch, *, plugin: Any = None, **how: Any) -> Results:
        plugin = self._copy(plugin)
        terms = self._terms(batch, plugin, **how)
        loss_B_T, slope_B_T = value_and_slope(plugin, terms)
        seen = measured(plugin, terms)
        return [("loss", loss_B_T), ("its gradient", slope_B_T), *((f"measures: {name}", seen[name]) for name in seen)]

    def _result_on_rank(self, batch: SmallBatch, rollout: Rollout) -> torch.Tensor:
        plugin = self._copy()
        return value_and_slope(plugin, self._of_rollout(batch, plugin, rollout))[0]

    def form(self) -> None:
        if not implements(self.plugin, "loss"):
            raise Broken("it has no method loss")
        self._contract("token_loss", self.plugin)

    def needs(self) -> None:
        needs = self.declared.needs
        listed = f"with what it lists in `needs` ({', '.join(needs) or 'nothing'}) "

        def judge(batch: SmallBatch) -> None:
            with plugin_code(batch, before=listed, after="; with everything it runs"):
                plugin = self._copy()
                value_and_slope(plugin, self._terms(batch, plugin, needs))

        self._over(self.ordinary, judge)

    def gradient(self) -> None:
        self._over(self.ordinary, self._results, breaks="gradient")

    def finite(self) -> None:
        def unmoved(batch: SmallBatch) -> None:
            plugin = self._copy()
            terms = self._terms(batch, plugin)
            value_and_slope(plugin, replace(terms, logps_B_T=terms.old_logps_B_T))

        super().finite()
        self._over(self.ordinary, unmoved, "where the policy is the one that sampled", "finite")

    def independent(self) -> None:
        only_if(self.declared.independent, "it does not declare independent=True")
        self._declaration("rows")

    def needs_advantage(self) -> None:
        only_if(self.declared.needs_advantage, "it does not declare needs_advantage=True")
        self._declaration("silent")

    def _declaration(self, part: str) -> None:
        self._comparable_only()

        def judge(batch: SmallBatch) -> None:
            plugin = self._copy()
            terms = self._terms(batch, plugin)
            for order in ([*range(len(batch.rows))], [*range(len(batch.rows))][::-1]):
                check_declarations(plugin, rows_of(terms, order), rows_apart=part == "rows", vanishes=part == "silent")

        self._over(self.varied, judge, breaks=part)

    def split(self) -> None:
        self._carrying_only()
        if not self.declared.independent:
            raise NotChecked("it does not declare independent=True, so its losses change with the rows of a rank")
        self._on_one_rank_and_on_several()

    def gathers(self) -> None:
        self._carrying_only()
        super().gathers()

    def _carrying_only(self) -> None:
        only_if(implements(self.plugin, "on_rollout"), "it has no on_rollout")

    def no_effect(self) -> str:
        """Whether its gradient, where it acts, is 0 in all batches."""
        for batch in self.varied:
            try:
                (_, (_, slope_B_T), *_) = self._results(batch)
            except Exception:  # a rule has reported it
                continue
            if bool(slope_B_T.any()):
                return ""
        return "its gradient is 0 on all of the kit's batches; give it parameters with which it acts"
