"""Trying a hook on small generation batches: alone, in other orders, on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import TRLGRPOExtError
from ..types import Forward, Rollout, implements
from .builders import Ranks, UnequalGathers, cut
from .comparing import fresh, same
from .running import Broken, NotChecked
from .scene_trials import SceneTrials
from .scenes import Scene, Setting

STAGES = ("on_rollout", "on_forward")


class HookTrials(SceneTrials):
    """The checks of one hook.

    Args:
        hook: The hook.
        setting: Texts, columns and seed of the batches.
        deterministic: Whether the hook says that it is.
    """

    def __init__(self, hook: Any, setting: Setting, deterministic: bool = True) -> None:
        teachers = getattr(hook, "teachers", ())
        if isinstance(teachers, tuple | list):
            setting = replace(setting, teachers=tuple(name for name in teachers if isinstance(name, str)))
        super().__init__(setting, deterministic)
        self.hook = hook
        self.stages = [stage for stage in STAGES if implements(hook, stage)]

    def _context(self, scene: Scene, stage: str, **settings: Any) -> Rollout | Forward:
        return scene.rollout(**settings) if stage == "on_rollout" else scene.forward(**settings)

    def _raw(self, stage: str, advantages_B_T: torch.Tensor, context: Any) -> Any:
        with torch.no_grad():
            return getattr(fresh(self.hook), stage)(advantages_B_T, context)

    def _result(self, stage: str, advantages_B_T: torch.Tensor, context: Any, hook: Any = None) -> torch.Tensor:
        """What the trainer makes of the result: spans added, and zeros off the mask."""
        with torch.no_grad():
            result = getattr(fresh(self.hook) if hook is None else hook, stage)(advantages_B_T, context)
            if isinstance(result, list | tuple):
                result = advantages_B_T + context.span_values(result).to(advantages_B_T.dtype)
        if not isinstance(result, torch.Tensor) or result.shape != context.mask_B_T.shape:
            raise Broken(f"{stage} did not return a tensor {tuple(context.mask_B_T.shape)}")
        return torch.where(context.mask_B_T > 0, result, torch.zeros_like(result))

    def _chain(self, hook: Any, scene: Scene, training: bool = True) -> torch.Tensor:
        """Both stages of one hook object, one after the other."""
        advantages_B_T = scene.incoming()
        for stage in self.stages:
            context = self._context(scene, stage, training=training)
            advantages_B_T = self._result(stage, advantages_B_T, context, hook)
        return advantages_B_T

    def _each_stage(self, scene: Scene, judge: Callable[[Any, str, Any, Scene], None]) -> None:
        for stage in self.stages:
            context = self._context(scene, stage)
            judge(self._raw(stage, scene.incoming(), context), stage, context, scene)

    def _spans(self, spans: Sequence[Any], rollout: Rollout, scene: Scene) -> None:
        try:
            rollout.span_values(spans)
        except (TRLGRPOExtError, TypeError, ValueError) as error:
            raise Broken(
                f"on_rollout returned {type(spans).__name__}, which is no spans: {error}", str(scene)
            ) from error

    def _permuted(self, turned: Callable[[Scene], list[int]], what: str) -> None:
        self._deterministic_only()

        def judge(scene: Scene) -> None:
            order = turned(scene)
            other = replace(scene, rows=tuple(scene.rows[place] for place in order))
            for stage in self.stages:
                plain_B_T = self._result(stage, scene.incoming(), self._context(scene, stage))
                other_B_T = self._result(stage, other.incoming(), self._context(other, stage))
                same(plain_B_T[order], other_B_T, f"{stage}, {what}", other, other.mask())

        self._over(self.varied, judge)

    def _on_ranks(self, scene: Scene, unequal_gathers: bool = False) -> Iterable[tuple[int, torch.Tensor]]:
        """The result of on_rollout on two and on three ranks, as far as the rows can be dealt out evenly."""
        for count in (2, 3):
            if len(scene.rows) % count:
                continue
            totals = replace(scene.totals(), processes=count)
            ranks = Ranks(cut(scene.rollout(totals=totals), [len(scene.rows) // count] * count))
            incoming_B_T = scene.incoming()
            try:
                parts = ranks.run(
                    lambda rollout, all_B_T=incoming_B_T: self._result(  # type: ignore[misc]
                        "on_rollout", all_B_T[rollout.local_rows], rollout
                    )
                )
            except UnequalGathers as error:
                if unequal_gathers:
                    raise Broken(f"on {count} ranks {error}", str(scene)) from error
                raise
            yield count, torch.cat(parts)

    def _deterministic_only(self) -> None:
        if not self.deterministic:
            raise NotChecked("it declares deterministic = False")

    def _rollout_only(self) -> None:
        if "on_rollout" not in self.stages:
            raise NotChecked("it has no on_rollout")
