"""The rules of advantage hooks, each as a check on small generation batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import TRLGRPOExtError
from ..types import NEEDS, Forward
from .comparing import Unchanged, fresh, number, pickled, same
from .hook_trials import HookTrials
from .running import Broken, NotChecked, over, raised
from .scenes import Scene, negative, nothing_live, odd, wider, with_empty_rows

GATES = ("hook.form", "hook.run", "hook.shape")
GARBAGE = (1e4, float("nan"))
"""What may stand off the mask."""


class HookChecks(HookTrials):
    """The checks of one plugin, made as `HookTrials`."""

    def by_rule(self) -> dict[str, Callable[[], None]]:
        """Each rule's check."""
        return {f"hook.{name}": getattr(self, name) for name in _RULES}

    def form(self) -> None:
        """One or both methods."""
        if not self.stages:
            has = [name for name in dir(self.hook) if not name.startswith("_")][:8]
            raise Broken(f"it has neither on_rollout nor on_forward; it has {', '.join(has) or 'nothing'}")

    def run(self) -> None:
        """No exception on ordinary batches."""
        self._over(self.ordinary, lambda scene: self._each_stage(scene, lambda result, *_: None))

    def needs(self) -> None:
        """Everything that it reads is in `needs`."""
        needs, teachers = getattr(self.hook, "needs", ()), getattr(self.hook, "teachers", ())
        for name, value in (("needs", needs), ("teachers", teachers)):
            if isinstance(value, str) or not isinstance(value, tuple | list) or not all(map(_is_name, value)):
                raise Broken(f"`{name}` must be a tuple of names, and is {value!r:.200}")
        unknown = [name for name in needs if name not in NEEDS]
        if unknown:
            raise Broken(f"`needs` lists {unknown[0]!r}, and there are {', '.join(NEEDS)}")

        def judge(scene: Scene) -> None:
            try:
                if "on_rollout" in self.stages:
                    self._raw("on_rollout", scene.incoming(), scene.rollout(needs=tuple(needs)))
                if "on_forward" in self.stages:
                    self._raw("on_forward", scene.incoming(), scene.forward(ref="ref_logps" in needs))
            except Exception as error:  # the plugin's own, whatever it is
                has = ", ".join(needs) or "nothing"
                message = f"with what it lists in `needs` ({has}) it {raised(error)}; with everything it runs"
                raise Broken(message, str(scene)) from error

        over(self.ordinary, judge, Scene.smaller)

    def shape(self) -> None:
        """`(B, T)` or spans."""

        def judge(result: Any, stage: str, context: Any, scene: Scene) -> None:
            if stage == "on_rollout" and isinstance(result, list | tuple):
                self._spans(result, context, scene)
                return
            wanted = tuple(context.mask_B_T.shape)
            if not isinstance(result, torch.Tensor):
                raise Broken(f"{stage} returned {type(result).__name__}, not a tensor {wanted}", str(scene))
            if tuple(result.shape) != wanted:
                raise Broken(f"{stage} returned shape {tuple(result.shape)}, not {wanted}", str(scene))
            if not result.is_floating_point():
                raise Broken(f"{stage} returned {result.dtype}, not a floating point dtype", str(scene))

        single = [replace(scene, rows=scene.rows[:2]) for scene in self.ordinary]
        self._over([*self.ordinary, *single], lambda scene: self._each_stage(scene, judge))

    def dtype(self) -> None:
        """The advantages' dtype and device come back."""

        def judge(scene: Scene) -> None:
            for dtype in (torch.float32, torch.float64):
                for stage in self.stages:
                    advantages_B_T = scene.incoming(dtype=dtype)
                    result = self._raw(stage, advantages_B_T, self._context(scene, stage, dtype=dtype))
                    if isinstance(result, torch.Tensor) and result.dtype != dtype:
                        raise Broken(f"{stage} was given {dtype} and returned {result.dtype}", str(scene))
                    if isinstance(result, torch.Tensor) and result.device != advantages_B_T.device:
                        message = (
                            f"{stage} was given a tensor on {advantages_B_T.device}, returned one on {result.device}"
                        )
                        raise Broken(message, str(scene))

        self._over(self.ordinary, judge)

    def mask(self) -> None:
        """Garbage off the mask stays there."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            width = wider(scene)
            mask_B_T = scene.mask(width)
            for stage in self.stages:
                clean_B_T = self._result(stage, scene.incoming(width), self._context(scene, stage, width=width))
                for garbage in GARBAGE:
                    # The advantages that come in are always zero there: the pipeline sees to it.
                    context = self._context(scene, stage, width=width, padding=garbage, padding_id=7)
                    what = f"{stage} with 0 off the mask and with {garbage}"
                    same(clean_B_T, self._result(stage, scene.incoming(width), context), what, scene, mask_B_T)

        self._over(self.varied, judge)

    def finite(self) -> None:
        """Finite advantages on odd batches."""

        def judge_named(what: str) -> Callable[[Scene], None]:
            def judge(scene: Scene) -> None:
                for stage in self.stages:
                    try:
                        result_B_T = self._result(stage, scene.incoming(), self._context(scene, stage))
                    except TRLGRPOExtError:
                        if what == "negative rewards":  # a refusal in words is no NaN
                            continue
                        raise
                    bad = ~torch.isfinite(result_B_T)
                    if bool(bad.any()):
                        row, token = (int(i) for i in bad.nonzero()[0])
                        value = number(result_B_T[row, token])
                        raise Broken(f"{stage} gave {value} at row {row}, token {token} of {what}", str(scene))

            return judge

        named: dict[str, Scene] = {f"an ordinary batch ({n})": scene for n, scene in enumerate(self.ordinary)}
        named |= {**odd(self.setting), **with_empty_rows(self.setting), **nothing_live(self.setting)}
        named["negative rewards"] = negative(self.setting)
        for what, scene in named.items():
            self._over([scene], judge_named(what), what)

    def gradient(self) -> None:
        """No grad comes out."""

        def judge(scene: Scene) -> None:
            for stage in self.stages:
                with torch.enable_grad():
                    result = getattr(fresh(self.hook), stage)(scene.incoming(), self._context(scene, stage))
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    raise Broken(
                        f"what {stage} returned requires grad ({result.grad_fn}); compute it under torch.no_grad() or "
                        "detach it",
                        str(scene),
                    )

        self._over(self.ordinary, judge)

    def inputs(self) -> None:
        """No in-place writes."""

        def judge(scene: Scene) -> None:
            for stage in self.stages:
                advantages_B_T, context = scene.incoming(), self._context(scene, stage)
                unchanged = Unchanged(context, advantages_B_T=advantages_B_T)
                self._raw(stage, advantages_B_T, context)
                unchanged.check(scene)

        self._over(self.varied, judge)

    def row_permutation(self) -> None:
        """Rows of a group the other way round."""

        def turned(scene: Scene) -> list[int]:
            places = list(range(len(scene.rows)))
            return sorted(places, key=lambda place: (_first(scene, place), -place))

        self._permuted(turned, "a group's completions in order and the other way round")

    def group_permutation(self) -> None:
        """Groups the other way round."""

        def turned(scene: Scene) -> list[int]:
            places = list(range(len(scene.rows)))
            return sorted(places, key=lambda place: (-_first(scene, place), place))

        self._permuted(turned, "the groups in order and the other way round")

    def padding(self) -> None:
        """A wider batch."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            for stage in self.stages:
                width, mask_B_T = wider(scene), scene.mask()
                plain_B_T = self._result(stage, scene.incoming(), self._context(scene, stage))
                wide_B_T = self._result(stage, scene.incoming(width), self._context(scene, stage, width=width))
                what = f"{stage} without padding and with {width - scene.width} columns of it"
                same(plain_B_T, wide_B_T[:, : scene.width], what, scene, mask_B_T)

        self._over(self.varied, judge)

    def split(self) -> None:
        """One rank, two, three."""
        self._deterministic_only()
        self._rollout_only()

        def judge(scene: Scene) -> None:
            whole_B_T = self._result("on_rollout", scene.incoming(), scene.rollout())
            for ranks, parts_B_T in self._on_ranks(scene):
                what = f"on one rank and on {ranks} (rows {len(scene.rows) // ranks} each)"
                same(whole_B_T, parts_B_T, what, scene, scene.mask())

        self._over(self.varied, judge, unequal_gathers=False)

    def gathers(self) -> None:
        """Equally often on each rank."""
        self._rollout_only()

        def judge(scene: Scene) -> None:
            for _ in self._on_ranks(scene, unequal_gathers=True):
                pass

        self._over(self.varied, judge)

    def micro_batches(self) -> None:
        """With `per_completion`, each row alone."""
        self._deterministic_only()
        if "on_forward" not in self.stages:
            raise NotChecked("it has no on_forward")
        if getattr(self.hook, "per_completion", False) is not True:
            raise NotChecked("it does not declare per_completion = True")

        def judge(scene: Scene) -> None:
            width, mask_B_T = scene.width, scene.mask()
            whole_B_T = self._result("on_forward", scene.incoming(), scene.forward())
            for row in range(len(scene.rows)):
                # All that is known of a row comes along, its group's mean and spread too.
                alone = _rows(scene.forward(width), slice(row, row + 1))
                alone_1_T = self._result("on_forward", scene.incoming()[row : row + 1], alone)
                what = f"row {row} among {len(scene.rows)} rows and alone"
                same(whole_B_T[row : row + 1], alone_1_T, what, scene, mask_B_T[row : row + 1])

        self._over(self.varied, judge)

    def composition(self) -> None:
        """Token-level advantages in, and its own result."""

        def judge(scene: Scene) -> None:
            for stage in self.stages:
                first_B_T = self._result(stage, scene.incoming(), self._context(scene, stage))
                second_B_T = self._result(stage, first_B_T, self._context(scene, stage))
                for what, result_B_T in (("token-level advantages", first_B_T), ("its own result", second_B_T)):
                    if not bool(torch.isfinite(result_B_T).all()):
                        raise Broken(f"{stage} made advantages that are not finite of {what}", str(scene))

        self._over([replace(scene, advantages="token") for scene in self.ordinary], judge)

    def determinism(self) -> None:
        """Twice the same."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            for stage in self.stages:
                once_B_T, again_B_T = (
                    self._result(stage, scene.incoming(), self._context(scene, stage)) for _ in range(2)
                )
                same(once_B_T, again_B_T, f"{stage}, once and again", scene, scene.mask(), exactly=True)

        self._over(self.varied, judge)

    def state(self) -> None:
        """Through JSON and back."""
        has = [name for name in ("state_dict", "load_state_dict") if callable(getattr(self.hook, name, None))]
        if not has:
            raise NotChecked("it has no state_dict: it remembers nothing")
        if len(has) == 1:
            raise Broken(f"it has {has[0]} and not the other of state_dict and load_state_dict")
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            used, resumed = fresh(self.hook), fresh(self.hook)
            self._chain(used, scene)
            state = used.state_dict()
            try:
                travelled = json.loads(json.dumps(state, allow_nan=True))
            except (TypeError, ValueError) as error:
                raise Broken(f"state_dict() is no mapping of JSON values: {error}", f"{state!r:.200}") from error
            if not isinstance(travelled, Mapping):
                raise Broken(f"state_dict() must be a mapping, and is {type(state).__name__}", f"{state!r:.200}")
            resumed.load_state_dict(travelled)
            if _json(resumed.state_dict()) != _json(state):
                message = f"after load_state_dict its state is {_json(resumed.state_dict())}, not {_json(state)}"
                raise Broken(message, str(scene))
            on_B_T, resumed_B_T = self._chain(used, scene), self._chain(resumed, scene)
            same(on_B_T, resumed_B_T, "going on, and resumed from its state", scene, scene.mask())

        self._over(self.varied, judge)

    def evaluation(self) -> None:
        """Evaluation leaves no trace."""
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            trained, evaluated = fresh(self.hook), fresh(self.hook)
            state = _json(evaluated.state_dict()) if callable(getattr(evaluated, "state_dict", None)) else None
            self._chain(evaluated, scene, training=False)
            if state is not None and _json(evaluated.state_dict()) != state:
                message = f"evaluation changed its state from {state} to {_json(evaluated.state_dict())}"
                raise Broken(message, str(scene))
            what = "training, without and with an evaluation before"
            same(self._chain(trained, scene), self._chain(evaluated, scene), what, scene, scene.mask())

        self._over(self.varied, judge)

    def pickle(self) -> None:
        """There and back."""
        again = pickled(self.hook)
        if not self.deterministic:
            return

        def judge(scene: Scene) -> None:
            ours_B_T, theirs_B_T = self._chain(fresh(self.hook), scene), self._chain(fresh(again), scene)
            same(ours_B_T, theirs_B_T, "before and after pickling", scene, scene.mask())

        self._over(self.ordinary, judge)

    def share_changed(self) -> float:
        """Share of the batches' live tokens whose advantage the hook changed: 0 means it never acted."""
        changed = live = 0
        for scene in (replace(scene, advantages="token") for scene in self.varied):
            mask_B_T = scene.mask()
            try:
                result_B_T = self._chain(fresh(self.hook), scene)
            except Exception:  # a rule has reported it
                continue
            different_B_T = ~torch.isclose(result_B_T, scene.incoming()) & (mask_B_T > 0)
            changed, live = changed + int(different_B_T.sum()), live + int((mask_B_T > 0).sum())
        return changed / max(live, 1)


_RULES = (
    *("form", "run", "needs", "shape", "dtype", "mask", "finite", "gradient", "inputs", "row_permutation"),
    *("group_permutation", "padding", "split", "gathers", "micro_batches", "composition", "determinism", "state"),
    *("evaluation", "pickle"),
)


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
