"""Progress bars in a terminal, and one readable line per log in place of transformers' printed dictionaries."""

from __future__ import annotations

import math
import sys
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.utils.logging import disable_progress_bar


class RewardLines(TrainerCallback):
    """One line per log under a header: each reward function's mean, length, and share of groups without signal."""

    header: tuple[str, ...] = ()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "reward" not in logs:
            return
        means = {
            key.split("/")[1]: value for key, value in logs.items() if key.startswith("rewards/") and "/mean" in key
        }
        cells = {"step".rjust(2 * len(str(state.max_steps)) + 1): f"{state.global_step}/{state.max_steps}"}
        for name, value in {"reward": logs["reward"], **(means if len(means) > 1 else {})}.items():
            cells[name] = f"{math.nan if value is None else value:.3f}"  # None: it scored no completion
        cells["length"] = f"{logs.get('completions/mean_length', math.nan):.1f}"
        cells["no signal"] = f"{logs.get('frac_reward_zero_std', math.nan):.0%}"
        if tuple(cells) != self.header:
            self.header = tuple(cells)
            tqdm.write("  ".join(cells), file=sys.stdout)
        tqdm.write("  ".join(cell.rjust(len(name)) for name, cell in cells.items()), file=sys.stdout)
        sys.stdout.flush()


class Bars(ProgressCallback):
    """The trainer's bars, named, and without its lines."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description("training")

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)
        if self.prediction_bar is not None:
            self.prediction_bar.set_description("evaluating")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Leave the lines to `RewardLines`."""


def quiet_libraries() -> None:
    """Leave the terminal to the recipe: no bars for reading and writing weights."""
    disable_progress_bar()


def use_reward_progress(trainer: Trainer) -> None:
    """Replace the trainer's own printing; bars only where somebody watches them, not in a log file."""
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(RewardLines())
    if sys.stderr.isatty() and not trainer.args.disable_tqdm:
        trainer.add_callback(Bars())
