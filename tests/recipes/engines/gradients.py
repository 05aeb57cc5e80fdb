"""Two steps of plain SGD on scripted rollouts, whose weights say the gradient: `... CASES.json MODEL FOLDER ROWS`."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.support import train


def run_case(model: Path, folder: Path, rows: int, case: dict[str, Any]) -> None:
    settings = {"per_device_train_batch_size": rows, "prompt_count": 8, "max_steps": 2, "beta": 0.04, **case}
    hooks = settings.pop("hooks", None)
    run = train(model, folder, trainer_arguments={"advantage_hooks": hooks} if hooks else None, **settings)
    run.trainer.save_model()
    if case.get("compact_updates"):
        assert run.trainer._trl_grpo_ext.losses.updates._trials.exact.packed
    if case.get("share_prompts"):
        planned = [log for log in run.logs if "compact/live_tokens" in log]
        assert planned
        assert all(log["compact/computed_tokens"] < log["compact/live_tokens"] for log in planned)


if __name__ == "__main__":
    cases, model, folder, rows = sys.argv[1:]
    for name, case in json.loads(Path(cases).read_text()).items():
        run_case(Path(model), Path(folder, name), int(rows), case)
