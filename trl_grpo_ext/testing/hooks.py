"""The rules of advantage hooks, each as a check on small generation batches."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from ..credit.flow import run_hook, run_shaper
from ..errors import PluginRunError, TRLGRPOExtError
from ..types import HOOK_METHODS, Forward, HookDeclaration, Rollout, implements, role_of
from .batches import Setting, SmallBatch, equal_rewards, negative_batch
from .rules import Broken, NotChecked, only_if, plugin_code, through_json
from .tensor_checks import Results, TensorChecks, compare, number

_NOTHING = 1e-9
"""Advantages up to this size are, in float64, what rounding leaves of zero."""


class HookChecks(TensorChecks):
    """The checks of one hook."""

    prefix = "hook"

    def __init__(self, plugin: Any, setting: Setting) -> None:
        self.declared = HookDeclaration.of(plugin)
        super().__init__(plugin, replace(setting, teachers=self.declared.teachers))
        self.stages = [stage for stage in HOOK_METHODS if implements(plugin, stage)]
        self.at_rollout = next((stage for stage in self.stages if stage != "on_forward"), None)

    def _rollout(self, batch: SmallBatch, **settings: Any) -> Rollout:
        return batch.rollout(**settings)

    def _context(self, batch: SmallBatch, stage: str, **settings: Any) -> Rollout | Forward:
        return batch.forward(**settings) if stage == "on_forward" else batch.rollout(**settings)

    def _run(self, hook: Any, stage: str, advantages_B_T: torch.Tensor, context: Any) -> torch.Tensor:
        """The flow's result for one method, `(B, T)`; a completion's reward stands at each of its tokens."""
        if stage != "on_rewards":
            return run_hook(hook, stage, advantages_B_T, context)
        added = run_shaper(hook, context)
        return added if added.dim() == 2 else added.unsqueeze(1).expand_as(context.mask_B_T) * context.mask_B_T

    def _results(self, batch: SmallBatch, *, plugin: Any = None, **how: Any) -> Results:
        # The advantages that come in are always zero off the mask: the flow sees to it.
        incoming_B_T = batch.incoming(how.get("width"), how.get("dtype", torch.float64))
        return [
            (stage, self._run(self._copy(plugin), stage, incoming_B_T, self._context(batch, stage, **how)))
            for stage in self.stages
        ]

    def _raw(self, stage: str, advantages_B_T: torch.Tensor, context: Any) -> Any:
        with torch.no_grad():
            return getattr(self._copy(), stage)(*(context,) if stage == "on_rewards" else (advantages_B_T, context))

    def _result_on_rank(self, batch: SmallBatch, rollout: Rollout) -> torch.Tensor:
        assert self.at_rollout is not None
        return self._run(self._copy(), self.at_rollout, batch.incoming()[rollout.local_rows], rollout)

    def _at_rollout(self, batch: SmallBatch, advantages_B_T: torch.Tensor, **how: Any) -> torch.Tensor:
        return run_hook(self._copy(), "on_rollout", advantages_B_T, batch.rollout(**how))

    def _all_stages(self, hook: Any, batch: SmallBatch, training: bool = True) -> torch.Tensor:
        """The stages of one hook object, one after the other."""
        advantages_B_T = batch.incoming()
        for stage in self.stages:
            advantages_B_T = self._run(hook, stage, advantages_B_T, self._context(batch, stage, training=training))
        return advantages_B_T

    def _rollout_only(self) -> None:
        only_if(self.at_rollout is not None, "it acts at the loss forward alone")

    def form(self) -> None:
        if not self.stages:
            has = [name for name in dir(self.plugin) if not name.startswith("_")][:8]
            raise Broken(f"it has none of {', '.join(HOOK_METHODS)}; it has {', '.join(has) or 'nothing'}")
        self._contract("advantage_hook", self.plugin)

    def role(self) -> None:
        self._comparable_only()
        role = role_of(self.plugin)
        if self.at_rollout != "on_rollout":
            raise NotChecked(f"it is a {role} hook" if role == "forward" else f"it is a {role}")
        changed = []

        def judge(batch: SmallBatch) -> None:
            mask_B_T = batch.mask()
            given = (batch.incoming(), 2.0 * batch.incoming() + mask_B_T)
            one_B_T, other_B_T = (self._at_rollout(batch, advantages_B_T) for advantages_B_T in given)
            if role == "estimator":
                what = "it is an estimator, and with other advantages coming in"
                compare(one_B_T, other_B_T, what, batch, mask_B_T)
                return
            changed.append(not torch.equal(one_B_T, other_B_T))
            if self.declared.last:
                up_B_T, down_B_T = (self._at_rollout(batch, sign * torch.ones_like(mask_B_T)) for sign in (1.0, -1.0))
                for before_B_T, after_B_T in zip(given, (one_B_T, other_B_T), strict=True):
                    kept_B_T = (before_B_T != 0) & (torch.where(before_B_T >= 0, up_B_T, down_B_T) != 0)
                    what = "whether it, a mask, leaves an advantage, and whether it leaves 1 of the same sign"
                    compare((after_B_T != 0).double(), kept_B_T.double(), what, batch, mask_B_T, exactly=True)

        self._over(self.ordinary, judge)
        if role == "transform" and changed and not any(changed):
            advice = 'declare role="estimator"'
            raise Broken(f"it is a transform, and its result does not depend on the incoming advantages: {advice}")

    def equal_rewards(self) -> None:
        self._comparable_only()
        if role_of(self.plugin) != "estimator":
            raise NotChecked("it is not an estimator")

        def judge(batch: SmallBatch) -> None:
            exact_B_T, rounded_B_T = (
                self._at_rollout(batch, batch.incoming(dtype=dtype), dtype=dtype)
                for dtype in (torch.float64, torch.float32)
            )
            near_B_T = (exact_B_T.abs() < _NOTHING) & ((exact_B_T != 0) | (rounded_B_T != 0))
            if bool(near_B_T.any()):
                row, token = (int(i) for i in near_B_T.nonzero()[0])
                values = [number(table[row, token]) for table in (exact_B_T, rounded_B_T)]
                found = f"{values[0]} in float64 and {values[1]} in float32 at row {row}, token {token}"
                advice = "take means with trl_grpo_ext.credit.groups.group_mean, or of differences between rewards"
                raise Broken(f"where all rewards of a group are equal, {found}; {advice}", batch)

        self._over(equal_rewards(self.setting), judge)

    def needs(self) -> None:
        needs = self.declared.needs
        listed = f"with what it lists in `needs` ({', '.join(needs) or 'nothing'}) "

        def judge(batch: SmallBatch) -> None:
            with plugin_code(batch, before=listed, after="; with everything it runs"):
                if self.at_rollout is not None:
                    self._raw(self.at_rollout, batch.incoming(), batch.rollout(needs=needs))
                if "on_forward" in self.stages:
                    self._raw("on_forward", batch.incoming(), batch.forward(ref="ref_logps" in needs))

        self._over(self.ordinary, judge)

    def dtype(self) -> None:
        def judge(batch: SmallBatch) -> None:
            for dtype in (torch.float32, torch.float64):
                for stage in self.stages:
                    given_B_T = batch.incoming(dtype=dtype)
                    result = self._raw(stage, given_B_T, self._context(batch, stage, dtype=dtype))
                    of_result = (result.dtype, result.device) if isinstance(result, torch.Tensor) else None
                    if of_result not in (None, (given_B_T.dtype, given_B_T.device)):
                        given = f"{given_B_T.dtype} on {given_B_T.device}"
                        returned = f"{result.dtype} on {result.device}"
                        raise Broken(f"{stage} was given a tensor of {given} and returned one of {returned}", batch)

        only_if(self.at_rollout != "on_rewards", "it is a shaper: it takes no advantages")
        self._over(self.ordinary, judge)
        super().dtype()

    def finite(self) -> None:
        super().finite()

        def judge(batch: SmallBatch) -> None:
            try:
                self._results(batch)
            except TRLGRPOExtError as error:
                if isinstance(error, PluginRunError) or getattr(error, "breaks", None):
                    raise
                # Any other is a refusal in words, which is no NaN.

        self._over([negative_batch(self.setting)], judge, "negative rewards", "finite")

    def order(self) -> None:
        def within_groups(batch: SmallBatch) -> list[int]:
            return sorted(range(len(batch.rows)), key=lambda place: (batch.rows[place].group, -place))

        def across_groups(batch: SmallBatch) -> list[int]:
            return sorted(range(len(batch.rows)), key=lambda place: (-batch.rows[place].group, place))

        self._permuted(within_groups, "a group's completions in order and the other way round")
        self._permuted(across_groups, "the groups in order and the other way round")

    def split(self) -> None:
        self._rollout_only()
        self._on_one_rank_and_on_several()

    def gathers(self) -> None:
        self._rollout_only()
        super().gathers()

    def micro_batches(self) -> None:
        self._comparable_only()
        only_if("on_forward" in self.stages, "it has no on_forward")
        only_if(self.declared.independent, "it does not declare independent=True")

        def judge(batch: SmallBatch) -> None:
            incoming_B_T = batch.incoming()
            mask_B_T = batch.mask()
            forward = batch.forward()
            whole_B_T = run_hook(self._copy(), "on_forward", incoming_B_T, forward)
            for row in range(len(batch.rows)):
                here = slice(row, row + 1)
                # All that is known of a row comes along, its group's mean and spread too.
                alone_1_T = run_hook(self._copy(), "on_forward", incoming_B_T[here], _rows(forward, here))
                what = f"row {row} among {len(batch.rows)} rows and alone"
                compare(whole_B_T[here], alone_1_T, what, batch, mask_B_T[here])

        self._over(self.varied, judge)

    def state(self) -> None:
        has = [name for name in ("state_dict", "load_state_dict") if implements(self.plugin, name)]
        only_if(has, "it has no state_dict: it remembers nothing")
        if len(has) == 1:
            raise Broken(f"it has {has[0]} and not the other of state_dict and load_state_dict")
        self._comparable_only()

        def judge(batch: SmallBatch) -> None:
            used = self._copy()
            resumed = self._copy()
            self._all_stages(used, batch)
            resumed.load_state_dict(through_json(used.state_dict()))
            if _json(resumed) != _json(used):
                raise Broken(f"after load_state_dict its state is {_json(resumed)}, not {_json(used)}", batch)
            on_B_T = self._all_stages(used, batch)
            resumed_B_T = self._all_stages(resumed, batch)
            compare(on_B_T, resumed_B_T, "going on, and resumed from its state", batch, batch.mask())

        self._over(self.varied, judge)

    def evaluation(self) -> None:
        self._comparable_only()

        def judge(batch: SmallBatch) -> None:
            trained = self._copy()
            evaluated = self._copy()
            before = _json(evaluated)
            self._all_stages(evaluated, batch, training=False)
            if _json(evaluated) != before:
                raise Broken(f"evaluation changed its state from {before} to {_json(evaluated)}", batch)
            what = "training, without and with an evaluation before"
            compare(self._all_stages(trained, batch), self._all_stages(evaluated, batch), what, batch, batch.mask())

        self._over(self.varied, judge)

    def no_effect(self) -> str:
        """Whether the hook changed the advantage, or the reward, of any live token of the batches."""
        for batch in (replace(batch, advantages="token") for batch in self.varied):
            try:
                result_B_T = self._all_stages(self._copy(), batch)
            except Exception:  # a rule has reported it
                continue
            before_B_T = torch.zeros_like(result_B_T) if self.at_rollout == "on_rewards" else batch.incoming()
            if bool((~torch.isclose(result_B_T, before_B_T) & (batch.mask() > 0)).any()):
                return ""
        return "it changed no token of the kit's batches; give it completions or parameters"


def _rows(forward: Forward, rows: slice) -> Forward:
    of_rows: dict[str, Any] = {name: value[rows] for name, value in vars(forward).items() if torch.is_tensor(value)}
    return replace(forward, **of_rows)


def _json(hook: Any) -> str:
    """What a hook remembers, as text; empty if it has no state_dict."""
    return json.dumps(hook.state_dict(), sort_keys=True, default=repr) if hasattr(hook, "state_dict") else ""
