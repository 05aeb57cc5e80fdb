"""Every response of a training with its log-probabilities and its delta, as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trl_grpo_ext.types import HookDeclaration

if TYPE_CHECKING:
    from trl_grpo_ext.types import Forward, Rollout


class ResponseLog:
    """An advantage hook that changes nothing and writes down each response at the loss forward, as the lecture does.

    For every response its tokens' log-probabilities under the policy as it is now, its reward and its delta (the
    advantage); responses of one prompt stand together. It stands before `sorting.naive:Naive`, which divides advantages
    by the importance ratio.

    Args:
        file: Text that is appended to; each process appends what it trains on.
        every: Only the forwards at every so many optimizer steps.

    Source: `print_information` of Stanford CS336 (2025), lecture 17.
    """

    __name__ = "response_log"
    declares = HookDeclaration(role="transform", needs=("old_logps",), independent=True)

    def __init__(self, *, file: str, every: int = 5) -> None:
        self.file = Path(file)
        self.every = every
        self._prompts: dict[tuple[object, ...], str] = {}

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Keep which prompt a response belongs to; return the advantages `(B, T)` as they are."""
        if not rollout.training or rollout.old_logps_B_T is None:
            return advantages_B_T
        rows = zip(rollout.completion_ids_B_T, rollout.old_logps_B_T, rollout.mask_B_T, strict=True)
        self._prompts = {
            _key(*row): rollout.tokenizer.decode(rollout.prompt_ids_B_P[i][rollout.prompt_mask_B_P[i] > 0])
            for i, row in enumerate(rows)
        }
        self._decode = rollout.tokenizer.decode
        return advantages_B_T

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Write; return the advantages `(B, T)` as they are."""
        if forward.training and forward.step % self.every == 0:
            by_prompt: dict[str, list[str]] = {}
            for row, mask_T in enumerate(forward.mask_B_T > 0):
                ids_T = forward.completion_ids_B_T[row]
                prompt = self._prompts.get(_key(ids_T, forward.old_logps_B_T[row], forward.mask_B_T[row]), "?")
                logps = ", ".join(f"{logp:.3f}" for logp in forward.logps_B_T[row][mask_T].tolist())
                delta = float(advantages_B_T[row][mask_T][0]) if bool(mask_T.any()) else 0.0
                by_prompt.setdefault(prompt, []).append(
                    f"    response = {self._decode(ids_T[mask_T])}, log_probs = [{logps}], "
                    f"reward = {float(forward.raw_rewards_B[row]):.3f}, delta = {delta:.3f}"
                )
            lines = [f"step = {forward.step}, reward = {float(forward.raw_rewards_B.nanmean()):.3f}"]
            for prompt, responses in sorted(by_prompt.items()):
                lines += [f"  prompt = {prompt}", *responses]
            with self.file.open("a", encoding="utf-8") as file:
                file.write("\n".join([*lines, ""]))
        return advantages_B_T


def _key(ids_T: torch.Tensor, old_logps_T: torch.Tensor, mask_T: torch.Tensor) -> tuple[object, ...]:
    """Of a response: equal ones of different prompts differ by their log-probabilities."""
    live = mask_T > 0
    return (*ids_T[live].tolist(), *old_logps_T[live].tolist())
