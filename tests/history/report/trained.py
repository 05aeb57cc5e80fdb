"""Two real trainings of the tiny model in folders of one parent, and folders with a history alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import length_reward, prompts, train


def short_ones(completions: list[str], **columns: Any) -> list[float | None]:
    """Says nothing about a completion of one character."""
    return [None if len(text) < 2 else float(len(text) < 12) for text in completions]


def train_two(model: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Train `one` and `two` in a folder, with everything that a report shows; each one's log history by name."""
    chosen: dict[str, Any] = {
        "one": ("seq_mean_token_mean", ["centred", {"name": "entropy_shaping", "alpha": 0.3}]),
        "two": ("token_mean", ["leave_one_out"]),
    }
    histories = {}
    for name, (aggregation, hooks) in chosen.items():
        run = train(
            model,
            folder / name,
            reward_funcs=[length_reward, short_ones],
            rewards=[{"name": "regex_match", "pattern": "[a-m]", "guard": {}}],
            loss_aggregation=aggregation,
            advantage_hooks=hooks,
            trainer_arguments={"eval_dataset": prompts(2)},
            max_steps=4,
            prompt_count=8,
            num_iterations=2,
            beta=0.04,
            token_records=8,
            mask_truncated_completions=name == "one",  # so that not every token is live
            log_completions=True,
            num_completions_to_print=0,
            eval_strategy="steps",
            eval_steps=2,
            per_device_eval_batch_size=8,
            save_strategy="steps",
            save_steps=2,
        )
        histories[name] = list(run.trainer.state.log_history)
    return histories


def write_history(folder: Path, history: Sequence[Any]) -> Path:
    """A run's folder that has only this history."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": list(history)}), encoding="ascii")
    return folder
