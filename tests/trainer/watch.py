"""Hooks that change nothing and keep what they see."""

import torch

from trl_grpo_ext import Forward, Rollout
from trl_grpo_ext.types import HookDeclaration


class Watch:
    """Keeps the advantages and the rollout of each generation batch."""

    def __init__(self, *needs: str, teachers: tuple[str, ...] = ()) -> None:
        self.declares = HookDeclaration(role="transform", needs=needs, teachers=teachers)
        self.seen: list[tuple[torch.Tensor, Rollout]] = []

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for _, rollout in self.seen]

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        self.seen.append((advantages_B_T, rollout))
        return advantages_B_T


class WatchBoth(Watch):
    """Keeps those of each loss forward too."""

    def __init__(self, *needs: str) -> None:
        super().__init__(*needs)
        self.forwards: list[tuple[torch.Tensor, Forward]] = []

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        self.forwards.append((advantages_B_T.clone(), forward))
        return advantages_B_T
