"""A training in a process of its own: `python -m tests.trainer.live.worker MODEL OUTPUT '{"max_steps": 4}'`.

Its second reward takes `seconds` of each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.support import length_reward, train

ROOT = Path(__file__).parents[3]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}


def main(model: str, output: str, settings: str) -> None:
    """Train."""
    chosen: dict[str, Any] = json.loads(settings)
    seconds = chosen.pop("seconds", 0.0)

    def second_reward(completions: list[str], **columns: Any) -> list[float]:
        time.sleep(seconds)
        return [float(len(text) % 2) for text in completions]

    train(Path(model), Path(output), reward_funcs=[length_reward, second_reward], **chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
