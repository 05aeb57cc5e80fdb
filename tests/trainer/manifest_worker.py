"""Trainings that are resumed with other plugins, in one process or, under torchrun, in several.

    python -m tests.trainer.manifest_worker ATTEMPTS MODEL OUT

ATTEMPTS is a JSON list of `Attempt`s; each one's outcome is written to `OUT/rankN.json`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

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


def main() -> None:
    attempts, model, out = (Path(argument) for argument in sys.argv[1:])
    rank = int(os.environ.get("RANK", "0"))
    outcomes = [attempt(model, settings, rank) for settings in json.loads(attempts.read_text())]
    (out / f"rank{rank}.json").write_text(json.dumps(outcomes))
    if torch.distributed.is_initialized():
        assert torch.distributed.get_world_size() == int(os.environ["WORLD_SIZE"]) > 1
        torch.distributed.destroy_process_group()
        time.sleep(0.2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()
    main()
