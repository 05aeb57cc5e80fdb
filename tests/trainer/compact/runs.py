"""Pairs of trainings with and without compact updates, and how far apart they are."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.support import Run, relative_gap, train
from tests.trainer import parity_grid
from tests.trainer.process_worker import Float64CompactTrainer, reward_with_flat_groups, uneven_rollout
from trl_grpo_ext.trainer.compact.updates import Freedom

EXACT = {"float64": 1e-9, "float32": 1e-5}
DIFFERENT = 1e-3
LOGGED = 1e-6
"""Relative; transformers adds the losses of a step up in float32."""


class Seen(Float64CompactTrainer):
    """Keeps the shapes that the loss is computed on, and what counts there."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        super().__init__(*arguments, **keywords)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.model.training:
            lengths = zip(inputs["prompt_mask"].sum(1).tolist(), inputs["completion_mask"].sum(1).tolist(), strict=True)
            self.seen.append(
                {
                    "step": self.state.global_step,
                    "computed": inputs["prompt_ids"].numel() + inputs["completion_ids"].numel(),
                    "rows": len(inputs["prompt_ids"]),
                    "lengths": [sum(both) for both, a in zip(lengths, inputs["advantages"], strict=True) if a.any()],
                }
            )
        return super()._compute_loss(model, inputs)


COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "prompt_count": 8,
    "reward_funcs": reward_with_flat_groups,
    "learning_rate": 0.02,
}
"""Sixteen completions of four prompts for each optimizer step; two of the prompts have no signal."""


def pair(model: Path, folder: Path, trainer_class: type = Float64CompactTrainer, **overrides: Any) -> tuple[Run, Run]:
    """A training with `compact_updates: exact`, and the same with `off`."""
    found = {"dtype": "float64", **COMMON, **overrides}
    found["trainer_arguments"] = {"rollout_func": uneven_rollout, **found.get("trainer_arguments", {})}
    exact = train(model, folder / "exact", trainer_class, **found, compact_updates="exact")
    found.pop("share_prompts", None)
    return exact, train(model, folder / "off", trainer_class, **found)


def gaps(ours: Run, theirs: Run) -> list[float]:
    assert len(theirs.gradients) >= 1
    assert parity_grid.loss_gap(ours, theirs) < LOGGED
    steps = [relative_gap(*step) for step in zip(ours.gradients, theirs.gradients, strict=True)]
    return [*steps, relative_gap(ours.weights, theirs.weights)]


def compact_logs(run: Run) -> list[dict[str, float]]:
    """The metrics of compact updates at each step; no metric at all may be undefined."""
    assert not [name for log in run.logs for name, value in log.items() if math.isnan(value)]
    return [
        {name.removeprefix("compact/"): value for name, value in log.items() if name.startswith("compact/")}
        for log in run.logs
        if "loss" in log
    ]


FREE = Freedom(sort=True, drop=True, any_count=True, trim_left=True)
ALL_ROWS_RUN = replace(FREE, drop=False)
SORTED = replace(FREE, drop=False, any_count=False)


class Bonus:
    """A forward hook that is not homogeneous in the advantages and gives rows without any one."""

    per_completion = True

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T + torch.minimum(0.1 * forward.entropies_B_T, 0.5 + advantages_B_T.abs())


class Whitened(Bonus):
    """A forward hook that looks at its whole micro-batch."""

    per_completion = False

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        mean: torch.Tensor = (advantages_B_T * forward.mask_B_T).sum() / forward.mask_B_T.sum().clamp(min=1.0)
        return advantages_B_T - mean
