"""Trainings that are resumed with other plugins, on a rank of several."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from tests.support import arguments, length_reward, prompts, scripted_rollout
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.errors import TRLGRPOExtError
from trl_grpo_ext.launch.checkpoints import SafeCheckpoints

Attempt = dict[str, Any]
"""Settings of `tests.support.arguments` with `output_dir`, and

- `resume`: what `train` gets,
- `safe: true`: with `SafeCheckpoints`,
- `by_rank: [...]`: settings of each rank alone.
"""


class SafeTrainer(SafeCheckpoints, GRPOExtTrainer):
    """With checkpoints that survive."""


def attempt(model: Path, settings: Attempt, rank: int) -> dict[str, Any]:
    """Train once, and say how it ended."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, **settings}
    settings |= settings.pop("by_rank", [{}] * (rank + 1))[rank]
    resume, safe = settings.pop("resume", None), settings.pop("safe", False)
    folder = Path(settings.pop("output_dir"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer = (SafeTrainer if safe else GRPOExtTrainer)(
                str(model),
                length_reward,
                arguments(folder, **settings),
                train_dataset=prompts(),
                rollout_func=scripted_rollout,
            )
            trainer.train(resume_from_checkpoint=resume)
        except TRLGRPOExtError as error:
            return {"error": type(error).__name__, "message": str(error)}
    notes = [str(w.message) for w in caught if w.category.__name__ == "ManifestWarning"]
    return {"steps": trainer.state.global_step, "warnings": notes}


def run_attempts(attempts: list[Attempt], model: str) -> list[dict[str, Any]]:
    """The outcome of each on this rank."""
    return [attempt(Path(model), settings, int(os.environ.get("RANK", "0"))) for settings in attempts]
