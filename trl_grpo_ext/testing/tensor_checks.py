"""The rules of hooks, aggregations, filters and token losses, each as a check on small generation batches.

What the flow itself refuses (`credit.flow`: shapes, signs, NaN, what stands off the mask, changed inputs, unequal
gathers) is refused here by running it. Results of all kinds are tensors `(B, T)`, which the rules compare.
"""

import json
import zlib
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch

from .. import types
from ..credit import flow, token_losses
from ..types import Rollout, implements
from . import batches
from .batches import Row, Setting, SmallBatch
from .builders import Ranks, cut
from .rules import Broken, Checks, only_if, over, through_json

PADDING = 3  # columns of surplus padding to try
RELATIVE = 1e-5  # tolerances for numbers that should be equal,
ABSOLUTE = 1e-6  # as a plugin may compute in float32
_NOTHING = 1e-9  # advantages up to this size are, in float64, what rounding leaves of zero
_DEAD = 90  # numbers of the rows that are in no total start here
Results = dict[str, torch.Tensor]  # of each method, `(B, T)` and zero off the mask


class TensorChecks(Checks, ABC):
    """The checks of one plugin on small batches. Each public method checks the rule of its name."""

    garbage: tuple[float, ...] = (1e4, float("nan"))  # to put off the mask
    sees_advantages = True  # in `rollout.advantages_B_T`
    stray = 1e-2  # how far sums of thousands of tokens in float32 may be off, relatively
    independent = True  # whether a completion's result is the same whichever others are on its rank

    def __init__(self, plugin: Any, setting: Setting) -> None:
        self.plugin = plugin
        declared = types.Declaration.of(plugin)
        setting = replace(setting, needs=declared.needs, teachers=getattr(declared, "teachers", ()))
        self.setting = setting
        self.ordinary = batches.ordinary_batches(setting)
        self.odd = batches.odd_batches(setting)
        self.varied = [*self.ordinary, *(self.odd[what] for what in batches.ALSO_ORDINARY)]

    @abstractmethod
    def _results(self, batch: SmallBatch, rollout: Rollout | None = None, **how: Any) -> Results:
        """A copy's results, for a rank's rollout or that of the whole batch; `how` is for `SmallBatch.rollout`."""

    def _rollout(self, batch: SmallBatch, **how: Any) -> Rollout:
        return batch.rollout(with_advantages=self.sees_advantages, **how)

    def _agree(self, ours: Results, theirs: Results, what: str, at: SmallBatch, exactly: bool = False) -> None:
        for method, one_B_T in ours.items():
            tolerances = {"relative": 0.0, "absolute": 0.0} if exactly else {}
            compare(one_B_T, theirs[method], f"{method}, {what}", at, **tolerances)

    def run(self) -> None:
        single = [replace(batch, rows=batch.rows[:2]) for batch in self.ordinary]
        self._over([*self.ordinary, *single], self._results)

    @over("ordinary", compares=True)
    def determinism(self, batch: SmallBatch) -> None:
        self._agree(self._results(batch), self._results(batch), "once and again", batch, exactly=True)

    def odd_batches(self) -> None:
        for what, batch in self.odd.items():
            self._over([batch], self._results, what)

    def padding(self) -> None:
        self._comparable_only()
        for off in (0.0, *self.garbage):
            what = f"without padding and with {PADDING} columns of it, with {off:g} off the mask"

            def judge(batch: SmallBatch, off: float = off, what: str = what) -> None:
                padded = self._results(batch, width=batch.width + PADDING, padding=off)
                cut_off = {method: result_B_T[:, : batch.width] for method, result_B_T in padded.items()}
                self._agree(self._results(batch), cut_off, what, batch)

            self._over(self.varied, judge, what)

    def long(self) -> None:
        compared = self.deterministic and self._is_copyable()

        def judge(batch: SmallBatch) -> None:
            exact = self._results(batch)
            rounded = self._results(batch, dtype=torch.float32)
            for method, exact_B_T in exact.items() if compared else ():
                size = float(exact_B_T.abs().max())
                tolerances = {"relative": 0.0, "absolute": self.stray * size + ABSOLUTE}
                compare(exact_B_T, rounded[method], f"{method}, in float64 and float32", batch, **tolerances)
                if size and not bool(rounded[method].any()):
                    raise Broken(f"{method}: in float32 nothing is left of {number(size)}", batch)

        for what, long in batches.long_batches(self.setting).items():
            self._over([long], judge, what)

    def dtype(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):

            def judge(batch: SmallBatch, dtype: torch.dtype = dtype) -> None:
                self._results(batch, dtype=torch.float32, logps_dtype=dtype)

            self._over(self.ordinary, judge, f"with log-probabilities in {dtype}")

    @over("varied", compares=True)
    def order(self, batch: SmallBatch) -> None:
        backwards = replace(batch, rows=batch.rows[::-1])
        plain = {method: result_B_T.flip(0) for method, result_B_T in self._results(batch).items()}
        self._agree(plain, self._results(backwards), "the completions in order and the other way round", backwards)

    @over("varied")
    def ranks(self, batch: SmallBatch) -> None:
        whole_B_T = next(iter(self._results(batch).values()))
        # As many as divide the rows evenly, and one row on each.
        for count in {2, 3, len(batch.rows)} & {count for count in range(2, 7) if len(batch.rows) % count == 0}:
            totals = replace(batch.totals(), processes=count)
            ranks = Ranks(cut(self._rollout(batch, totals=totals), [len(batch.rows) // count] * count))
            parts_B_T = torch.cat(ranks.run(lambda rollout: next(iter(self._results(batch, rollout).values()))))
            if self.independent and self.deterministic and self._is_copyable():
                what = f"on one rank and on {count} ranks ({len(batch.rows) // count} rows each)"
                compare(whole_B_T, parts_B_T, what, batch)


class HookChecks(TensorChecks):
    """The checks of one hook."""

    sees_advantages = False

    def __init__(self, plugin: Any, setting: Setting) -> None:
        self.declared = types.HookDeclaration.of(plugin)
        super().__init__(plugin, setting)
        self.role_name = types.role_of(plugin)
        self.stages = [stage for stage in types.HOOK_METHODS if implements(plugin, stage)]
        self.at_rollout = next((stage for stage in self.stages if stage != "on_forward"), "")
        self.with_equal_rewards = batches.equal_rewards(self.setting)

    def _context(self, batch: SmallBatch, stage: str, **how: Any) -> Rollout | types.Forward:
        return batch.forward(**how) if stage == "on_forward" else batch.rollout(**how)

    def _run(self, hook: Any, stage: str, advantages_B_T: torch.Tensor, context: Any) -> torch.Tensor:
        """The flow's result for one method, `(B, T)`; a completion's reward stands at each of its tokens."""
        if stage != "on_rewards":
            result_B_T = flow.run_hook(hook, stage, advantages_B_T, context)
            flow.hook_metrics(hook)  # refuses names
            return result_B_T
        if self.declared.changes_weights:
            added = (flow.shape_rewards(hook, context, "").rewards_B - context.rewards_B).nan_to_num(nan=0.0)
            added_B_T: torch.Tensor = added.unsqueeze(1) * context.mask_B_T
            return added_B_T
        added = flow.run_shaper(hook, context)
        return added if added.dim() == 2 else added.unsqueeze(1).expand_as(context.mask_B_T) * context.mask_B_T

    def _results(self, batch: SmallBatch, rollout: Rollout | None = None, **how: Any) -> Results:
        if rollout is not None:
            incoming_B_T = batch.incoming()[rollout.local_rows]
            return {self.at_rollout: self._run(self._copy(), self.at_rollout, incoming_B_T, rollout)}
        # The advantages that come in are always zero off the mask: the flow sees to it.
        incoming_B_T = batch.incoming(how.get("width"), how.get("dtype", torch.float64))
        return {
            stage: self._run(self._copy(), stage, incoming_B_T, self._context(batch, stage, **how))
            for stage in self.stages
        }

    def _all_stages(self, hook: Any, batch: SmallBatch, training: bool = True) -> torch.Tensor:
        advantages_B_T = batch.incoming()
        for stage in self.stages:
            advantages_B_T = self._run(hook, stage, advantages_B_T, self._context(batch, stage, training=training))
        return advantages_B_T

    def role(self) -> None:
        only_if(self.at_rollout == "on_rollout", f"its role is {self.role_name}")
        self._comparable_only()
        self._over(self.ordinary, self._keeps_its_role)
        same = (torch.equal(*self._with_two_advantages(batch)) for batch in self.ordinary)
        if self.role_name == "transform" and all(same):
            raise Broken('its result does not depend on the incoming advantages: declare role="estimator"')

    def _keeps_its_role(self, batch: SmallBatch) -> None:
        one_B_T, other_B_T = self._with_two_advantages(batch)
        if self.role_name == "estimator":
            compare(one_B_T, other_B_T, "it is an estimator, and with other advantages coming in", batch)
        elif self.declared.last:
            up_B_T, down_B_T = (self._on_rollout(batch, sign * batch.mask()) for sign in (1.0, -1.0))
            for before_B_T, after_B_T in zip(_two_advantages(batch), (one_B_T, other_B_T), strict=True):
                kept_B_T = (before_B_T != 0) & (torch.where(before_B_T >= 0, up_B_T, down_B_T) != 0)
                what = "whether it, a mask, leaves an advantage, and whether it leaves 1 of the same sign"
                compare((after_B_T != 0).double(), kept_B_T.double(), what, batch)

    def _with_two_advantages(self, batch: SmallBatch) -> list[torch.Tensor]:
        return [self._on_rollout(batch, advantages_B_T) for advantages_B_T in _two_advantages(batch)]

    def _on_rollout(self, batch: SmallBatch, advantages_B_T: torch.Tensor) -> torch.Tensor:
        return self._run(self._copy(), "on_rollout", advantages_B_T, batch.rollout(dtype=advantages_B_T.dtype))

    @over("with_equal_rewards", compares=True)
    def equal_rewards(self, batch: SmallBatch) -> None:
        only_if(self.role_name == "estimator", "it is not an estimator")
        exact_B_T, rounded_B_T = (
            self._on_rollout(batch, batch.incoming(dtype=dtype)) for dtype in (torch.float64, torch.float32)
        )
        near_B_T = (exact_B_T.abs() < _NOTHING) & ((exact_B_T != 0) | (rounded_B_T != 0))
        if bool(near_B_T.any()):
            place = near_B_T.nonzero()[0].tolist()
            advice = "take means with trl_grpo_ext.credit.groups.group_mean, or of differences between rewards"
            raise Broken(f"with equal rewards, {_both(exact_B_T, rounded_B_T, place)}; {advice}", batch)

    def dtype(self) -> None:
        self._over(self.ordinary, self._keeps_the_dtype)
        super().dtype()

    def _keeps_the_dtype(self, batch: SmallBatch) -> None:
        for stage in self.stages if self.at_rollout != "on_rewards" else ():
            for dtype in (torch.float32, torch.float64):
                given_B_T = batch.incoming(dtype=dtype)
                with torch.no_grad():
                    result = getattr(self._copy(), stage)(given_B_T, self._context(batch, stage, dtype=dtype))
                given = (given_B_T.dtype, given_B_T.device)
                if isinstance(result, torch.Tensor) and (result.dtype, result.device) != given:
                    raise Broken(f"{stage} was given {given_B_T.dtype}, and returned {result.dtype}", batch)

    def ranks(self) -> None:
        only_if(self.at_rollout, "it acts at the loss forward alone")
        super().ranks()

    @over("varied", compares=True)
    def micro_batches(self, batch: SmallBatch) -> None:
        only_if("on_forward" in self.stages, "it has no on_forward")
        only_if(self.declared.independent, "it does not declare independent=True")
        incoming_B_T = batch.incoming()
        forward = batch.forward()
        whole_B_T = flow.run_hook(self._copy(), "on_forward", incoming_B_T, forward)
        rows = []
        for row in range(len(batch.rows)):
            here = slice(row, row + 1)
            # All that is known of a row comes along, its group's mean and spread too.
            of_row: dict[str, Any] = {k: value[here] for k, value in vars(forward).items() if torch.is_tensor(value)}
            rows.append(flow.run_hook(self._copy(), "on_forward", incoming_B_T[here], replace(forward, **of_row)))
        compare(whole_B_T, torch.cat(rows), "each row among the others and alone", batch)

    @over("varied", compares=True)
    def state(self, batch: SmallBatch) -> None:
        only_if(implements(self.plugin, "state_dict"), "it has no state_dict: it remembers nothing")
        used = self._copy()
        resumed = self._copy()
        self._all_stages(used, batch)
        resumed.load_state_dict(through_json(used.state_dict()))
        if _json(resumed) != _json(used):
            raise Broken(f"after load_state_dict its state is {_json(resumed)}, not {_json(used)}", batch)
        on_B_T, resumed_B_T = (self._all_stages(hook, batch) for hook in (used, resumed))
        compare(on_B_T, resumed_B_T, "going on, and resumed from its state", batch)

    @over("varied", compares=True)
    def evaluation(self, batch: SmallBatch) -> None:
        trained = self._copy()
        evaluated = self._copy()
        self._all_stages(evaluated, batch, training=False)
        if _json(evaluated) != _json(trained):
            raise Broken(f"evaluation changed its state from {_json(trained)} to {_json(evaluated)}", batch)
        trained_B_T, evaluated_B_T = (self._all_stages(hook, batch) for hook in (trained, evaluated))
        compare(trained_B_T, evaluated_B_T, "training, without and with an evaluation before", batch)

    def no_effect(self) -> str:
        for batch in (replace(batch, advantages="token") for batch in self.varied):
            result_B_T = self._all_stages(self._copy(), batch)
            before_B_T = torch.zeros_like(result_B_T) if self.at_rollout == "on_rewards" else batch.incoming()
            if bool((~torch.isclose(result_B_T, before_B_T) & (batch.mask() > 0)).any()):
                return ""
        return "it changed no token of the kit's batches; give it completions or parameters"


class AggregationChecks(TensorChecks):
    """The checks of one aggregation; the weights of a `reduce` are the slopes of its scalar in the tokens' losses."""

    stray = 1e-3

    def __init__(self, plugin: Any, setting: Setting) -> None:
        super().__init__(plugin, setting)
        self.by_weights = implements(plugin, "weights")
        self.needs_step = "step_totals" in types.AggregationDeclaration.of(plugin).needs
        if not self.by_weights:
            self.garbage = (1e4, -1e4)  # losses off the mask are numbers

    def _results(self, batch: SmallBatch, rollout: Rollout | None = None, **how: Any) -> Results:
        aggregation = self._copy()
        if self.by_weights:
            return {"weights": flow.token_weights(aggregation, rollout or self._rollout(batch, **how))}
        width = how.get("width")
        mask_B_T = batch.mask(width, how.get("dtype", torch.float64))
        loss_B_T = batch.losses(width, how.get("logps_dtype") or mask_B_T.dtype)
        loss_B_T = torch.where(mask_B_T > 0, loss_B_T, how.get("padding", 0.0)).requires_grad_()
        totals = batch.step_totals() if self.needs_step else batch.totals()
        loss = flow.reduced_loss(aggregation, loss_B_T, mask_B_T, totals)
        return {"reduce": flow.reduced_weights(aggregation, loss, loss_B_T, mask_B_T)}

    def _parts_agree(self, batch: SmallBatch, parts: str) -> None:
        """The mean of `reduce` over the `micro_batches` or `processes` of a step equals its value for the whole."""
        only_if(self.needs_step, "its reduce sees one micro-batch at a time and does not need step_totals")
        loss_B_T = batch.losses()
        mask_B_T = batch.mask()
        whole = flow.reduced_loss(self._copy(), loss_B_T, mask_B_T, batch.step_totals())
        for count in [count for count in (2, 3) if len(batch.rows) % count == 0]:
            totals = batch.step_totals(**{parts: count})
            cuts = zip(loss_B_T.chunk(count), mask_B_T.chunk(count), strict=True)
            mean = torch.stack([flow.reduced_loss(self._copy(), *part, totals) for part in cuts]).mean()
            if not torch.isclose(mean, whole, rtol=RELATIVE, atol=ABSOLUTE):
                found = f"{number(mean)} and {number(whole)}"
                raise Broken(f"the mean over {count} {parts} and the whole step: {found}", batch)

    @over("ordinary")
    def live(self, batch: SmallBatch) -> None:
        (weights_B_T,) = self._results(batch).values()
        if not bool(weights_B_T.any()):
            raise Broken("all weights are zero, though tokens are live", batch)

    @over("varied", compares=True)
    def micro_batches(self, batch: SmallBatch) -> None:
        if self.by_weights:
            one, four = (self._results(batch, totals=replace(batch.totals(), micro_batches=n)) for n in (1, 4))
            self._agree(one, four, "with one micro-batch on each rank and with four", batch)
        else:
            self._parts_agree(batch, "micro_batches")

    def ranks(self) -> None:
        if self.by_weights:
            super().ranks()
        else:
            self._comparable_only()
            self._over(self.varied, lambda batch: self._parts_agree(batch, "processes"))

    @over("varied", compares=True)
    def totals(self, batch: SmallBatch) -> None:
        only_if(self.by_weights, "skip_zero_variance is for weights")
        size = len(batch.rows) // len({row.group for row in batch.rows})
        dead = [Row(_DEAD + i, _DEAD, (0,) * (i % 3), batch.rows[0].rewards) for i in range(size)]
        more = replace(batch, rows=(*batch.rows, *dead))
        more_B_T = self._results(more, totals=batch.totals())["weights"][: len(batch.rows), : batch.width]
        what = f"without and with a masked group of {size} rows that is in none of the totals"
        self._agree(self._results(batch), {"weights": more_B_T}, what, batch)


class FilterChecks(TensorChecks):
    """The checks of one filter: a completion's verdict stands, as a number, at each of its tokens."""

    def __init__(self, plugin: Any, setting: Setting) -> None:
        super().__init__(plugin, setting)
        self.sees_advantages = "advantages" in types.FilterDeclaration.of(plugin).needs

    def _results(self, batch: SmallBatch, rollout: Rollout | None = None, **how: Any) -> Results:
        rollout = rollout or self._rollout(batch, **how)
        plugin = self._copy()
        said = flow.group_verdicts(plugin, rollout)
        flow.verdicts_by_group(plugin, said, rollout.group_ids_B.tolist())
        numbers = [2.0 + zlib.crc32(one.encode()) if isinstance(one, str) else float(one) for one in said]
        return {"keep": torch.tensor(numbers, dtype=torch.float64).unsqueeze(1).expand(rollout.mask_B_T.shape)}


class TokenLossChecks(TensorChecks):
    """The checks of one token loss: of its losses, their gradient in the log-probabilities, and what it measures."""

    def __init__(self, plugin: Any, setting: Setting) -> None:
        self.declared = types.TokenLossDeclaration.of(plugin)
        self.independent = self.declared.independent
        super().__init__(plugin, setting)

    def _terms(self, batch: SmallBatch, plugin: Any, rollout: Rollout, **how: Any) -> types.LossTerms:
        forward = batch.forward(**how)
        rows = rollout.local_rows
        assert rollout.advantages_B_T is not None  # the rollout is one of an aggregation
        return types.LossTerms(
            logps_B_T=forward.logps_B_T[rows],
            old_logps_B_T=forward.old_logps_B_T[rows],
            advantages_B_T=rollout.advantages_B_T,
            mask_B_T=rollout.mask_B_T,
            entropies_B_T=forward.entropies_B_T[rows],
            ref_logps_B_T=None if forward.ref_logps_B_T is None else forward.ref_logps_B_T[rows],
            sampling_logps_B_T=rollout.sampling_logps_B_T,
            completion_ids_B_T=rollout.completion_ids_B_T,
            rewards_B=rollout.rewards_B,
            carried_B_T=token_losses.carried_values(plugin, rollout),
            step=rollout.step,
        )

    def _results(self, batch: SmallBatch, rollout: Rollout | None = None, **how: Any) -> Results:
        plugin = self._copy()
        terms = self._terms(batch, plugin, rollout or self._rollout(batch, **how), **how)
        loss_B_T, slope_B_T = token_losses.value_and_slope(plugin, terms)
        seen = {f"measures: {name}": values_B_T for name, values_B_T in token_losses.measured(plugin, terms).items()}
        return {"loss": loss_B_T, "its gradient": slope_B_T, **seen}

    def odd_batches(self) -> None:
        def unmoved(batch: SmallBatch) -> None:
            plugin = self._copy()
            terms = self._terms(batch, plugin, self._rollout(batch))
            token_losses.value_and_slope(plugin, replace(terms, logps_B_T=terms.old_logps_B_T))

        super().odd_batches()
        self._over(self.ordinary, unmoved, "where the policy is the one that sampled")

    def ranks(self) -> None:
        only_if(implements(self.plugin, "on_rollout"), "it has no on_rollout")
        super().ranks()

    def no_effect(self) -> str:
        if any(bool(self._results(batch)["its gradient"].any()) for batch in self.varied):
            return ""
        return "its gradient is 0 on all of the kit's batches; give it parameters with which it acts"


def compare(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    what: str,
    at: SmallBatch,
    relative: float = RELATIVE,
    absolute: float = ABSOLUTE,
) -> None:
    """Compare two results `(B, T)` on the mask; `what` names the two, as in "with padding and without"."""
    ours, theirs = ours.double(), theirs.double()  # a plugin may return float32 for either
    close = torch.isclose(ours, theirs, rtol=relative, atol=absolute, equal_nan=True) | (at.mask() == 0)
    if not bool(close.all()):
        place = (~close).nonzero()[0].tolist()
        raise Broken(f"{what}: {_both(ours, theirs, place, 6 if absolute else 17)}", at)


def _two_advantages(batch: SmallBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.incoming(), 2.0 * batch.incoming() + batch.mask()


def _both(ours: torch.Tensor, theirs: torch.Tensor, place: list[int], digits: int = 6) -> str:
    row, token = place
    values = [number(table[row, token], digits) for table in (ours, theirs)]
    return f"{' and '.join(values)} at row {row}, token {token}"


def number(value: torch.Tensor | float, digits: int = 6) -> str:
    return f"{float(value):.{digits}g}"


def _json(hook: Any) -> str:
    return json.dumps(hook.state_dict(), sort_keys=True, default=repr) if hasattr(hook, "state_dict") else ""
