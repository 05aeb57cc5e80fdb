"""A training in a process of its own: `python -m tests.live_worker MODEL OUTPUT '{"max_steps": 4}'`.

Its second reward takes its time where `SECONDS` of a step is above 0, and says how far it is where it is `steady`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.support import length_reward, train
from trl_grpo_ext.guard.progress import scored


def main(model: str, output: str, settings: str) -> None:
    """Train."""
    chosen: dict[str, Any] = json.loads(settings)
    seconds, steady = chosen.pop("seconds", 0.0), chosen.pop("steady", False)

    def second_reward(completions: list[str], **columns: Any) -> list[float]:
        for row in range(len(completions)):
            time.sleep(seconds / len(completions))
            if steady:
                scored(row + 1, len(completions))
        return [float(len(text) % 2) for text in completions]

    train(Path(model), Path(output), reward_funcs=[length_reward, second_reward], **chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
