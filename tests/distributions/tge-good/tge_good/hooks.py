"""A hook."""

from typing import Any

from trl_grpo_ext.types import HookDeclaration


class Scale:
    """Multiply every advantage."""

    declares = HookDeclaration(role="transform")

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    def on_rollout(self, advantages_B_T: Any, rollout: Any) -> Any:
        return advantages_B_T * self.factor
