"""Judging a plugin on one generation batch after another, its own exceptions included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .builders import UnequalGathers
from .running import Broken, NotChecked, over, raised
from .scenes import Scene, Setting, odd_beside_ordinary, ordinary


class SceneTrials:
    """The generation batches that a plugin is tried on, and how it is judged on them.

    Args:
        setting: Texts, columns and seed of the batches.
        deterministic: Whether the plugin says that it is.
    """

    def __init__(self, setting: Setting, deterministic: bool) -> None:
        self.setting, self.deterministic = setting, deterministic
        self.ordinary = ordinary(setting)
        self.varied = [*self.ordinary, *odd_beside_ordinary(setting)]

    def _over(
        self, scenes: Iterable[Scene], judge: Callable[[Scene], Any], where: str = "", unequal_gathers: bool = True
    ) -> None:
        """Judge scenes, the plugin's exceptions too; those on odd batches are for the rules about these to report."""
        no_news = [] if scenes is not self.varied else self.varied[len(self.ordinary) :]

        def guarded(scene: Scene) -> None:
            try:
                judge(scene)
            except (Broken, NotChecked):
                raise
            except UnequalGathers:
                if unequal_gathers:
                    raise
            except Exception as error:  # the plugin's own, whatever it is
                if not any(scene is known for known in no_news):
                    raise Broken(f"it {raised(error)}{f' ({where})' if where else ''}", str(scene)) from error

        over(scenes, guarded, Scene.smaller)
