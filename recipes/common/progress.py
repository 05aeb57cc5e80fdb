"""What a recipe prints while it trains: a line for each log entry."""

from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.utils.logging import disable_progress_bar


class ShortLines(PrinterCallback):
    """Prints the rewards of a log entry, where transformers prints all of it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> None:
        """Print a line for a training batch, or for an evaluation."""
        when = "eval_" if "eval_reward" in logs else ""
        if state.is_world_process_zero and logs.get(f"{when}reward") is not None:
            reward = logs[f"{when}reward"]
            length = logs[f"{when}completions/mean_length"]
            what = "held out" if when else "training"
            print(f"step {state.global_step:>4}  {what}: reward {reward:.3f}, length {length:.1f}", flush=True)


def print_short_lines(trainer: Trainer) -> None:
    """Put `ShortLines` in the place of what transformers prints."""
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(ShortLines())


def quiet_libraries() -> None:
    """Leave the terminal to the recipe: no bars for reading and writing weights."""
    disable_progress_bar()
