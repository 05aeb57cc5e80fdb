"""The rules of advantage hooks, each as a check on small generation batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..credit.flow import run_hook
from ..errors import PluginRunError, TRLGRPOExtError
from ..types import NEEDS, Forward, Rollout, implements
from .builders import Scene, Setting, negative, nothing_live, odd, with_empty_rows
from .rules import Broken, NotChecked, over, raised
from .trials import Trials, fresh, same

STAGES = ("on_rollout", "on_forward")


class HookChecks(Trials):
    """The checks of one hook, made as `Trials`."""

    prefix = "hook"

    def __init__(self, plugin: Any, setting: Setting, deterministic: bool = True) -> None:
        teachers = getattr(plugin, "teachers", ())
        if isinstance(teachers, tuple | list):
            setting = replace(setting, teachers=tuple(name for name in teachers if isinstance(name, str)))
        super().__init__(plugin, setting, deterministic)
        self.stages = [stage for stage in STAGES if implements(plugin, stage)]

    # ------------------------------------------------------------------------------------------ running it

    def _context(self, scene: Scene, stage: str, **settings: Any) -> Rollout | Forward:
        return scene.rollout(**settings) if stage == "on_rollout" else scene.forward(**settings)

    def _results(
        self, scene: Scene, *, plugin: Any = None, width: int | None = None, padding: float = 0.0
    ) -> list[tuple[str, torch.Tensor]]:
        settings = {"width": width, "padding": padding, "padding_id": 7 if padding else 0}
        hook = self.plugin if plugin is None else plugin
        # The advantages that come in are always zero off the mask: the flow sees to it.
        return [
            (stage, run_hook(fresh(hook), stage, scene.incoming(width), self._context(scene, stage, **settings)))
            for stage in self.stages
        ]

    def _raw(self, stage: str, advantages_B_T: torch.Tensor, context: Any) -> Any:
        with torch.no_grad():
            return getattr(fresh(self.plugin), stage)(advantages_B_T, context)

    def _unsent(self, scene: Scene) -> Iterator[tuple[Any, dict[str, torch.Tensor], Callable[[], Any]]]:
        for stage in self.stages:
            incoming_B_T, context = scene.incoming(), self._context(scene, stage)

            def call(stage: str = stage, incoming_B_T: torch.Tensor = incoming_B_T, context: Any = context) -> Any:
                return self._raw(stage, incoming_B_T, context)

            yield context, {"advantages_B_T": incoming_B_T}, call

    def _rollout(self, scene: Scene, **settings: Any) -> Rollout:
        return scene.rollout(**settings)

    def _on_a_rank(self, scene: Scene, rollout: Rollout) -> torch.Tensor:
        return run_hook(fresh(self.plugin), "on_rollout", scene.incoming()[rollout.local_rows], rollout)

    def _chain(self, hook: Any, scene: Scene, training: bool = True) -> torch.Tensor:
        """Both stages of one hook object, one after the other."""
        advantages_B_T = scene.incoming()
        for stage in self.stages:
            advantages_B_T = run_hook(hook, stage, advantages_B_T, self._context(scene, stage, training=training))
        return advantages_B_T

    def _rollout_only(self) -> None:
        if "on_rollout" not in self.stages:
            raise NotChecked("it has no on_rollout")

    # ------------------------------------------------------------------------------------------ its rules

    def form(self) -> None:
        """One or both methods."""
        if not self.stages:
            has = [name for name in dir(self.plugin) if not name.startswith("_")][:8]
            raise Broken(f"it has neither on_rollout nor on_forward; it has {', '.join(has) or 'nothing'}")

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
                if "on_rollout" in self.stages:
                    self._raw("on_rollout", scene.incoming(), scene.rollout(needs=tuple(needs)))
                if "on_forward" in self.stages:
                    self._raw("on_forward", scene.incoming(), scene.forward(ref="ref_logps" in needs))
            except Exception as error:  # the plugin's own, whatever it is
                has = ", ".join(needs) or "nothing"
                message = f"with what it lists in `needs` ({has}) {raised(error)}; with everything it runs"
                raise Broken(message, str(scene)) from error

        over(self.ordinary, judge, Scene.smaller)

    def shape(self) -> None:
        """`(B, T)` or spans."""
        single = [replace(scene, rows=scene.rows[:2]) for scene in self.ordinary]
        self._over([*self.ordinary, *single], self._results, breaks=("shape", None))

    def dtype(self) -> None:
        """The advantages' dtype and device come back."""

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

    def mask(self) -> None:
        """Garbage off the mask stays there."""
        self._off_the_mask()

    def finite(self) -> None:
        """Finite advantages on odd batches."""
        named: dict[str, Scene] = {f"an ordinary batch ({n})": scene for n, scene in enumerate(self.ordinary)}
        named |= {**odd(self.setting), **with_empty_rows(self.setting), **nothing_live(self.setting)}
        for what, scene in named.items():
            self._over([scene], self._results, what, breaks=("finite", None))

        def judge(scene: Scene) -> None:
            try:
                self._results(scene)
            except TRLGRPOExtError as error:
                if isinstance(error, PluginRunError) or getattr(error, "breaks", None):
                    raise
                # Any other is a refusal in words, which is no NaN.

        self._over([negative(self.setting)], judge, "negative rewards", breaks=("finite", None))

    def gradient(self) -> None:
        """No grad comes out."""

        def judge(scene: Scene) -> None:
            for stage in self.stages:
                with torch.enable_grad():
                    result = getattr(fresh(self.plugin), stage)(scene.incoming(), self._context(scene, stage))
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    advice = "compute it under torch.no_grad() or detach it"
                    raise Broken(f"what {stage} returned requires grad ({result.grad_fn}); {advice}", str(scene))

        self._over(self.ordinary, judge)

    def row_permutation(self) -> None:
        """Rows of a group the other way round."""

        def turned(scene: Scene) -> list[int]:
            return sorted(range(len(scene.rows)), key=lambda place: (_first(scene, place), -place))

        self._permuted(turned, "a group's completions in order and the other way round")

    def group_permutation(self) -> None:
        """Groups the other way round."""

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
            whole_B_T = run_hook(fresh(self.plugin), "on_forward", incoming_B_T, forward)
            for row in range(len(scene.rows)):
                here = slice(row, row + 1)
                # All that is known of a row comes along, its group's mean and spread too.
                alone_1_T = run_hook(fresh(self.plugin), "on_forward", incoming_B_T[here], _rows(forward, here))
                what = f"row {row} among {len(scene.rows)} rows and alone"
                same(whole_B_T[here], alone_1_T, what, scene, mask_B_T[here])

        self._over(self.varied, judge)

    def composition(self) -> None:
        """Token-level advantages in, and its own result."""

        def judge(scene: Scene) -> None:
            for stage, result_B_T in self._results(scene):
                run_hook(fresh(self.plugin), stage, result_B_T, self._context(scene, stage))

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
            used, resumed = fresh(self.plugin), fresh(self.plugin)
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
            trained, evaluated = fresh(self.plugin), fresh(self.plugin)
            state = _json(evaluated.state_dict()) if callable(getattr(evaluated, "state_dict", None)) else None
            self._chain(evaluated, scene, training=False)
            if state is not None and _json(evaluated.state_dict()) != state:
                message = f"evaluation changed its state from {state} to {_json(evaluated.state_dict())}"
                raise Broken(message, str(scene))
            what = "training, without and with an evaluation before"
            same(self._chain(trained, scene), self._chain(evaluated, scene), what, scene, scene.mask())

        self._over(self.varied, judge)

    def share_changed(self) -> float:
        """Share of the batches' live tokens whose advantage the hook changed: 0 means it never acted."""
        changed = live = 0
        for scene in (replace(scene, advantages="token") for scene in self.varied):
            mask_B_T = scene.mask()
            try:
                result_B_T = self._chain(fresh(self.plugin), scene)
            except TRLGRPOExtError:  # a rule has reported it
                continue
            different_B_T = ~torch.isclose(result_B_T, scene.incoming()) & (mask_B_T > 0)
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
