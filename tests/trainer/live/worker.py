"""A training in a process of its own: `python -m tests.trainer.live.worker MODEL OUTPUT '{"max_steps": 4}'`.

Its second reward takes its time where `seconds` of a step is above 0, and says how far it is where it is `steady`. Its
model takes `per_token` seconds for every token.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tests.support import length_reward, train
from trl_grpo_ext.guard.progress import report_progress

ROOT = Path(__file__).parents[3]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}


class SlowModel(TrainerCallback):
    """Sleeps in the output layer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.get_output_embeddings().register_forward_hook(lambda *_: time.sleep(self.seconds))


def main(model: str, output: str, settings: str) -> None:
    """Train."""
    chosen: dict[str, Any] = json.loads(settings)
    seconds, steady = chosen.pop("seconds", 0.0), chosen.pop("steady", False)
    callbacks = [SlowModel(each)] if (each := chosen.pop("per_token", 0.0)) else []

    def second_reward(completions: list[str], **columns: Any) -> list[float]:
        for row in range(len(completions)):
            time.sleep(seconds / len(completions))
            if steady:
                report_progress(row + 1, len(completions))
        return [float(len(text) % 2) for text in completions]

    functions = [length_reward, second_reward]
    train(Path(model), Path(output), reward_funcs=functions, trainer_arguments={"callbacks": callbacks}, **chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
