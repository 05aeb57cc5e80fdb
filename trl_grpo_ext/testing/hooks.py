"""The rules of advantage hooks, each as a check on small generation batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..credit.flow import run_hook, run_shaper
from ..errors import PluginContractError, PluginRunError, TRLGRPOExtError
from ..types import HOOK_METHODS, NEEDS, Forward, Rollout, implements, role_of
from .builders import Scene, Setting, dead_batches, equal_rewards, negative_batch, odd_batches, with_empty_rows
from .rules import Broken, NotChecked, cause_of, describe_exception, fresh_copy
from .trials import Trials, compare, format_number

_NOTHING = 1e-9
"""Advantages up to this size are, in float64, what rounding leaves of zero."""


class HookChecks(Trials):
    """The checks of one hook, as `Trials`."""

    prefix = "hook"

    def __init__(self, plugin: Any, setting: Setting, deterministic: bool = True) -> None:
        teachers = getattr(plugin, "teachers", ())
        if isinstance(teachers, tuple | list):
            setting = replace(setting, teachers=tuple(name for name in teachers if isinstance(name, str)))
        super().__init__(plugin, setting, deterministic)
        self.stages = [stage for stage in HOOK_METHODS if implements(plugin, stage)]
        self.at_rollout = next((stage for stage in self.stages if stage != "on_forward"), None)

    # ------------------------------------------------------------------------------------------ running it

    def _context(self, scene: Scene, stage: str, **settings: Any) -> Rollout | Forward:
        return scene.forward(**settings) if stage == "on_forward" else scene.rollout(**settings)

    def _run(self, hook: Any, stage: str, advantages_B_T: torch.Tensor, context: Any) -> torch.Tensor:
        """The flow's result for one method, `(B, T)`; a completion's reward stands at each of its tokens."""
        if stage != "on_rewards":
            return run_hook(hook, stage, advantages_B_T, context)
        added = run_shaper(hook, context)
        return added if added.dim() == 2 else added.unsqueeze(1).expand_as(context.mask_B_T) * context.mask_B_T

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
        settings: dict[str, Any] = {"width": width, "padding": padding, "padding_id": 7 if padding else 0}
        settings |= {"dtype": dtype, "logps_dtype": logps_dtype}
        hook = self.plugin if plugin is None else plugin
        # The advantages that come in are always zero off the mask: the flow sees to it.
        return [
            (
                stage,
                self._run(
                    fresh_copy(hook), stage, scene.incoming(width, dtype), self._context(scene, stage, **settings)
                ),
            )
            for stage in self.stages
        ]

    def _raw(self, stage: str, advantages_B_T: torch.Tensor, context: Any) -> Any:
        with torch.no_grad():
            return self._call(fresh_copy(self.plugin), stage, advantages_B_T, context)

    @staticmethod
    def _call(hook: Any, stage: str, advantages_B_T: torch.Tensor, context: Any) -> Any:
        given = (context,) if stage == "on_rewards" else (advantages_B_T, context)
        return getattr(hook, stage)(*given)

    def _unsent(self, scene: Scene) -> Iterator[tuple[Any, dict[str, torch.Tensor], Callable[[], Any]]]:
        for stage in self.stages:
            incoming_B_T, context = scene.incoming(), self._context(scene, stage)

            def call(stage: str = stage, incoming_B_T: torch.Tensor = incoming_B_T, context: Any = context) -> Any:
                return self._raw(stage, incoming_B_T, context)

            yield context, {} if stage == "on_rewards" else {"advantages_B_T": incoming_B_T}, call

    def _rollout(self, scene: Scene, **settings: Any) -> Rollout:
        return scene.rollout(**settings)

    def _on_a_rank(self, scene: Scene, rollout: Rollout) -> torch.Tensor:
        assert self.at_rollout is not None
        return self._run(fresh_copy(self.plugin), self.at_rollout, scene.incoming()[rollout.local_rows], rollout)

    def _chain(self, hook: Any, scene: Scene, training: bool = True) -> torch.Tensor:
        """The stages of one hook object, one after the other."""
        advantages_B_T = scene.incoming()
        for stage in self.stages:
            advantages_B_T = self._run(hook, stage, advantages_B_T, self._context(scene, stage, training=training))
        return advantages_B_T

    def _rollout_only(self) -> None:
        if self.at_rollout is None:
            raise NotChecked("it acts at the loss forward alone")

    def _takes_advantages_only(self) -> None:
        if self.at_rollout == "on_rewards":
            raise NotChecked("it is a shaper: it takes no advantages")

    # ------------------------------------------------------------------------------------------ its rules

    def form(self) -> None:
        """A method and its role."""
        if not self.stages:
            has = [name for name in dir(self.plugin) if not name.startswith("_")][:8]
            raise Broken(f"it has none of {', '.join(HOOK_METHODS)}; it has {', '.join(has) or 'nothing'}")
        try:
            role_of(self.plugin, "it")
        except PluginContractError as error:
            raise Broken(str(error)) from error

    def role(self) -> None:
        """An estimator ignores the incoming advantages, a transform does not; a mask keeps them or sets them to 0."""
        self._deterministic_only()
        role = role_of(self.plugin)
        if self.at_rollout != "on_rollout":
            raise NotChecked(f"it is a {role} hook" if role == "forward" else f"it is a {role}")
        moved = []

        def judge(scene: Scene) -> None:
            rollout, mask_B_T = scene.rollout(), scene.mask()
            given = (scene.incoming(), 2.0 * scene.incoming() + mask_B_T)
            one_B_T, other_B_T = (run_hook(fresh_copy(self.plugin), "on_rollout", a_B_T, rollout) for a_B_T in given)
            if role == "estimator":
                what = "it is an estimator, and with other advantages coming in"
                compare(one_B_T, other_B_T, what, scene, mask_B_T)
                return
            moved.append(not torch.equal(one_B_T, other_B_T))
            if getattr(self.plugin, "last", False):
                for before_B_T, after_B_T in zip(given, (one_B_T, other_B_T), strict=True):
                    kept_B_T = (before_B_T != 0) & ~self._taken(before_B_T, rollout)
                    what = "whether it, a mask, leaves an advantage, and whether it leaves 1 of the same sign"
                    compare((after_B_T != 0).double(), kept_B_T.double(), what, scene, mask_B_T, exactly=True)

        self._over(self.ordinary, judge)
        if role == "transform" and moved and not any(moved):
            raise Broken(
                "it is a transform, and what it returns does not depend on the advantages that come in: write "
                'role = "estimator"'
            )

    def _taken(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Where a mask gives an advantage of 1, or of -1, of the same sign 0."""
        ones_B_T = torch.ones_like(advantages_B_T)
        up_B_T, down_B_T = (
            run_hook(fresh_copy(self.plugin), "on_rollout", sign * ones_B_T, rollout) for sign in (1.0, -1.0)
        )
        return torch.where(advantages_B_T >= 0, up_B_T, down_B_T) == 0

    def equal_rewards(self) -> None:
        """Exactly 0 or far from it."""
        self._deterministic_only()
        if role_of(self.plugin) != "estimator":
            raise NotChecked("it is not an estimator")

        def judge(scene: Scene) -> None:
            exact_B_T, rounded_B_T = (
                run_hook(fresh_copy(self.plugin), "on_rollout", scene.incoming(dtype=dtype), scene.rollout(dtype=dtype))
                for dtype in (torch.float64, torch.float32)
            )
            near_B_T = (exact_B_T.abs() < _NOTHING) & ((exact_B_T != 0) | (rounded_B_T != 0))
            if bool(near_B_T.any()):
                row, token = (int(i) for i in near_B_T.nonzero()[0])
                values = format_number(exact_B_T[row, token]), format_number(rounded_B_T[row, token])
                advice = "take means with trl_grpo_ext.credit.groups.group_mean, or of differences between rewards"
                raise Broken(
                    f"where all rewards of a group are equal, {values[0]} in float64 and {values[1]} in float32 at row "
                    f"{row}, token {token}; {advice}",
                    str(scene),
                )

        self._over(equal_rewards(self.setting), judge)

    def run(self) -> None:
        """No exception on ordinary batches."""
        self._over(self.ordinary, lambda scene: [call() for *_, call in self._unsent(scene)])

    def needs(self) -> None:
        """Everything that it reads is in `needs`."""
        needs, teachers = getattr(self.plugin, "needs", ()), getattr(self.plugin, "teachers", ())
        for name, value in (("needs", needs), ("teachers", teachers)):
            if isinstance(value, str) or not isinstance(value, tuple | list) or not all(map(_is_name, value)):
                raise Broken(f"`{name}` must be a tuple of names, and is {value!r:.200}")
        unknown = [name for name in needs if name not in NEEDS]
        if unknown:
            raise Broken(f"`needs` lists {unknown[0]!r}, and there are {', '.join(NEEDS)}")

        def judge(scene: Scene) -> None:
            try:
                if self.at_rollout is not None:
                    self._raw(self.at_rollout, scene.incoming(), scene.rollout(needs=tuple(needs)))
                if "on_forward" in self.stages:
                    self._raw("on_forward", scene.incoming(), scene.forward(ref="ref_logps" in needs))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the plugin's own, whatever it is
                has = ", ".join(needs) or "nothing"
                message = f"with what it lists in `needs` ({has}) {describe_exception(error)}; with everything it runs"
                raise Broken(message, str(scene), cause_of(error)) from error

        self.over(self.ordinary, judge, Scene.smaller)

    def shape(self) -> None:
        """`(B, T)` or spans."""
        single = [replace(scene, rows=scene.rows[:2]) for scene in self.ordinary]
        self._over([*self.ordinary, *single], self._results, breaks=("shape", None))

    def dtype(self) -> None:
        """The advantages' dtype and device come back."""
        self._takes_advantages_only()

        def judge(scene: Scene) -> None:
            for dtype in (torch.float32, torch.float64):
                for stage in self.stages:
                    given_B_T = scene.incoming(dtype=dtype)
                    result = self._raw(stage, given_B_T, self._context(scene, stage, dtype=dtype))
                    if not isinstance(result, torch.Tensor):
                        continue
                    for one, other in ((given_B_T.dtype, result.dtype), (given_B_T.device, result.device)):
                        if one != other:
                            raise Broken(f"{stage} was given a tensor of {one} and returned one of {other}", str(scene))

        self._over(self.ordinary, judge)
        self._in_half()

    def long(self) -> None:
        """Thousands of tokens."""
        self._long(1e-2)

    def mask(self) -> None:
        """Garbage off the mask does not spread."""
        self._off_the_mask()

    def finite(self) -> None:
        """Finite advantages on odd batches."""
        named: dict[str, Scene] = {f"an ordinary batch ({n})": scene for n, scene in enumerate(self.ordinary)}
        named |= {**odd_batches(self.setting), **with_empty_rows(self.setting), **dead_batches(self.setting)}
        for what, scene in named.items():
            self._over([scene], self._results, what, breaks=("finite", None))

        def judge(scene: Scene) -> None:
            try:
                self._results(scene)
            except TRLGRPOExtError as error:
                if isinstance(error, PluginRunError) or getattr(error, "breaks", None):
                    raise
                # Any other is a refusal in words, which is no NaN.

        self._over([negative_batch(self.setting)], judge, "negative rewards", breaks=("finite", None))

    def gradient(self) -> None:
        """No grad comes out."""

        def judge(scene: Scene) -> None:
            for stage in self.stages:
                with torch.enable_grad():
                    result = self._call(fresh_copy(self.plugin), stage, scene.incoming(), self._context(scene, stage))
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    advice = "compute it under torch.no_grad() or detach it"
                    raise Broken(f"what {stage} returned requires grad ({result.grad_fn}); {advice}", str(scene))

        self._over(self.ordinary, judge)

    def row_permutation(self) -> None:
        """The rows of a group in reverse order."""

        def turned(scene: Scene) -> list[int]:
            return sorted(range(len(scene.rows)), key=lambda place: (_first(scene, place), -place))

        self._permuted(turned, "a group's completions in order and the other way round")

    def group_permutation(self) -> None:
        """Groups in reverse order."""

        def turned(scene: Scene) -> list[int]:
            return sorted(range(len(scene.rows)), key=lambda place: (-_first(scene, place), place))

        self._permuted(turned, "the groups in order and the other way round")

    def split(self) -> None:
        """One rank, two, three."""
        self._rollout_only()
        self._split()

    def gathers(self) -> None:
        """Equally often on each rank."""
        self._rollout_only()
        super().gathers()

    def micro_batches(self) -> None:
        """With `per_completion`, each row alone."""
        self._deterministic_only()
        if "on_forward" not in self.stages:
            raise NotChecked("it has no on_forward")
        if getattr(self.plugin, "per_completion", False) is not True:
            raise NotChecked("it does not declare per_completion = True")

        def judge(scene: Scene) -> None:
            incoming_B_T, mask_B_T, forward = scene.incoming(), scene.mask(), scene.forward()
            whole_B_T = run_hook(fresh_copy(self.plugin), "on_forward", incoming_B_T, forward)
            for row in range(len(scene.rows)):
                here = slice(row, row + 1)
                # All that is known of a row comes along, its group's mean and spread too.
                alone_1_T = run_hook(fresh_copy(self.plugin), "on_forward", incoming_B_T[here], _rows(forward, here))
                what = f"row {row} among {len(scene.rows)} rows and alone"
                compare(whole_B_T[here], alone_1_T, what, scene, mask_B_T[here])

        self._over(self.varied, judge)

    def composition(self) -> None:
        """Token-level advantages in, and its own result."""
        self._takes_advantages_only()

        def judge(scene: Scene) -> None:
            for stage, result_B_T in self._results(scene):
                run_hook(fresh_copy(self.plugin), stage, result_B_T, self._context(scene, stage))

        self._over([replace(scene, advantages="token") for scene in self.ordinary], judge, breaks=("finite", None))

    def state(self) -> None:
        """Through JSON and back."""
        has = [name for name in ("state_dict", "load_state_dict") if callable(getattr(self.plugin, name, None))]
        if not has:
            raise NotChecked("it has no state_dict: it remembers nothing")
        if len(has) == 1:
            raise Broken(f"it has {has[0]} and not the other of state_dict and load_state_dict")
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            used, resumed = fresh_copy(self.plugin), fresh_copy(self.plugin)
            self._chain(used, scene)
            state = used.state_dict()
            try:
                travelled = json.loads(json.dumps(state, allow_nan=True))
            except (TypeError, ValueError) as error:
                raise Broken(f"state_dict() is not a mapping of JSON values: {error}", f"{state!r:.200}") from error
            if not isinstance(travelled, Mapping):
                raise Broken(f"state_dict() must be a mapping, and is {type(state).__name__}", f"{state!r:.200}")
            resumed.load_state_dict(travelled)
            if _json(resumed.state_dict()) != _json(state):
                message = f"after load_state_dict its state is {_json(resumed.state_dict())}, not {_json(state)}"
                raise Broken(message, str(scene))
            on_B_T, resumed_B_T = self._chain(used, scene), self._chain(resumed, scene)
            compare(on_B_T, resumed_B_T, "going on, and resumed from its state", scene, scene.mask())

        self._over(self.varied, judge)

    def evaluation(self) -> None:
        """Evaluation leaves no trace."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            trained, evaluated = fresh_copy(self.plugin), fresh_copy(self.plugin)
            state = _json(evaluated.state_dict()) if callable(getattr(evaluated, "state_dict", None)) else None
            self._chain(evaluated, scene, training=False)
            if state is not None and _json(evaluated.state_dict()) != state:
                message = f"evaluation changed its state from {state} to {_json(evaluated.state_dict())}"
                raise Broken(message, str(scene))
            what = "training, without and with an evaluation before"
            compare(self._chain(trained, scene), self._chain(evaluated, scene), what, scene, scene.mask())

        self._over(self.varied, judge)

    def measured(self) -> dict[str, float | str]:
        """How often it acts; empty if it cannot be run."""
        try:
            return {"share_of_tokens_changed": self.share_changed()}
        except Exception:  # of a plugin that breaks a rule
            return {}

    def unshown(self) -> str:
        """It never acted."""
        acted = self.measured().get("share_of_tokens_changed", 1.0)
        return "" if acted else "it changed no token of the kit's batches; give it completions or parameters"

    def share_changed(self) -> float:
        """Share of the batches' live tokens whose advantage, or reward, the hook changed: 0 means it never acted."""
        changed = live = 0
        for scene in (replace(scene, advantages="token") for scene in self.varied):
            mask_B_T = scene.mask()
            try:
                result_B_T = self._chain(fresh_copy(self.plugin), scene)
            except TRLGRPOExtError:  # a rule has reported it
                continue
            before_B_T = torch.zeros_like(result_B_T) if self.at_rollout == "on_rewards" else scene.incoming()
            different_B_T = ~torch.isclose(result_B_T, before_B_T) & (mask_B_T > 0)
            changed, live = changed + int(different_B_T.sum()), live + int((mask_B_T > 0).sum())
        return changed / max(live, 1)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _first(scene: Scene, place: int) -> int:
    """Where a row's group begins."""
    return next(i for i, row in enumerate(scene.rows) if row.group == scene.rows[place].group)


def _rows(forward: Forward, rows: slice) -> Forward:
    of_rows: dict[str, Any] = {
        name: value[rows]
        for name in forward.__dataclass_fields__
        if isinstance(value := getattr(forward, name), torch.Tensor)
    }
    return replace(forward, **of_rows)


def _json(state: Any) -> str:
    return json.dumps(state, sort_keys=True, default=repr)
