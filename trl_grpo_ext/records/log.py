"""A training log that is always up to date: `OUTPUT_DIR/trl_grpo_ext_log.jsonl`.

It has the entries of `trainer_state.json`, which TRL writes only with a checkpoint: one JSON object per line, NaN and
infinity as null. When training begins, it is rewritten with the history so far, the checkpoint's if the run resumes.
When training ends, what went wrong is printed (`findings`).
"""

import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..guard.untrusted import as_json
from .findings import findings_of
from .token_records import set_aside_records_after

__all__ = ["LOG_FILE", "LiveLog"]

LOG_FILE = "trl_grpo_ext_log.jsonl"


class LiveLog(TrainerCallback):
    """Writes `LOG_FILE` into the output folder, on the main process. A full disk costs the file, not the run."""

    def __init__(self) -> None:
        self._written = 0
        self._path: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the history so far; later token records, of an earlier run, are set aside."""
        if state.is_world_process_zero:
            self._path = Path(args.output_dir) / LOG_FILE
            self._written = 0
            self._write(state.log_history, "w")
            try:
                set_aside_records_after(state.global_step, args.output_dir)
            except OSError as error:
                warnings.warn(f"Token records of an earlier run stay: {error}.", stacklevel=2)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._write(state.log_history, "a")

    def _write(self, history: Sequence[dict[str, Any]], mode: str) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode, encoding="utf-8") as file:
                file.writelines(json.dumps(as_json(one), allow_nan=False) + "\n" for one in history[self._written :])
        except OSError as error:
            warnings.warn(f"The log stops, and training goes on: {error}.", stacklevel=3)
            self._path = None
        self._written = len(history)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print on stderr what went wrong in the run, if anything did."""
        if not state.is_world_process_zero or sys.stderr is None:
            return
        try:
            found = list(map(str, findings_of(args.output_dir, state.log_history)))
        except Exception as error:  # whatever a log holds, a finished training must be saved
            found = [f"unknown, since they cannot be computed: {error!r}. The report shows the rest."]
        if found:
            with suppress(OSError, ValueError):  # a closed stderr, or one that nobody reads
                shown = f"trl-grpo-ext report {args.output_dir} shows it"
                print(f"trl-grpo-ext: what went wrong ({shown}):", *found, sep="\n", file=sys.stderr)
