"""How often training solved each prompt: `prompt_rates: true` writes `OUTPUT_DIR/prompt_rates.jsonl`.

A line is one group: `{"step": 12, "prompt": ..., "solved": 3, "sampled": 8, "rate": 0.375}`, in the order of training.
A completion solves its prompt if it reaches every threshold of `pass_thresholds`; one that a reward left out is not
counted. A resumed run keeps the lines before its checkpoint.

A group in which all or no completions solve the prompt gives no gradient under GRPO.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from .files import write_atomically

RATES_FILE = "prompt_rates.jsonl"


def solved_groups(
    rewards_N_K: torch.Tensor, thresholds: Mapping[tuple[int, str], float], group_size: int
) -> list[tuple[int, int]]:
    """For every group, count the completions that solve the prompt and those that were judged.

    Thresholds are by reward column and name.
    """
    columns = [column for column, _ in thresholds]
    judged_N = ~torch.isnan(rewards_N_K[:, columns]).any(dim=1)
    solved_N = judged_N.clone()
    for (column, _), threshold in thresholds.items():
        solved_N &= rewards_N_K[:, column] >= threshold
    pairs_Q_2 = torch.stack([solved_N.view(-1, group_size).sum(1), judged_N.view(-1, group_size).sum(1)], dim=1)
    return [(int(solved), int(judged)) for solved, judged in pairs_Q_2.tolist()]


def shares_of(groups: Sequence[tuple[int, int]]) -> dict[str, float]:
    """The shares of groups in which all, and in which no, completions solve the prompt; empty if none was judged."""
    known = [(solved, judged) for solved, judged in groups if judged]
    if not known:
        return {}
    return {
        "groups/all_solved": sum(solved == judged for solved, judged in known) / len(known),
        "groups/none_solved": sum(solved == 0 for solved, _ in known) / len(known),
    }


class PromptRates(TrainerCallback):
    """Writes the file, on the main process. A full disk costs the file, not the run."""

    def __init__(self, thresholds: Mapping[tuple[int, str], float], group_size: int) -> None:
        self.thresholds, self.group_size = thresholds, group_size
        self._path: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the lines of earlier steps; drop the rest, which a training after this checkpoint wrote."""
        if not state.is_world_process_zero:
            return
        self._path = path = Path(args.output_dir) / RATES_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [line for line in _lines(path) if _step_of(line) < state.global_step] if path.is_file() else []
            write_atomically(path, "".join(f"{line}\n" for line in kept))
        except OSError as error:
            self._give_up(error)

    def write(self, step: int, prompts: Sequence[Any], groups: Sequence[tuple[int, int]]) -> None:
        """Add a generation batch: one prompt for each of the groups that `solved_groups` returned."""
        if self._path is None:
            return
        lines = []
        for prompt, (solved, judged) in zip(prompts, groups, strict=True):
            if judged:
                entry = {"step": step, "prompt": prompt, "solved": solved, "sampled": judged, "rate": solved / judged}
                # Parts of a prompt that are not text count by their kind alone.
                lines.append(json.dumps(entry, default=lambda other: type(other).__name__) + "\n")
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        warnings.warn(f"{self._path} cannot be written: {error}. Training goes on.", stacklevel=3)
        self._path = None


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]


def _step_of(line: str) -> float:
    """The step of a line; infinity for a line that an interrupted run left incomplete."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
